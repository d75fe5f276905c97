"""How `xla` cuts a call into blocks."""

import dataclasses

from pallas_kernels.paged_attention import operands as operands_lib


@dataclasses.dataclass(frozen=True)
class XlaTiles:
  """Block sizes of one call.

  Attributes:
    block_rows: key rows gathered and multiplied at once, about; a whole number
      of pages.
    decode_sequences: sequences with one query that share a block's products.
    query_rows: query rows of one sequence in a tile of a long chunk.
    short_query_rows: query rows of a tile of what is left of a chunk.
  """

  block_rows: int
  decode_sequences: int
  query_rows: int
  short_query_rows: int

  def block_pages(self, page_size: int, width: int) -> int:
    """Pages of a block, of tables of `width` pages."""
    return max(1, min(self.block_rows // page_size, width))


def choose_xla_tiles(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> XlaTiles:
  """Block sizes for a call, by measurement on CPUs.

  Few rows a block waste little of short contexts; a chunk's many queries want
  larger products.

  Args:
    operands: of the call.
    options: of the call.
  """
  del options
  return XlaTiles(
    block_rows=128 if operands.is_decode else 256,
    decode_sequences=8,
    query_rows=128,
    short_query_rows=32,
  )
