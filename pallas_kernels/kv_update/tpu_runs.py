"""Read, change and write back of tiles named by slots, for TPU kernels.

Hardware writes tiles of eight lane rows, not rows.  So consecutive slots within
one tile form a *run*: the tile is read, its new rows are put in, and it is
written back.  Up to a ring of tiles are under way together; two of them are never
the same one, or the later write would undo the earlier.

    slots     17 18 19 | 40 | 41 | 96 ..103      tiles of 8 rows
    runs      2: 1..3  | 5: 0..1  | 12: 0..7     the last needs no read
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Ref = Any

# Buckets that remember which tiles are in flight.  Two tiles in one bucket only
# end a batch early.
BUCKETS = 4096


@dataclasses.dataclass(frozen=True)
class Side:
  """One array whose tiles change.

  Attributes:
    tile: from a tile's number to its place in HBM.
    ring: VMEM `[ring, ...]`, tiles in flight.
    semaphores: DMA `[ring]`: copies end in any order.
    change: takes the old tile and the run, and returns the new one.
  """

  tile: Callable[[jax.Array], Ref]
  ring: Ref
  semaphores: Ref
  change: Callable[[jax.Array, "Run"], jax.Array]


@dataclasses.dataclass(frozen=True)
class Run:
  """Rows of one tile.

  Attributes:
    tile: number of the tile.
    first_row: its first changed row.
    source_row: the token that goes there; the rest follow.
    count: changed rows.
  """

  tile: jax.Array
  first_row: jax.Array
  source_row: jax.Array
  count: jax.Array


@dataclasses.dataclass(frozen=True)
class Scratch:
  """Where runs are kept: types outside the kernel, references inside.

  Attributes:
    first_slot: SMEM int32 `[ring]`.
    source_row: SMEM int32 `[ring]`.
    count: SMEM int32 `[ring]`.
    bucket: SMEM int32 `[BUCKETS]`, the batch that last used it.  It begins as
      anything: at worst a batch ends early.
  """

  first_slot: Any
  source_row: Any
  count: Any
  bucket: Any

  @classmethod
  def types(cls, ring: int) -> "Scratch":
    """The scratch types for a number of tiles in flight."""
    runs = pltpu.SMEM((ring,), jnp.int32)
    return cls(runs, runs, runs, pltpu.SMEM((BUCKETS,), jnp.int32))


jax.tree_util.register_dataclass(
  Scratch,
  data_fields=("first_slot", "source_row", "count", "bucket"),
  meta_fields=(),
)


def update_tiles(
  slots: Ref,  # SMEM int32 [tokens + tile_rows], padded with -1
  tokens: tuple[jax.Array, jax.Array],
  tile_rows: int,
  sides: tuple[Side, ...],
  scratch: Scratch,
) -> None:
  """Writes the rows of tokens [first, end) into their tiles.

  Args:
    slots: the slot of each token.
    tokens: the first token, and the one after the last.
    tile_rows: token rows of a tile.
    sides: what changes.
    scratch: runs in flight.
  """
  first, end = tokens

  def batch(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    token, number = carry
    token, runs = _start_reads(
      slots, (token, end), number, tile_rows, sides, scratch
    )

    def change(at: jax.Array, _: None) -> None:
      _change_tile(at, first, tile_rows, sides, scratch)

    lax.fori_loop(0, runs, change, None)

    def wait(at: jax.Array, _: None) -> None:
      for side in sides:
        tile = side.tile(lax.div(scratch.first_slot[at], tile_rows))
        pltpu.make_async_copy(
          side.ring.at[at], tile, side.semaphores.at[at]
        ).wait()

    lax.fori_loop(0, runs, wait, None)
    return token, number + 1

  lax.while_loop(
    lambda carry: carry[0] < end, batch, (first, first + jnp.int32(1))
  )


def _start_reads(
  slots: Ref,
  tokens: tuple[jax.Array, jax.Array],
  number: jax.Array,
  tile_rows: int,
  sides: tuple[Side, ...],
  scratch: Scratch,
) -> tuple[jax.Array, jax.Array]:
  """Gathers a batch of runs; returns the token after it, and their number."""
  token, end = tokens

  def fits(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
    token, runs = carry
    # An end that is no token's: its slot is read, and is -1 or another's.
    bucket = _bucket(slots[token], tile_rows)
    is_free = scratch.bucket[bucket] != number
    return (
      (token < end)
      & (runs < scratch.first_slot.shape[0])
      & ((runs == 0) | is_free)
    )

  def take(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    token, runs = carry
    slot = slots[token]
    count = _run_length(slots, token, end, tile_rows)
    scratch.first_slot[runs] = slot
    scratch.source_row[runs] = token
    scratch.count[runs] = count
    scratch.bucket[_bucket(slot, tile_rows)] = number

    @pl.when(count < tile_rows)
    def _() -> None:
      for side in sides:
        tile = side.tile(lax.div(slot, tile_rows))
        pltpu.make_async_copy(
          tile, side.ring.at[runs], side.semaphores.at[runs]
        ).start()

    token += count
    # Padded tokens repeat the null page's slot: one of them is enough.
    token = lax.while_loop(
      lambda t: (t < end) & (slots[t] == slots[t - 1]), lambda t: t + 1, token
    )
    return token, runs + 1

  return lax.while_loop(fits, take, (token, jnp.int32(0)))


def _bucket(slot: jax.Array, tile_rows: int) -> jax.Array:
  return lax.div(slot, tile_rows) & (BUCKETS - 1)


def _run_length(
  slots: Ref, token: jax.Array, end: jax.Array, tile_rows: int
) -> jax.Array:
  """Tokens from this one on whose slots follow each other within its tile."""
  slot = slots[token]
  most = jnp.minimum(tile_rows - lax.rem(slot, tile_rows), end - token)
  return lax.while_loop(
    lambda n: (n < most) & (slots[token + n] == slot + n),
    lambda n: n + 1,
    jnp.int32(1),
  )


def _change_tile(
  at: jax.Array,
  first: jax.Array,
  tile_rows: int,
  sides: tuple[Side, ...],
  scratch: Scratch,
) -> None:
  slot = scratch.first_slot[at]
  run = Run(
    tile=lax.div(slot, tile_rows),
    first_row=lax.rem(slot, tile_rows),
    source_row=scratch.source_row[at] - first,
    count=scratch.count[at],
  )

  for side in sides:
    tile = side.tile(run.tile)

    @pl.when(run.count < tile_rows)
    def _(side: Side = side, tile: Ref = tile) -> None:
      pltpu.make_async_copy(
        tile, side.ring.at[at], side.semaphores.at[at]
      ).wait()

    side.ring[at] = side.change(side.ring[at], run)
    pltpu.make_async_copy(
      side.ring.at[at], tile, side.semaphores.at[at]
    ).start()
