"""Copies of page blocks that run ahead of the arithmetic, for TPU kernels.

A kernel walks *items* (a sequence's decode step, or a query tile's share of a
sequence), and each item walks *blocks* of `pages_per_block` pages.  While one
block is computed the next one is on its way, across items too, and so is the
next item's page table:

    item 3                      item 5 (4 sees nothing)
    | block 0 | block 1 | block 2 | block 0 | ...        computed
              | table of 5 -----> |
    | block 1 | block 2 | 5's block 0 | ...              copied meanwhile

There are two buffers for everything, and a semaphore for each.  Tables stay in
HBM, a row at a time in SMEM, so that their number is not bounded by SMEM.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import page_shape

# What a kernel carries from block to block: any pytree of values.
Carry = Any
Ref = Any


@dataclasses.dataclass(frozen=True)
class Source:
  """Pages of one array, and where they land.

  Attributes:
    pages: HBM `[pages, ...]`.
    buffer: VMEM `[2, pages_per_block, ...]`, a block of pages in each half.  A
      page lies there as it does in HBM: its copy has no strides, which would
      cost up to nine instructions to describe.
    table: which of the stream's tables lists them.
  """

  pages: Ref
  buffer: Ref
  table: int

  def destination(self, half: jax.Array | int, page: jax.Array | int) -> Ref:
    """Where the block's `page`-th page goes."""
    return self.buffer.at[half, page]


@dataclasses.dataclass(frozen=True)
class Stream:
  """The blocks of all items, in order.

  Attributes:
    sources: K, V and their scales.
    tables: HBM int32 `[sequences, 1, width]`, one for both or one each.
    table_rows: SMEM int32 `[2 * width]`, for each table: an element of a flat
      array is found by one addition, where tiles take six instructions.
    semaphores: DMA `[sources, 2]`.
    table_semaphores: DMA `[tables]`.
    state: SMEM int32 `[2]`: the half of the buffers that holds the coming
      block, and of the table rows that holds the current item's.
    first_row: SMEM int32 `[items]`, the first row that an item sees.
    end_row: SMEM int32 `[items]`, one past its last.
    next_live: SMEM int32 `[items + 1]`: the first item at or after this one
      that sees anything, or the number of items.
    sequence_of: from an item to its row of the tables.
    num_items: items of the call.
    pages_per_block: pages of a block.
    block_rows: token rows of a block.
  """

  sources: tuple[Source, ...]
  tables: tuple[Ref, ...]
  table_rows: tuple[Ref, ...]
  semaphores: Ref
  table_semaphores: Ref
  state: Ref
  first_row: Ref
  end_row: Ref
  next_live: Ref
  sequence_of: Callable[[jax.Array], jax.Array]
  num_items: int
  pages_per_block: int
  block_rows: int

  def walk(
    self,
    item: jax.Array,
    compute: Callable[[jax.Array, jax.Array, Carry], Carry],
    carry: Carry,
  ) -> Carry:
    """Computes an item's blocks, with the next one always under way.

    Args:
      item: int32 scalar; every item walks, in order, those that see nothing
        included.
      compute: takes the block's first row, the half of the buffers that holds
        it and the carry, and returns the carry.
      carry: before the first block.

    Returns:
      The carry after the last block; as it was if the item sees nothing.
    """
    live = self.end_row[item] > self.first_row[item]

    @pl.when(item == self.next_live[0])
    def _() -> None:
      # Nobody ran ahead for the first item.
      self.state[0] = 0
      self.state[1] = 0
      self._copy_tables(item, 0, start=True)
      self._copy_tables(item, 0, start=False)
      block = self._first_block(item)

      # Once a kernel: not worth the length of an unrolled loop.
      def start(page: jax.Array, _: None) -> None:
        self._start_page(block, page, 0, 0)

      lax.fori_loop(0, self.pages_per_block, start, None)

    following = self.next_live[item + 1]
    has_following = following < self.num_items
    first = self._first_block(item)
    end = jnp.where(
      live,
      lax.div(self.end_row[item] + (self.block_rows - 1), self.block_rows),
      first,
    )
    half0 = self.state[0]
    table_half = self.state[1]

    @pl.when(live & has_following)
    def _() -> None:
      self._copy_tables(following, 1 - table_half, start=True)

    def body(block: jax.Array, carry: Carry) -> Carry:
      half = lax.rem(half0 + block - first, 2)
      is_last = block + 1 == end

      @pl.when(is_last & has_following)
      def _() -> None:
        self._copy_tables(following, 1 - table_half, start=False)

      # A single set of copies serves both cases: the program stays short.
      @pl.when(~is_last | has_following)
      def _() -> None:
        ahead = jnp.minimum(following, self.num_items - 1)
        self._start_block(
          jnp.where(is_last, self._first_block(ahead), block + 1),
          jnp.where(is_last, 1 - table_half, table_half),
          1 - half,
        )

      self._wait_block(half)
      return compute(block * self.block_rows, half, carry)

    carry = lax.fori_loop(first, end, body, carry)

    @pl.when(live)
    def _() -> None:
      self.state[0] = lax.rem(half0 + end - first, 2)
      self.state[1] = 1 - table_half

    return carry

  @property
  def _width(self) -> int:
    return self.tables[0].shape[-1]

  def _table_start(self, half: jax.Array | int) -> jax.Array:
    start = jnp.asarray(half, jnp.int32) * self._width
    return pl.multiple_of(start, page_shape.TPU_LANE)

  def _first_block(self, item: jax.Array) -> jax.Array:
    return lax.div(self.first_row[item], self.block_rows)

  def _copy_tables(
    self, item: jax.Array, half: jax.Array | int, *, start: bool
  ) -> None:
    sequence = self.sequence_of(item)
    for i, (table, rows) in enumerate(
      zip(self.tables, self.table_rows, strict=True)
    ):
      copy = pltpu.make_async_copy(
        table.at[sequence, 0],
        rows.at[pl.ds(self._table_start(half), self._width)],
        self.table_semaphores.at[i],
      )
      if start:
        copy.start()
      else:
        copy.wait()

  def _start_block(
    self, block: jax.Array, table_half: jax.Array | int, half: jax.Array | int
  ) -> None:
    for page in range(self.pages_per_block):
      self._start_page(block, page, table_half, half)

  def _start_page(
    self,
    block: jax.Array,
    page: jax.Array | int,
    table_half: jax.Array | int,
    half: jax.Array | int,
  ) -> None:
    at = self._table_start(table_half) + block * self.pages_per_block + page
    ids = [rows[at] for rows in self.table_rows]
    for i, source in enumerate(self.sources):
      pltpu.make_async_copy(
        source.pages.at[ids[source.table]],
        source.destination(half, page),
        self.semaphores.at[i, half],
      ).start()

  def _wait_block(self, half: jax.Array) -> None:
    for i, source in enumerate(self.sources):
      # One wait for the bytes of all the block's pages.
      buffer = source.buffer.at[half]
      pltpu.make_async_copy(buffer, buffer, self.semaphores.at[i, half]).wait()


def next_live(first_row: jax.Array, end_row: jax.Array) -> jax.Array:
  """For each item the first at or after it that sees anything.

  Args:
    first_row: int32 `[items]`.
    end_row: int32 `[items]`.

  Returns:
    int32 `[items + 1]`; the number of items where there is none.
  """
  items = first_row.shape[0]
  item = jnp.arange(items, dtype=jnp.int32)
  ids = jnp.where(end_row > first_row, item, items)
  ids = lax.cummin(ids, reverse=True)
  return jnp.append(ids, jnp.int32(items))
