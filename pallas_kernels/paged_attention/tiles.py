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
    query_rows: query rows of one sequence in a tile of a longer chunk.
  """

  block_rows: int = 256
  decode_sequences: int = 4
  query_rows: int = 128

  def block_pages(self, page_size: int, width: int) -> int:
    """Pages of a block, of tables of `width` pages."""
    return max(1, min(self.block_rows // page_size, width))


def choose_xla_tiles(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> XlaTiles:
  """Block sizes for a call.

  Args:
    operands: of the call.
    options: of the call.
  """
  del operands, options
  return XlaTiles()
