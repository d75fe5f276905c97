"""How the TPU kernels cut updates."""

import dataclasses

from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import page_shape
from pallas_kernels.kv_update import operands as operands_lib

# Lane rows of a tile that is read, changed and written back.
TILE_ROWS = 8
# Tokens of a grid step, and what its new rows may take, K's and V's.
MOST_TOKENS = 256
CHUNK_BYTES = 2 << 20
# Tiles in flight together hide a copy's latency; what they may take.
MOST_RING = 32
FEWEST_RING = 4
RING_BYTES = 4 << 20
# Slots and ids are checked on the host (`checks.check_tables`).
COMPILER_PARAMS = pltpu.CompilerParams(
  dimension_semantics=("arbitrary",), disable_bounds_checks=True
)


@dataclasses.dataclass(frozen=True)
class WriteTiles:
  """How `write_kv` is cut.

  Attributes:
    chunk: tokens of a grid step.
    ring: tiles in flight together.
    vmem_bytes: what both come to.
  """

  chunk: int
  ring: int
  vmem_bytes: int


def tile_rows(geometry: page_shape.PageGeometry) -> int:
  """Lane rows of a tile; a page that has fewer is one tile."""
  return min(TILE_ROWS, geometry.page_size // geometry.fold)


def write_tiles(
  operands: operands_lib.WriteOperands, options: operands_lib.WriteOptions
) -> WriteTiles:
  """The tiles of a `write_kv` call."""
  tokens = operands.k.shape[0]
  k, v = options.k_geometry, options.v_geometry
  lanes = k.kv_heads * (k.lane + v.lane)
  # VMEM is counted in 32-bit rows: narrower tiles of eight rows are padded.
  tile_bytes = 4 * TILE_ROWS * lanes
  row_bytes = 4 * lanes
  if operands.k_scales is not None:
    # A row of scales is padded to eight.
    scale_bytes = 2 * 8 * 4 * operands.k_scales.shape[-1]
    tile_bytes += scale_bytes
    row_bytes += scale_bytes
  ring = max(FEWEST_RING, min(MOST_RING, RING_BYTES // tile_bytes))
  chunk = min(MOST_TOKENS, CHUNK_BYTES // row_bytes, -(-tokens // 16) * 16)
  chunk = max(16, chunk // 16 * 16)
  padding = 2 * TILE_ROWS * k.fold * 4 * lanes
  vmem_bytes = ring * tile_bytes + 2 * (chunk * row_bytes + padding)
  return WriteTiles(chunk=chunk, ring=ring, vmem_bytes=vmem_bytes)
