"""Ragged paged attention for TPU: prefill chunks, decode rows and both at once.

A grid step is an item: one sequence's share of one query tile (`tpu_items`).  A
tile's softmax stays in VMEM over its items.  What a query sees is an interval of
its sequence's rows, which is all that causality, windows, positions and lengths
come to; queries of other sequences see nothing.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import page_shape
from pallas_kernels.paged_attention import operands as operands_lib
from pallas_kernels.paged_attention import tpu_block
from pallas_kernels.paged_attention import tpu_calls
from pallas_kernels.paged_attention import tpu_items
from pallas_kernels.paged_attention import tpu_tiles
from pallas_kernels.paged_attention import visibility

Ref = Any


@dataclasses.dataclass(frozen=True)
class Static:
  """What the kernel is compiled for."""

  k_geometry: page_shape.PageGeometry
  v_geometry: page_shape.PageGeometry
  scale: float
  soft_cap: float | None
  has_sinks: bool
  num_items: int
  group: int
  pages_per_block: int

  @property
  def block_rows(self) -> int:
    """Token rows of a block."""
    return self.pages_per_block * self.k_geometry.page_size

  @property
  def columns(self) -> int:
    """Columns of a block's scores."""
    return self.block_rows // self.k_geometry.fold


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("stream", "state", "factors"),
  meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Scratch:
  """What a tile keeps: types outside the kernel, references inside."""

  stream: tpu_calls.StreamScratch
  state: tpu_block.State  # VMEM float32 [kv_heads, rows, ...]
  factors: Any  # VMEM float32 [2, kv_heads, fold, columns], or None


def _kernel(
  items: tpu_items.Items,  # SMEM
  q_ref: Ref,  # VMEM [1, kv_heads, rows, k_lane]
  seen_ref: Ref,  # VMEM int32 [1, 2, rows], first and end of what a row sees
  top_ref: Ref,  # VMEM float32 [kv_heads, 1, rows]
  arrays: tpu_calls.StreamArrays,
  out_ref: Ref,  # VMEM [1, kv_heads, rows / fold, v_head_dim]
  lse_ref: Ref,  # VMEM float32 [1, kv_heads, 1, rows / fold]
  scratch: Scratch,
  *,
  static: Static,
) -> None:
  item = pl.program_id(0)
  kv_heads = static.k_geometry.kv_heads
  stream = tpu_calls.stream(
    arrays,
    scratch.stream,
    first_row=items.first_row,
    end_row=items.end_row,
    next_live=items.next_live,
    sequence_of=lambda item: items.sequence[item],
    num_items=static.num_items,
    pages_per_block=static.pages_per_block,
    geometry=static.k_geometry,
  )
  state = scratch.state
  tile = items.tile[item]

  @pl.when((item == 0) | (items.tile[jnp.maximum(item - 1, 0)] != tile))
  def _() -> None:
    def begin(head: jax.Array, _: None) -> None:
      top = jnp.full(state.top.shape[1:], tpu_block.NEG_INF, jnp.float32)
      if static.has_sinks:
        top = tpu_block.column(top_ref[head])
      _store(state, head, tpu_block.initial(top, static.v_geometry.lane))

    lax.fori_loop(0, kv_heads, begin, None)

  low, high = _row_bounds(items, item, seen_ref, static)

  def compute(first_row: jax.Array, half: jax.Array, _: None) -> None:
    _compute_block(
      q_ref, scratch, items, item, (low, high), first_row, half, static
    )

  stream.walk(item, compute, None)

  @pl.when(items.tile[item + 1] != tile)
  def _() -> None:
    def end(head: jax.Array, _: None) -> None:
      out, lse = tpu_block.finish(_load(state, head), static.k_geometry.fold)
      out = out[..., : static.v_geometry.head_dim]
      out_ref[0, head] = out.astype(out_ref.dtype)
      lse_ref[0, head] = tpu_block.row(lse)

    lax.fori_loop(0, kv_heads, end, None)


def _row_bounds(
  items: tpu_items.Items, item: jax.Array, seen_ref: Ref, static: Static
) -> tuple[jax.Array, jax.Array]:
  """What each query row sees of this item's sequence, int32 `[rows, 1]`."""
  # float32 counts rows exactly up to 2**24, and only it reduces everywhere.
  seen = seen_ref[0].astype(jnp.float32)
  low = tpu_block.column(seen[0:1]).astype(jnp.int32)
  high = tpu_block.column(seen[1:2]).astype(jnp.int32)
  rows = low.shape[0] // static.k_geometry.fold
  row = lax.broadcasted_iota(jnp.int32, low.shape, 0)
  if static.k_geometry.fold == 2:
    row = jnp.where(row >= rows, row - rows, row)
  ours = row >= items.first_token[item] * static.group
  ours &= row < items.end_token[item] * static.group
  return low, jnp.where(ours, high, 0)


def _compute_block(
  q_ref: Ref,
  scratch: Scratch,
  items: tpu_items.Items,
  item: jax.Array,
  bounds: tuple[jax.Array, jax.Array],
  first_row: jax.Array,
  half: jax.Array,
  static: Static,
) -> None:
  """Takes one block of keys into the softmax of every head."""
  fold = static.k_geometry.fold
  stream = scratch.stream
  first, end = items.first_row[item], items.end_row[item]

  @pl.when((first_row < first) | (first_row + static.block_rows > end))
  def _() -> None:
    stream.blank(half, fold, first_row, (first, end))

  rows = q_ref.shape[2]
  row = tpu_block.fold_rows((rows, static.columns), fold, first_row)
  seen = (row >= bounds[0]) & (row < bounds[1])
  sides = stream.factors(half, static.k_geometry, first_row, (first, end))
  if sides is not None:
    for side, heads in enumerate(sides):
      for head, parts in enumerate(heads):
        for part, factors in enumerate(parts):
          scratch.factors[side, head, pl.ds(part, 1)] = factors

  def factors_of(side: int, head: jax.Array) -> jax.Array | None:
    if sides is None:
      return None
    parts = scratch.factors[side, head]
    if fold == 1:
      return parts
    odd = lax.broadcasted_iota(jnp.int32, seen.shape, 0) >= rows // 2
    return jnp.where(odd, parts[1:2], parts[0:1])

  def body(head: jax.Array, _: None) -> None:
    q = q_ref[0, head]
    scores = tpu_block.logits(
      q,
      tpu_block.widen(tpu_block.head_of(stream.k, half, head), q.dtype),
      scale=static.scale,
      k_factors=factors_of(0, head),
      soft_cap=static.soft_cap,
    )
    scores = jnp.where(seen, scores, tpu_block.NEG_INF)
    v = tpu_block.widen(tpu_block.head_of(stream.v, half, head), q.dtype)
    after = tpu_block.update(
      _load(scratch.state, head), scores, v, factors_of(1, head)
    )
    _store(scratch.state, head, after)

  lax.fori_loop(0, static.k_geometry.kv_heads, body, None)


def _load(state: tpu_block.State, head: jax.Array) -> tpu_block.State:
  return jax.tree.map(lambda ref: ref[head], state)


def _store(
  state: tpu_block.State, head: jax.Array, values: tpu_block.State
) -> None:
  state.top[head] = values.top
  state.total[head] = values.total
  state.acc[head] = values.acc


def prefill(
  operands: operands_lib.Operands,
  options: operands_lib.Options,
  tiles: tpu_tiles.PrefillTiles,
) -> tuple[jax.Array, jax.Array]:
  """`api.paged_attention` with ragged queries."""
  tokens, q_heads, _ = operands.q.shape
  kv_heads, fold = options.kv_heads, options.k_geometry.fold
  group = q_heads // kv_heads
  query_block = tiles.query_block
  num_tiles = -(-tokens // query_block)
  rows = query_block * group
  seen = tpu_calls.seen_rows(operands, options)
  items = tpu_items.make(operands, seen, query_block, num_tiles)
  static = Static(
    k_geometry=options.k_geometry,
    v_geometry=options.v_geometry,
    scale=options.scale,
    soft_cap=options.soft_cap,
    has_sinks=operands.sinks is not None,
    num_items=items.sequence.shape[0],
    group=group,
    pages_per_block=tiles.pages_per_block,
  )
  out, lse = _call(
    operands,
    options,
    static,
    items,
    _tiled_queries(operands, options, query_block, num_tiles),
    _tiled_bounds(seen, group, fold, query_block, num_tiles),
    _tiled_sinks(operands.sinks, kv_heads, group, fold, query_block),
  )
  out = out.reshape(num_tiles, kv_heads, query_block, group, -1)
  out = jnp.moveaxis(out, 2, 1).reshape(num_tiles * query_block, q_heads, -1)
  lse = lse.reshape(num_tiles, kv_heads, query_block, group)
  lse = jnp.moveaxis(lse, 2, 1).reshape(num_tiles * query_block, q_heads)
  assert rows == out.shape[0] // num_tiles * group
  lse = lse[:tokens]
  if operands.sinks is not None:
    # Padded rows have no sink either.
    _, real = visibility.sequence_of_tokens(operands)
    lse = jnp.where(real[:, None], lse, tpu_block.NEG_INF)
  return out[:tokens], lse


def _call(
  operands: operands_lib.Operands,
  options: operands_lib.Options,
  static: Static,
  items: tpu_items.Items,
  q: jax.Array,  # [tiles, kv_heads, fold * rows, k_lane]
  bounds: jax.Array,  # int32 [tiles, 2, fold * rows]
  tops: jax.Array,  # float32 [kv_heads, 1, fold * rows]
) -> tuple[jax.Array, jax.Array]:
  num_tiles, kv_heads, folded_rows, _ = q.shape
  rows = folded_rows // static.k_geometry.fold
  arrays, array_specs = tpu_calls.stream_arrays(
    operands, options, static.pages_per_block
  )
  scalars, structure = jax.tree.flatten(items)

  def block(*shape: int) -> pl.BlockSpec:
    zeros = (0,) * len(shape)
    return pl.BlockSpec((1, *shape), lambda i, tile, *_: (tile[i], *zeros))

  def kernel(*refs: Any) -> None:
    _kernel(
      jax.tree.unflatten(structure, refs[: len(scalars)]),
      *refs[len(scalars) :],
      static=static,
    )

  factors = None
  if operands.k_scales is not None:
    shape = (2, kv_heads, static.k_geometry.fold, static.columns)
    factors = pltpu.VMEM(shape, jnp.float32)
  # Pallas takes trees of scratch types; its annotations know only flat ones.
  scratch: Any = Scratch(
    stream=tpu_calls.stream_scratch(operands, options, static.pages_per_block),
    state=_state_scratch(kv_heads, folded_rows, static.v_geometry.lane),
    factors=factors,
  )
  return pl.pallas_call(
    kernel,
    out_shape=(
      jax.ShapeDtypeStruct(
        (num_tiles, kv_heads, rows, options.v_head_dim), operands.q.dtype
      ),
      jax.ShapeDtypeStruct((num_tiles, kv_heads, 1, rows), jnp.float32),
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(static.num_items,),
      in_specs=[
        block(*q.shape[1:]),
        block(*bounds.shape[1:]),
        pl.BlockSpec(tops.shape, lambda i, *_: (0, 0, 0)),
        array_specs,
      ],
      out_specs=(
        block(kv_heads, rows, options.v_head_dim),
        block(kv_heads, 1, rows),
      ),
      scratch_shapes=[scratch],
    ),
    compiler_params=tpu_calls.COMPILER_PARAMS,
    name="kvjax_paged_prefill",
  )(*scalars, q, bounds, tops, arrays)


def _tiled_queries(
  operands: operands_lib.Operands,
  options: operands_lib.Options,
  query_block: int,
  num_tiles: int,
) -> jax.Array:
  """`[tiles, kv_heads, fold * rows, lane]`, a row for each token and head."""
  tokens, q_heads, head_dim = operands.q.shape
  kv_heads = options.kv_heads
  group = q_heads // kv_heads
  dtype = tpu_block.compute_dtype(operands.q.dtype, operands.k_pages.dtype)
  q = operands.q.astype(dtype)
  q = jnp.pad(q, ((0, num_tiles * query_block - tokens), (0, 0), (0, 0)))
  q = q.reshape(num_tiles, query_block, kv_heads, group, head_dim)
  q = jnp.moveaxis(q, 2, 1)
  q = q.reshape(num_tiles, kv_heads, query_block * group, head_dim)
  return tpu_calls.folded_queries(q, options.k_geometry)


def _tiled_bounds(
  seen: tuple[jax.Array, jax.Array],
  group: int,
  fold: int,
  query_block: int,
  num_tiles: int,
) -> jax.Array:
  """What each query row sees, int32 `[tiles, 2, fold * rows]`."""
  bounds = jnp.stack(seen)
  spare = num_tiles * query_block - bounds.shape[1]
  bounds = jnp.pad(bounds, ((0, 0), (0, spare)))
  bounds = jnp.repeat(bounds, group, axis=1)
  bounds = bounds.reshape(2, num_tiles, query_block * group)
  return jnp.tile(jnp.moveaxis(bounds, 1, 0), (1, 1, fold))


def _tiled_sinks(
  sinks: jax.Array | None,
  kv_heads: int,
  group: int,
  fold: int,
  query_block: int,
) -> jax.Array:
  """What each row's softmax begins at, float32 `[kv_heads, 1, fold * rows]`."""
  tops = tpu_calls.sink_tops(sinks, kv_heads, group, fold)
  tops = tops.reshape(kv_heads, fold, 1, group)
  tops = jnp.repeat(tops, query_block, axis=2)
  return tops.reshape(kv_heads, 1, fold * query_block * group)


def _state_scratch(kv_heads: int, rows: int, v_lane: int) -> Any:
  """The scratch types of a `tpu_block.State`."""
  column: Any = pltpu.VMEM((kv_heads, rows, 1), jnp.float32)
  acc: Any = pltpu.VMEM((kv_heads, rows, v_lane), jnp.float32)
  return tpu_block.State(top=column, total=column, acc=acc)
