"""What the TPU kernels of paged attention share around their `pallas_call`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import page_shape
from pallas_kernels.paged_attention import operands as operands_lib
from pallas_kernels.paged_attention import tpu_block
from pallas_kernels.paged_attention import tpu_scales
from pallas_kernels.paged_attention import tpu_stream
from pallas_kernels.paged_attention import visibility

Ref = Any
SMEM_LANE = 128
_TILE_ROWS = 8
# Ids are checked on the host (`checks.check_tables`).  Checking them again at
# every copy costs a third of decode's instructions.
COMPILER_PARAMS = pltpu.CompilerParams(
  dimension_semantics=("arbitrary",), disable_bounds_checks=True
)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("pages", "tables"),
  meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class StreamArrays:
  """What stays in HBM: arrays outside the kernel, references inside."""

  pages: tuple[Any, ...]  # K, V, and with quantised pages their scales
  tables: tuple[Any, ...]  # int32 [sequences, 1, width]; K's and V's, or both's


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=(
    "buffers",
    "table_rows",
    "semaphores",
    "table_semaphores",
    "state",
  ),
  meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class StreamScratch:
  """Where blocks of them land: types outside the kernel, references inside."""

  buffers: tuple[
    Any, ...
  ]  # VMEM [2, pages, kv_heads, *page rows, lane]; scales [2, pages, 1, n]
  table_rows: tuple[Any, ...]  # SMEM int32 [2 * width]
  semaphores: Any  # DMA [buffers, 2]
  table_semaphores: Any  # DMA [tables]
  state: Any  # SMEM int32 [2]

  @property
  def k(self) -> Ref:
    """K's two blocks."""
    return self.buffers[0]

  @property
  def v(self) -> Ref:
    """V's two blocks."""
    return self.buffers[1]

  def blank(
    self,
    half: jax.Array,
    fold: int,
    first_row: jax.Array,
    seen: tuple[jax.Array, jax.Array],
  ) -> None:
    """Zeroes what a masked score does not keep out of the products.

    Args:
      half: of the buffers.
      fold: rows of a lane row.
      first_row: of the block.
      seen: the first row to keep, and the one after the last.
    """
    if self.k.dtype == jnp.int8:
      return  # Every int8 is finite, and its weight is zero.
    for buffer in (self.k, self.v) if fold == 2 else (self.v,):
      tpu_block.blank_unseen(buffer, half, fold, first_row, seen)

  def factors(
    self,
    half: jax.Array,
    geometry: page_shape.PageGeometry,
    first_row: jax.Array,
    seen: tuple[jax.Array, jax.Array],
  ) -> tuple[list[list[jax.Array]], list[list[jax.Array]]] | None:
    """K's and V's scales by head and part, or None: not quantised."""
    if len(self.buffers) == 2:
      return None
    k, v = (
      tpu_scales.factors(buffer[half], geometry, first_row=first_row, seen=seen)
      for buffer in self.buffers[2:]
    )
    return k, v


def stream(
  arrays: StreamArrays,
  scratch: StreamScratch,
  *,
  first_row: Ref,
  end_row: Ref,
  next_live: Ref,
  sequence_of: Callable[[jax.Array], jax.Array],
  num_items: int,
  pages_per_block: int,
  geometry: page_shape.PageGeometry,
) -> tpu_stream.Stream:
  """The stream of a kernel's blocks, from its references."""
  # K (and its scales) come from the first table, V's from the last.
  sources = tuple(
    tpu_stream.Source(
      pages=pages,
      buffer=buffer,
      table=(i % 2) * (len(arrays.tables) - 1),
    )
    for i, (pages, buffer) in enumerate(
      zip(arrays.pages, scratch.buffers, strict=True)
    )
  )
  return tpu_stream.Stream(
    sources=sources,
    tables=arrays.tables,
    table_rows=scratch.table_rows,
    semaphores=scratch.semaphores,
    table_semaphores=scratch.table_semaphores,
    state=scratch.state,
    first_row=first_row,
    end_row=end_row,
    next_live=next_live,
    sequence_of=sequence_of,
    num_items=num_items,
    pages_per_block=pages_per_block,
    block_rows=pages_per_block * geometry.page_size,
  )


def table_width(width: int, pages_per_block: int) -> int:
  """Entries of a table row as copied: whole blocks, whole lane rows."""
  width = page_shape.round_up(width, pages_per_block)
  return page_shape.round_up(width, SMEM_LANE)


def _rows(geometry: page_shape.PageGeometry) -> tuple[int, ...]:
  """The axes of a page's lane rows.

  HBM has tiles of eight rows, VMEM of up to 32.  Where a row has several lane
  tiles the two lie in another order, unless eight rows are an axis of both.
  """
  rows = geometry.page_size // geometry.fold
  if geometry.lane == page_shape.TPU_LANE:
    return (rows,)
  return (rows // _TILE_ROWS, _TILE_ROWS)


def stream_arrays(
  operands: operands_lib.Operands,
  options: operands_lib.Options,
  pages_per_block: int,
) -> tuple[StreamArrays, StreamArrays]:
  """The arrays that stay in HBM, and their block specs."""
  pages = [
    pages.reshape(*pages.shape[:2], *_rows(geometry), geometry.lane)
    for pages, geometry in (
      (operands.k_pages, options.k_geometry),
      (operands.v_pages, options.v_geometry),
    )
  ]
  if operands.k_scales is not None and operands.v_scales is not None:
    pages += [operands.k_scales, operands.v_scales]
  tables = [operands.page_table]
  if operands.v_page_table is not None:
    tables.append(operands.v_page_table)
  sequences, width = operands.page_table.shape
  padding = table_width(width, pages_per_block) - width
  # Padded entries are copied and never seen: any page in range will do.
  tables = [
    jnp.pad(table, ((0, 0), (0, padding))).reshape(sequences, 1, -1)
    for table in tables
  ]
  arrays = StreamArrays(pages=tuple(pages), tables=tuple(tables))
  return arrays, jax.tree.map(
    lambda _: pl.BlockSpec(memory_space=pl.ANY), arrays
  )


def stream_scratch(
  operands: operands_lib.Operands,
  options: operands_lib.Options,
  pages_per_block: int,
) -> Any:
  """The scratch types of the stream, a `StreamScratch` of them."""
  kv_heads = options.kv_heads
  buffers = [
    pltpu.VMEM(
      (
        2,
        pages_per_block,
        kv_heads,
        *_rows(geometry),
        geometry.lane,
      ),
      operands.k_pages.dtype,
    )
    for geometry in (options.k_geometry, options.v_geometry)
  ]
  if operands.k_scales is not None:
    lanes = operands.k_scales.shape[-1]
    buffers += [pltpu.VMEM((2, pages_per_block, 1, lanes), jnp.float32)] * 2
  num_tables = 1 if operands.v_page_table is None else 2
  width = table_width(operands.page_table.shape[1], pages_per_block)
  return StreamScratch(
    buffers=tuple(buffers),
    table_rows=(pltpu.SMEM((2 * width,), jnp.int32),) * num_tables,
    semaphores=pltpu.SemaphoreType.DMA((len(buffers), 2)),
    table_semaphores=pltpu.SemaphoreType.DMA((num_tables,)),
    state=pltpu.SMEM((2,), jnp.int32),
  )


def seen_rows(
  operands: operands_lib.Operands,
  options: operands_lib.Options,
) -> tuple[jax.Array, jax.Array]:
  """The rows [first, end) of its sequence that each query sees.

  Returns:
    int32 `[tokens]` twice; end <= first where it sees nothing.
  """
  if operands.is_decode:
    return _interval(
      operands,
      options,
      operands.context_lens,
      operands.query_positions,
      operands.key_starts,
    )
  sequence, real = visibility.sequence_of_tokens(operands)
  key_starts = operands.key_starts
  first, end = _interval(
    operands,
    options,
    operands.context_lens[sequence],
    visibility.token_positions(operands, sequence),
    None if key_starts is None else key_starts[sequence],
  )
  return first, jnp.where(real, end, 0)


def _interval(
  operands: operands_lib.Operands,
  options: operands_lib.Options,
  end: jax.Array,
  position: jax.Array | None,
  key_start: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """The rows before `end` that positions allow; None is that of the last."""
  if position is None:
    position = end - 1
  elif key_start is not None:
    position = position - key_start
  if options.causal:
    end = jnp.minimum(end, position + 1)
  first = jnp.zeros_like(end)
  if operands.window is not None:
    # Subtracted only where it cannot wrap: a window may be as large as int32.
    behind = operands.window - 1
    first = jnp.where(position < behind, first, position - behind)
  return first, end


def folded_queries(
  q: jax.Array,  # [..., rows, head_dim]
  geometry: page_shape.PageGeometry,
) -> jax.Array:
  """Queries that fill a lane row, `[..., fold * rows, lane]`."""
  spare = geometry.lane - q.shape[-1]
  widths = [(0, 0)] * (q.ndim - 1)
  q_even = jnp.pad(q, [*widths, (0, spare)])
  if geometry.fold == 1:
    return q_even
  return jnp.concatenate([q_even, jnp.pad(q, [*widths, (spare, 0)])], axis=-2)


def sink_tops(
  sinks: jax.Array | None,  # [q_heads]
  kv_heads: int,
  group: int,
  fold: int,
) -> jax.Array:
  """What each head's softmax begins at, float32 `[kv_heads, fold * group, 1]`.

  The even rows' part counts the sink, so that it is counted once.
  """
  top = jnp.full((kv_heads, group, 1), -jnp.inf, jnp.float32)
  if sinks is not None:
    top = sinks.astype(jnp.float32).reshape(kv_heads, group, 1)
  return jnp.pad(
    top,
    ((0, 0), (0, (fold - 1) * group), (0, 0)),
    constant_values=-jnp.inf,
  )
