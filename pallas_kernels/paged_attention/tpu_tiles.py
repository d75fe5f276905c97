"""How the TPU kernels cut a call into blocks."""

import dataclasses
import math

import jax.numpy as jnp

from pallas_kernels.paged_attention import operands as operands_lib

# A block of K and V in flight hides a copy's latency of about a microsecond
# from about this size on (819 GB/s and up).
BLOCK_BYTES = 1 << 20
# Fewer rows leave the lanes of a score row empty, more cost at every tail.
FEWEST_ROWS = 128
MOST_ROWS = 512
# Copies are unrolled: more pages only lengthen the program.
MOST_PAGES = 64
# Of 16 MiB that a kernel may take by default on every generation.
BUFFER_BYTES = 8 << 20
# Query rows of a tile of ragged prefill, over all heads of a group.
QUERY_ROWS = 256
QUERY_TILE_BYTES = 5 << 20


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
  """How decode is cut.

  Attributes:
    pages_per_block: pages that are copied and computed together.
  """

  pages_per_block: int


@dataclasses.dataclass(frozen=True)
class PrefillTiles:
  """How ragged prefill is cut.

  Attributes:
    pages_per_block: pages that are copied and computed together.
    query_block: tokens of a query tile.
  """

  pages_per_block: int
  query_block: int


def page_bytes(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> int:
  """Bytes of K and V of one page, as buffered."""
  itemsize = operands.k_pages.dtype.itemsize
  rows = options.page_size // options.k_geometry.fold
  lanes = options.k_geometry.lane + options.v_geometry.lane
  return options.kv_heads * rows * lanes * itemsize


def decode_tiles(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> DecodeTiles:
  """The tiles of a decode call."""
  return DecodeTiles(
    pages_per_block=_pages_per_block(operands, options, MOST_ROWS)
  )


def prefill_tiles(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> PrefillTiles:
  """The tiles of a ragged call."""
  tokens, q_heads, _ = operands.q.shape
  sequences = operands.page_table.shape[0]
  group = q_heads // options.kv_heads
  # Sixteen rows fill a tile of bfloat16.
  unit = 16 // math.gcd(16, group)
  rows = min(QUERY_ROWS, QUERY_TILE_BYTES // query_row_bytes(operands, options))
  # A tile that many sequences share is computed once for each of them.
  block = min(rows // group, -(-4 * tokens // max(1, sequences)), tokens)
  return PrefillTiles(
    pages_per_block=_pages_per_block(operands, options, FEWEST_ROWS),
    query_block=max(unit, block // unit * unit),
  )


def query_row_bytes(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> int:
  """Bytes of VMEM that a query row of all KV heads takes in a ragged call.

  Queries and outputs are there twice; the accumulator has two columns, which
  take a lane row each.
  """
  itemsize = 4 if wide_float(operands) else 2
  k, v = options.k_geometry, options.v_geometry
  return options.kv_heads * (
    k.fold * (2 * k.lane * itemsize + (v.lane + 2 * 128) * 4)
    + 2 * v.lane * itemsize
  )


def wide_float(operands: operands_lib.Operands) -> bool:
  """Whether products are of float32."""
  return jnp.float32 in (operands.q.dtype, operands.k_pages.dtype)


def _pages_per_block(
  operands: operands_lib.Operands,
  options: operands_lib.Options,
  most_rows: int,
) -> int:
  size = page_bytes(operands, options)
  page_size = options.page_size
  rows = BLOCK_BYTES // size * page_size
  rows = max(FEWEST_ROWS, min(most_rows, rows))
  pages = max(1, rows // page_size)
  pages = min(pages, MOST_PAGES, max(1, BUFFER_BYTES // (2 * size)))
  return min(pages, operands.page_table.shape[1])
