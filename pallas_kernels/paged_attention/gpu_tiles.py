"""Tile choices of the Mosaic GPU kernels: frozen facts and one heuristic each.

Shared memory of one block of the decode kernel, bf16, head_dim 128:

    q, 64 rows                16 KiB
    K and V, 64 rows x 2      64 KiB
    out, 64 rows float32      32 KiB      two blocks fit a multiprocessor
"""

import dataclasses

from pallas_kernels.paged_attention import operands as operands_lib

# Rows of a WGMMA operand, and so of every query tile.
QUERY_ROWS = 64
# K and V of one step: what a bfloat16 head of 128 takes.
STEP_BYTES = 32_768
# Multiprocessors of an H100 or H200.
MULTIPROCESSORS = 132
# Blocks that should be in flight for each multiprocessor.
BLOCKS_PER_MULTIPROCESSOR = 2
# Fewer key rows than this are not worth a split: merging costs more.
LEAST_SPLIT_ROWS = 512
MOST_SPLITS = 32


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
  """How the decode kernel cuts its work.

  Attributes:
    key_rows: rows of K and V that one step reads.
    stages: steps whose copies are in shared memory at once.
    splits: blocks that share the keys of one sequence and KV head.
  """

  key_rows: int
  stages: int
  splits: int


@dataclasses.dataclass(frozen=True)
class PrefillTiles:
  """How the ragged kernel cuts its work.

  Attributes:
    key_rows: rows of K and V that one step reads.
    stages: steps whose copies are in shared memory at once.
    warpgroups: groups of 64 query rows that share those copies.
  """

  key_rows: int
  stages: int
  warpgroups: int

  @property
  def query_rows(self) -> int:
    """Query rows of one block."""
    return self.warpgroups * QUERY_ROWS


def fits(page_size: int) -> bool:
  """Whether tiles of keys are whole pages, or parts of one."""
  return page_size % 8 == 0 and (
    QUERY_ROWS % page_size == 0 or page_size % QUERY_ROWS == 0
  )


def decode_tiles(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> DecodeTiles:
  """Chooses tiles for a decode step.

  Splits fill the multiprocessors where sequences and heads do not, and no
  further: each split writes a float32 partial that is read again.

  Args:
    operands: of the call.
    options: of the call.
  """
  sequences, width = operands.page_table.shape
  wanted = MULTIPROCESSORS * BLOCKS_PER_MULTIPROCESSOR
  fill = -(-wanted // max(1, sequences * options.kv_heads))
  worth = -(-width * options.page_size // LEAST_SPLIT_ROWS)
  rows = _key_rows(options)
  return DecodeTiles(
    key_rows=rows,
    stages=_stages(rows, operands, options),
    splits=max(1, min(fill, worth, MOST_SPLITS)),
  )


def prefill_tiles(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> PrefillTiles:
  """Chooses tiles for a ragged step.

  Two warpgroups read each tile of keys once for both.  Quantised tiles are
  widened in registers: short ones, and with wide heads by one warpgroup that
  has every register that two would share.

  Args:
    operands: of the call.
    options: of the call.
  """
  wide = max(options.head_dim, options.v_head_dim) > 128
  quantized = operands.k_pages.dtype.itemsize == 1
  rows = QUERY_ROWS if quantized else _key_rows(options)
  return PrefillTiles(
    key_rows=rows,
    stages=2 if wide else _stages(rows, operands, options),
    warpgroups=1 if wide and quantized else 2,
  )


def _key_rows(options: operands_lib.Options) -> int:
  """Rows of K and V that one step reads: narrow heads take more of them."""
  narrow = max(options.head_dim, options.v_head_dim) <= 64
  whole = options.page_size < 128 or options.page_size % 128 == 0
  return 128 if narrow and whole else QUERY_ROWS


def _stages(
  rows: int, operands: operands_lib.Operands, options: operands_lib.Options
) -> int:
  """Enough steps in flight to cover a copy's latency, two at least."""
  columns = options.head_dim + options.v_head_dim
  step_bytes = rows * columns * operands.k_pages.dtype.itemsize
  return 2 if step_bytes > STEP_BYTES // 2 else 3
