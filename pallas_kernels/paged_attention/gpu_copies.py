"""Pages on their way from the pool into shared memory."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import gpu_tile
from pallas_kernels.paged_attention import operands as operands_lib

Ref = Any
BARRIER_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Pages:
  """The pool and its tables, as arrays or as references to them."""

  k: Any  # [pages, kv_heads, parts, rows of a part, head_dim]
  v: Any  # [pages, kv_heads, parts, rows of a part, v_head_dim]
  k_table: Any  # int32 [sequences, width]
  v_table: Any = None  # int32 [sequences, width]; None: as K's
  k_scales: Any = None  # float32 [pages, 1, scale lanes]
  v_scales: Any = None  # float32 [pages, 1, scale lanes]


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Shared memory that copies fill, and the barriers they arrive on."""

  k: Any  # [stages, key_rows, head_dim]
  v: Any  # [stages, key_rows, v_head_dim]
  k_ready: Any  # [stages]
  v_ready: Any  # [stages]
  k_scales: Any = None  # float32 [stages, key_rows]
  v_scales: Any = None  # float32 [stages, key_rows]
  k_wide: Any = None  # [key_rows, columns], K as WGMMA reads it
  v_wide: Any = None  # [key_rows, v_head_dim]; None: where K was


jax.tree_util.register_dataclass(
  Pages,
  data_fields=("k", "v", "k_table", "v_table", "k_scales", "v_scales"),
  meta_fields=(),
)
jax.tree_util.register_dataclass(
  Tiles,
  data_fields=(
    "k",
    "v",
    "k_ready",
    "v_ready",
    "k_scales",
    "v_scales",
    "k_wide",
    "v_wide",
  ),
  meta_fields=(),
)


def pages_of(operands: operands_lib.Operands, spec: gpu_tile.Spec) -> Pages:
  """The call's pages, K and V as `[pages, kv_heads, parts, rows, dim]`.

  A part is what one copy moves: Mosaic GPU of JAX 0.10 takes no slice at a
  traced row of a tiled copy.
  """

  def view(x: jax.Array) -> jax.Array:
    num_pages, kv_heads, _, columns = x.shape
    return x.reshape(num_pages, kv_heads, spec.parts, spec.copy_rows, columns)

  return Pages(
    k=view(operands.k_pages),
    v=view(operands.v_pages),
    k_table=operands.page_table,
    v_table=operands.v_page_table,
    k_scales=operands.k_scales,
    v_scales=operands.v_scales,
  )


def scratch(spec: gpu_tile.Spec) -> Tiles:
  """What a kernel asks for to hold tiles."""
  rows = (spec.stages, spec.key_rows)
  arrivals = spec.pages_per_step * (2 if spec.quantized else 1)
  ready = plgpu.Barrier(num_arrivals=arrivals, num_barriers=spec.stages)
  tiles = Tiles(
    k=gpu_tile.tiled(rows, spec.head_dim, spec.page_dtype),
    v=gpu_tile.tiled(rows, spec.v_head_dim, spec.page_dtype),
    k_ready=ready,
    v_ready=ready,
  )
  if not spec.quantized:
    return tiles
  tiles = dataclasses.replace(
    tiles,
    k_scales=plgpu.SMEM(rows, jnp.float32),
    v_scales=plgpu.SMEM(rows, jnp.float32),
    k_wide=gpu_tile.tiled((spec.key_rows,), spec.head_dim, spec.dtype),
  )
  if spec.workers == 1 and spec.v_head_dim == spec.head_dim:
    return tiles
  return dataclasses.replace(
    tiles,
    v_wide=gpu_tile.tiled((spec.key_rows,), spec.v_head_dim, spec.dtype),
  )


def shared_bytes(scratch: Any) -> int:
  """Bytes of a kernel's scratch, barriers included."""
  total = 0
  for leaf in jax.tree.leaves(scratch):
    if isinstance(leaf, plgpu.Barrier):
      total += BARRIER_BYTES * int(np.prod(leaf.num_barriers))
    else:
      total += math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
  return total


def page_ids(
  pages: Pages, sequence: jax.Array, step: jax.Array, *, spec: gpu_tile.Spec
) -> tuple[jax.Array, ...]:
  """The K pages, then the V pages, of one step; past the table, its last."""
  first = lax.div(step * spec.key_rows, jnp.int32(spec.page_size))
  tables = [pages.k_table] if spec.one_table else [pages.k_table, pages.v_table]
  return tuple(
    table[sequence, jnp.minimum(first + i, spec.table_width - 1)]
    for table in tables
    for i in range(spec.pages_per_step)
  )


def start(
  pages: Pages,
  tiles: Tiles,
  head: jax.Array,
  ids: tuple[jax.Array, ...],
  step: jax.Array,
  slot: jax.Array | int,
  *,
  spec: gpu_tile.Spec,
) -> None:
  """Starts the copies of one step's tile into a slot."""
  count = spec.pages_per_step
  # A step that is part of a page has no more pages than one.
  part = lax.rem(step, jnp.int32(spec.parts))
  scale_rows = pl.ds(
    head * spec.page_size + part * spec.copy_rows, spec.copy_rows
  )
  for source, scales, into, scales_into, ready, page in (
    (pages.k, pages.k_scales, tiles.k, tiles.k_scales, tiles.k_ready, ids),
    (
      pages.v,
      pages.v_scales,
      tiles.v,
      tiles.v_scales,
      tiles.v_ready,
      ids[-count:],
    ),
  ):
    for i in range(count):
      at = pl.ds(i * spec.copy_rows, spec.copy_rows)
      plgpu.copy_gmem_to_smem(
        source.at[page[i], head, part], into.at[slot, at], ready.at[slot]
      )
      if spec.quantized:
        # The promise picks the plain bulk copy: the tensor one, which checks
        # bounds, needs 128-byte aligned shared memory, and a page of 16 has 64.
        plgpu.copy_gmem_to_smem(
          scales.at[page[i], 0, scale_rows],
          scales_into.at[slot, at],
          ready.at[slot],
          oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )


def keys(
  tiles: Tiles, slot: jax.Array, spec: gpu_tile.Spec, team: gpu_tile.Team
) -> tuple[Ref, Ref | None]:
  """Waits for a slot's K; its tile as WGMMA reads it, and its scales."""
  plgpu.barrier_wait(tiles.k_ready.at[slot])
  k = tiles.k.at[slot]
  if not spec.quantized:
    return k, None
  _widen(k, tiles.k_wide, spec, team)
  team.meet()
  return tiles.k_wide, tiles.k_scales.at[slot]


def values(
  tiles: Tiles,
  slot: jax.Array,
  weights: jax.Array,  # float32 [64, key_rows]
  first_row: jax.Array,
  lo: jax.Array,
  hi: jax.Array,
  spec: gpu_tile.Spec,
  team: gpu_tile.Team,
) -> tuple[Ref, jax.Array]:
  """Waits for a slot's V, with rows outside lo..hi zeroed.

  A team of one widens V over K, which it has read by now.  A larger team keeps
  them apart: one of them may still be reading K.

  Returns:
    The tile as WGMMA reads it, and the weights to multiply it by: V's scales
    go into them.
  """
  plgpu.barrier_wait(tiles.v_ready.at[slot])
  v = tiles.v.at[slot]
  if spec.quantized:
    factors = gpu_tile.laid_out(
      tiles.v_scales.at[slot][...], gpu_tile.COLUMNS, spec
    )
    factors = lax.broadcast_in_dim(factors, weights.shape, (1,))
    row = gpu_tile.key_index(first_row, spec)
    weights = jnp.where(
      (row >= lo) & (row < hi), weights * factors, jnp.zeros_like(weights)
    )
  # Narrowed before V is widened: both take registers.
  weights = weights.astype(spec.dtype)
  if spec.quantized:
    wide = tiles.k_wide if tiles.v_wide is None else tiles.v_wide
    _widen(v, wide, spec, team)
    v = wide
    team.meet()

  @pl.when((first_row < lo) | (first_row + spec.key_rows > hi))
  def _() -> None:
    gpu_tile.zero_unseen(v, first_row, lo, hi, spec, team)

  return v, weights


def _widen(
  narrow: Ref, wide: Ref, spec: gpu_tile.Spec, team: gpu_tile.Team
) -> None:
  """Converts a stored tile to the dtype of matrix products."""

  def piece(row: int, column: int) -> None:
    value = gpu_tile.piece_of(narrow, row, column)[...]
    if spec.page_dtype != jnp.int8:
      # Mosaic GPU converts fp8 to float16 only.
      value = value.astype(jnp.float16).astype(jnp.float32)
    gpu_tile.piece_of(wide, row, column)[...] = gpu_tile.laid_out(
      value.astype(spec.dtype), gpu_tile.MATRIX, spec
    )

  team.each(narrow, piece)
