"""Paged decode on Hopper: one block for each (KV head, sequence, split).

    page table -> TMA copies of whole pages -> tiles of K and V in shared memory
               -> WGMMA -> online softmax -> WGMMA -> a float32 partial

The query heads of a KV head are the rows of one 64-row tile.  While a tile is
computed on, the copies of the next are under way, and the page ids of the one
after that are being read.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.merge_states import api as merge_api
from pallas_kernels.paged_attention import gpu_copies
from pallas_kernels.paged_attention import gpu_tile
from pallas_kernels.paged_attention import gpu_tiles
from pallas_kernels.paged_attention import operands as operands_lib

Ref = Any


def decode(
  operands: operands_lib.Operands,
  options: operands_lib.Options,
  lo: jax.Array,  # int32 [sequences], first row that is seen
  hi: jax.Array,  # int32 [sequences], one past the last
) -> tuple[jax.Array, jax.Array]:
  """Attends from one query row of each sequence.

  Args:
    operands: of the call; sinks are not read.
    options: of the call.
    lo: with hi, the rows of each sequence that its query sees.
    hi: see lo.

  Returns:
    `(out, lse)`, out [sequences, q_heads, v_head_dim], float32 where it was
    split and else of q's dtype, lse float32 [sequences, q_heads].
  """
  tiles = gpu_tiles.decode_tiles(operands, options)
  spec = gpu_tile.spec_of(operands, options, tiles, workers=1)
  pages = gpu_copies.pages_of(operands, spec)
  sequences, q_heads, head_dim = operands.q.shape
  kv_heads = options.kv_heads
  group = q_heads // kv_heads
  rows = -(-group // 8) * 8
  grouped = operands.q.reshape(sequences, kv_heads, group, head_dim)
  grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, rows - group), (0, 0)))
  cut = (tiles.splits, sequences, kv_heads)
  run = plgpu.kernel(
    functools.partial(_body, spec=spec, splits=tiles.splits, rows=rows),
    out_type=[
      jax.ShapeDtypeStruct(
        (*cut, rows, spec.v_head_dim), _out_dtype(spec, tiles)
      ),
      jax.ShapeDtypeStruct((*cut, gpu_tiles.QUERY_ROWS), jnp.float32),
    ],
    scratch_types=scratch(spec, tiles),
    grid=(kv_heads, sequences, tiles.splits),
    grid_names=("head", "sequence", "split"),
    compiler_params=plgpu.CompilerParams(
      approx_math=True,
      reduction_scratch_bytes=512,
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    ),
    interpret=_compat.gpu_interpreter(),
  )
  out, lse = run(grouped, lo, hi, pages)
  out = out[..., :group, :].reshape(tiles.splits, sequences, q_heads, -1)
  lse = lse[..., :group].reshape(tiles.splits, sequences, q_heads)
  if tiles.splits == 1:
    return out[0], lse[0]
  return merge_api.merge_states(out, lse, implementation="xla")


def scratch(
  spec: gpu_tile.Spec, tiles: gpu_tiles.DecodeTiles
) -> dict[str, Any]:
  """What a block keeps in shared memory."""
  team = (gpu_tiles.QUERY_ROWS,)
  return {
    "q_s": gpu_tile.tiled(team, spec.head_dim, spec.dtype),
    "out_s": gpu_tile.tiled(team, spec.v_head_dim, _out_dtype(spec, tiles)),
    "lse_s": plgpu.SMEM(team, jnp.float32),
    "q_ready": plgpu.Barrier(num_barriers=1),
    "tiles_s": gpu_copies.scratch(spec),
  }


def _out_dtype(spec: gpu_tile.Spec, tiles: gpu_tiles.DecodeTiles) -> Any:
  """Partials stay float32 until they are merged."""
  return spec.dtype if tiles.splits == 1 else jnp.float32


def _body(
  q_g: Ref,  # [sequences, kv_heads, rows, head_dim]
  lo_g: Ref,  # int32 [sequences]
  hi_g: Ref,  # int32 [sequences]
  pages: Any,  # gpu_copies.Pages of refs
  out_g: Ref,  # [splits, sequences, kv_heads, rows, v_head_dim]
  lse_g: Ref,  # float32 [splits, sequences, kv_heads, 64]
  *,
  q_s: Ref,  # [64, head_dim]
  out_s: Ref,  # [64, v_head_dim]
  lse_s: Ref,  # float32 [64]
  q_ready: Ref,
  tiles_s: Any,  # gpu_copies.Tiles
  spec: gpu_tile.Spec,
  splits: int,
  rows: int,
) -> None:
  head = lax.axis_index("head")
  sequence = lax.axis_index("sequence")
  split = lax.axis_index("split")
  lo, hi = lo_g[sequence], hi_g[sequence]
  team = gpu_tile.Team()
  first, last = _steps(lo, hi, split, splits, spec.key_rows)

  # Rows past the group's hold what was there before: no row reads another's.
  plgpu.copy_gmem_to_smem(
    q_g.at[sequence, head], q_s.at[pl.ds(0, rows)], q_ready.at[0]
  )
  ids = functools.partial(gpu_copies.page_ids, pages, sequence, spec=spec)
  start = functools.partial(gpu_copies.start, pages, tiles_s, head, spec=spec)
  for ahead in range(spec.stages - 1):

    @pl.when(first + ahead < last)
    def _(ahead: int = ahead) -> None:
      start(ids(first + ahead), first + ahead, ahead)

  plgpu.barrier_wait(q_ready.at[0])

  def step(index: jax.Array, carry: Any) -> Any:
    state, next_ids = carry
    slot = lax.rem(index - first, jnp.int32(spec.stages))
    ahead = index + (spec.stages - 1)

    @pl.when(ahead < last)
    def _() -> None:
      start(next_ids, ahead, lax.rem(ahead - first, jnp.int32(spec.stages)))

    next_ids = ids(ahead + 1)
    first_row = index * spec.key_rows
    k, k_scales = gpu_copies.keys(tiles_s, slot, spec, team)
    found = gpu_tile.logits(q_s, k, k_scales, spec)
    row = gpu_tile.key_index(first_row, spec)
    found = jnp.where(
      (row >= lo) & (row < hi), found, jnp.full_like(found, -jnp.inf)
    )
    weights, state = gpu_tile.softmax_step(state, found)
    v, weights = gpu_copies.values(
      tiles_s, slot, weights, first_row, lo, hi, spec, team
    )
    out = gpu_tile.accumulate(state.out, weights, v, interpret=spec.interpret)
    state = gpu_tile.State(out=out, top=state.top, total=state.total)
    return state, next_ids

  carry = gpu_tile.empty_state(spec), ids(first + (spec.stages - 1))
  state, _ = lax.fori_loop(first, last, step, carry)
  out, lse = gpu_tile.finish(state)
  out_s[...] = out.astype(out_s.dtype)
  lse_s[...] = lse
  plgpu.commit_smem()
  at = (split, sequence, head)
  plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, rows)], out_g.at[at])
  plgpu.copy_smem_to_gmem(lse_s, lse_g.at[at])
  plgpu.wait_smem_to_gmem(0)


def _steps(
  lo: jax.Array, hi: jax.Array, split: jax.Array, splits: int, key_rows: int
) -> tuple[jax.Array, jax.Array]:
  """The steps of one split: those that hold a seen row, shared out evenly."""
  begin = lax.div(lo, jnp.int32(key_rows))
  end = lax.div(hi + (key_rows - 1), jnp.int32(key_rows))
  share = lax.div(end - begin + (splits - 1), jnp.int32(splits))
  first = jnp.minimum(begin + split * share, end)
  return first, jnp.minimum(first + share, end)
