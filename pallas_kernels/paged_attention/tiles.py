"""How `xla` cuts a call into blocks."""

import dataclasses

from pallas_kernels.paged_attention import operands as operands_lib

_DECODE_BLOCKS = 8
_DECODE_BLOCK_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class XlaTiles:
  """Block sizes of one call.

  Attributes:
    block_rows: key rows gathered and multiplied at once, about; a whole number
      of pages.
    decode_blocks: blocks of sequences with one query, of the same or of
      different ones, that are multiplied at once.
    query_rows: query rows of one sequence in a tile of a long chunk.
    short_query_rows: query rows of a tile of what is left of a chunk.
  """

  block_rows: int
  decode_blocks: int
  query_rows: int
  short_query_rows: int

  def block_pages(self, page_size: int, width: int) -> int:
    """Pages of a block, of tables of `width` pages."""
    return max(1, min(self.block_rows // page_size, width))


def choose_xla_tiles(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> XlaTiles:
  """Block sizes for a call, by measurement on CPUs.

  A decode group's blocks of K, and as much of V, stay in a core's cache; a
  chunk's many queries want larger products, whatever the block.

  Args:
    operands: of the call.
    options: of the call.
  """
  tokens, sequences = operands.q.shape[0], operands.page_table.shape[0]
  row_bytes = 4 * options.kv_heads * options.head_dim
  fitting = _DECODE_BLOCK_BYTES // (_DECODE_BLOCKS * row_bytes)
  block_rows = min(256, max(64, 2 ** (max(1, fitting).bit_length() - 1)))
  return XlaTiles(
    block_rows=block_rows if operands.is_decode else 256,
    decode_blocks=_DECODE_BLOCKS,
    # A larger tile is faster where most of a chunk fills it.
    query_rows=256 if tokens >= 512 * sequences else 128,
    short_query_rows=32,
  )
