"""Ragged prefill on Hopper: one block for each (KV head, tile of query rows).

    memory warpgroup     page table -> TMA copies, as far ahead as there is room
                            |  ready: K and V have landed
                            v                            ^
    compute warpgroups   WGMMA -> softmax -> WGMMA       |  consumed
    (64 query rows each, the same K and V)

A tile holds query rows of one sequence: its tokens, times the query heads of
the KV head.  XLA gathers queries into tiles and results out of them, so that
no tile writes where another does.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.paged_attention import gpu_copies
from pallas_kernels.paged_attention import gpu_ragged
from pallas_kernels.paged_attention import gpu_tile
from pallas_kernels.paged_attention import gpu_tiles
from pallas_kernels.paged_attention import operands as operands_lib

Ref = Any
# Registers of a thread that computes and of one that copies, where two of the
# first and one of the second share 512.
REGISTERS = (232, 40)
WIDE_REGISTERS = (240, 24)


def prefill(
  operands: operands_lib.Operands,
  options: operands_lib.Options,
  lo: jax.Array,  # int32 [tokens], first row that is seen
  hi: jax.Array,  # int32 [tokens], one past the last
) -> tuple[jax.Array, jax.Array]:
  """Attends from ragged query rows.

  Args:
    operands: of the call; sinks are not read.
    options: of the call.
    lo: with hi, the rows of its sequence that each query sees.
    hi: see lo.

  Returns:
    `(out, lse)`, out [tokens, q_heads, v_head_dim] of q's dtype, lse float32
    [tokens, q_heads]; padded rows hold anything.
  """
  assert operands.query_starts is not None
  tiles = gpu_tiles.prefill_tiles(operands, options)
  spec = gpu_tile.spec_of(operands, options, tiles, workers=tiles.warpgroups)
  pages = gpu_copies.pages_of(operands, spec)
  kv_heads = options.kv_heads
  plan = gpu_ragged.plan(
    operands.query_starts,
    lo,
    hi,
    rows=tiles.query_rows,
    group=operands.q.shape[1] // kv_heads,
  )
  tiled_q = gpu_ragged.gather(operands.q, plan, kv_heads)
  cut = (kv_heads, plan.num_tiles)
  run = plgpu.kernel(
    functools.partial(_body, spec=spec),
    out_type=[
      jax.ShapeDtypeStruct(
        (*cut, tiles.query_rows, spec.v_head_dim), spec.dtype
      ),
      jax.ShapeDtypeStruct((*cut, tiles.query_rows), jnp.float32),
    ],
    scratch_types=scratch(spec),
    grid=cut,
    grid_names=("head", "tile"),
    num_threads=spec.workers + 1,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(
      approx_math=True,
      reduction_scratch_bytes=512,
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    ),
    interpret=_compat.gpu_interpreter(),
  )
  out, lse = run(tiled_q, plan.facts, plan.row_lo, plan.row_hi, pages)
  return gpu_ragged.scatter(out, plan), gpu_ragged.scatter(lse, plan)


def scratch(spec: gpu_tile.Spec) -> dict[str, Any]:
  """What a block keeps in shared memory."""
  team = (spec.workers, gpu_tiles.QUERY_ROWS)
  return {
    "q_s": gpu_tile.tiled(team, spec.head_dim, spec.dtype),
    "out_s": None
    if spec.v_head_dim == spec.head_dim
    else gpu_tile.tiled(team, spec.v_head_dim, spec.dtype),
    "lse_s": plgpu.SMEM(team, jnp.float32),
    "lo_s": plgpu.SMEM(team, jnp.int32),
    "hi_s": plgpu.SMEM(team, jnp.int32),
    "tiles_s": gpu_copies.scratch(spec),
    "q_ready": plgpu.Barrier(num_arrivals=3, num_barriers=spec.workers),
    "consumed": plgpu.Barrier(
      num_arrivals=spec.workers, num_barriers=spec.stages
    ),
    "meeting": plgpu.Barrier(num_arrivals=spec.workers, num_barriers=1),
  }


def _body(
  q_g: Ref,  # [kv_heads, tiles, rows, head_dim]
  facts_g: Ref,  # int32 [tiles, 5], see gpu_ragged.Plan
  lo_g: Ref,  # int32 [tiles, rows]
  hi_g: Ref,  # int32 [tiles, rows]
  pages: Any,  # gpu_copies.Pages of refs
  out_g: Ref,  # [kv_heads, tiles, rows, v_head_dim]
  lse_g: Ref,  # float32 [kv_heads, tiles, rows]
  *,
  q_s: Ref,  # [workers, 64, head_dim]
  out_s: Ref | None,  # [workers, 64, v_head_dim]; None: where q was
  lse_s: Ref,  # float32 [workers, 64]
  lo_s: Ref,  # int32 [workers, 64]
  hi_s: Ref,  # int32 [workers, 64]
  tiles_s: Any,  # gpu_copies.Tiles
  q_ready: Ref,
  consumed: Ref,
  meeting: Ref,
  spec: gpu_tile.Spec,
) -> None:
  head, tile = lax.axis_index("head"), lax.axis_index("tile")
  warpgroup = lax.axis_index("warpgroup")
  sequence, lo, hi, full_lo, full_hi = (facts_g[tile, i] for i in range(5))
  first = lax.div(lo, jnp.int32(spec.key_rows))
  last = lax.div(hi + (spec.key_rows - 1), jnp.int32(spec.key_rows))
  stages = jnp.int32(spec.stages)
  wide = spec.v_head_dim > 128
  compute_registers, memory_registers = WIDE_REGISTERS if wide else REGISTERS

  @pl.when(warpgroup == spec.workers)
  def _memory() -> None:
    if spec.workers > 1:
      plgpu.set_max_registers(memory_registers, action="decrease")

    def fetch(step: jax.Array, _: None) -> None:
      slot = lax.rem(step - first, stages)

      @pl.when(step - first >= stages)
      def _() -> None:
        plgpu.barrier_wait(consumed.at[slot])

      ids = gpu_copies.page_ids(pages, sequence, step, spec=spec)
      gpu_copies.start(pages, tiles_s, head, ids, step, slot, spec=spec)

    lax.fori_loop(first, last, fetch, None)

    def drain(step: jax.Array, _: None) -> None:
      plgpu.barrier_wait(consumed.at[lax.rem(step - first, stages)])

    lax.fori_loop(jnp.maximum(last - stages, first), last, drain, None)

  @pl.when(warpgroup < spec.workers)
  def _compute() -> None:
    if spec.workers > 1:
      plgpu.set_max_registers(compute_registers, action="increase")
    team = gpu_tile.Team(
      warpgroup, spec.workers, None if spec.workers == 1 else meeting
    )
    rows = pl.ds(warpgroup * gpu_tiles.QUERY_ROWS, gpu_tiles.QUERY_ROWS)
    mine, ready = q_s.at[warpgroup], q_ready.at[warpgroup]
    plgpu.copy_gmem_to_smem(q_g.at[head, tile, rows], mine, ready)
    plgpu.copy_gmem_to_smem(lo_g.at[tile, rows], lo_s.at[warpgroup], ready)
    plgpu.copy_gmem_to_smem(hi_g.at[tile, rows], hi_s.at[warpgroup], ready)
    plgpu.barrier_wait(ready)

    row_lo = gpu_tile.laid_out(lo_s.at[warpgroup][...], gpu_tile.ROWS, spec)
    row_hi = gpu_tile.laid_out(hi_s.at[warpgroup][...], gpu_tile.ROWS, spec)

    def step(index: jax.Array, state: gpu_tile.State) -> gpu_tile.State:
      slot = lax.rem(index - first, stages)
      first_row = index * spec.key_rows
      k, k_scales = gpu_copies.keys(tiles_s, slot, spec, team)
      found = gpu_tile.logits(mine, k, k_scales, spec)
      found = lax.cond(
        (first_row < full_lo) | (first_row + spec.key_rows > full_hi),
        lambda x: _masked(x, first_row, row_lo, row_hi, spec),
        lambda x: x,
        found,
      )
      weights, state = gpu_tile.softmax_step(state, found)
      v, weights = gpu_copies.values(
        tiles_s, slot, weights, first_row, lo, hi, spec, team
      )
      out = gpu_tile.accumulate(state.out, weights, v, interpret=spec.interpret)
      plgpu.barrier_arrive(consumed.at[slot])
      return gpu_tile.State(out=out, top=state.top, total=state.total)

    state = lax.fori_loop(first, last, step, gpu_tile.empty_state(spec))
    out, lse = gpu_tile.finish(state)
    into = mine if out_s is None else out_s.at[warpgroup]
    into[...] = out.astype(into.dtype)
    lse_s.at[warpgroup][...] = lse
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(into, out_g.at[head, tile, rows])
    plgpu.copy_smem_to_gmem(lse_s.at[warpgroup], lse_g.at[head, tile, rows])
    plgpu.wait_smem_to_gmem(0)


def _masked(
  found: jax.Array,  # float32 [64, key_rows]
  first_row: jax.Array,
  row_lo: jax.Array,  # int32 [64]
  row_hi: jax.Array,  # int32 [64]
  spec: gpu_tile.Spec,
) -> jax.Array:
  """Logits with -inf where a query does not see the key."""
  key = gpu_tile.key_index(first_row, spec)
  lo = lax.broadcast_in_dim(row_lo, found.shape, (0,))
  hi = lax.broadcast_in_dim(row_hi, found.shape, (0,))
  return jnp.where(
    (key >= lo) & (key < hi), found, jnp.full_like(found, -jnp.inf)
  )
