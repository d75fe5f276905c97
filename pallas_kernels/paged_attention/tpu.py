"""Paged attention for TPU: selects the kernel and states what is refused."""

import jax
import jax.numpy as jnp

from pallas_kernels import page_shape
from pallas_kernels import tpu_memory
from pallas_kernels.paged_attention import operands as operands_lib
from pallas_kernels.paged_attention import tpu_calls
from pallas_kernels.paged_attention import tpu_decode
from pallas_kernels.paged_attention import tpu_prefill
from pallas_kernels.paged_attention import tpu_scales
from pallas_kernels.paged_attention import tpu_tiles

# Pages are copied whole into buffers that are tiled by eight rows.
PAGE_ROWS = 8


def why_unsupported(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> str | None:
  """Why the TPU kernels cannot run this call, or None."""
  return (
    _dtype_reason(operands)
    or _layout_reason(operands, options)
    or _memory_reason(operands, options)
  )


def paged_attention(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> tuple[jax.Array, jax.Array]:
  """`api.paged_attention`."""
  if operands.is_decode:
    return tpu_decode.decode(
      operands, options, tpu_tiles.decode_tiles(operands, options)
    )
  return tpu_prefill.prefill(
    operands, options, tpu_tiles.prefill_tiles(operands, options)
  )


def _dtype_reason(operands: operands_lib.Operands) -> str | None:
  taken = {
    "q": (jnp.float32, jnp.bfloat16),
    "k_pages": (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn),
  }
  for name, dtypes in taken.items():
    dtype = getattr(operands, name).dtype
    if dtype not in dtypes:
      names = ", ".join(jnp.dtype(d).name for d in dtypes)
      return f"{name} has dtype {dtype}, expected one of {names}"
  return None


def _layout_reason(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> str | None:
  k, v = options.k_geometry, options.v_geometry
  for name, geometry in (("k_pages", k), ("v_pages", v)):
    if geometry.lane % page_shape.TPU_LANE:
      return (
        f"{name} has shape {getattr(operands, name).shape}, laid out for another"
        f" platform: its last axis is no multiple of {page_shape.TPU_LANE}"
      )
  if k.fold != v.fold:
    return (
      f"head_dim={k.head_dim} with v_head_dim={v.head_dim}: two rows share a"
      " lane row in one and not in the other"
    )
  if k.page_size % PAGE_ROWS:
    return f"page_size={k.page_size}, expected a multiple of {PAGE_ROWS}"
  if operands.k_scales is not None:
    return tpu_scales.why_unsupported(k)
  return None


def _memory_reason(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> str | None:
  size = 2 * tpu_tiles.page_bytes(operands, options)
  if size > tpu_tiles.BUFFER_BYTES:
    return (
      f"two buffers of one page of K and V take {size} bytes of VMEM, expected"
      f" at most {tpu_tiles.BUFFER_BYTES}: use a smaller page_size"
    )
  if operands.is_decode:
    pages = tpu_tiles.decode_tiles(operands, options).pages_per_block
    num_items, scalars = operands.page_table.shape[0], 3
  else:
    tiles = tpu_tiles.prefill_tiles(operands, options)
    pages, scalars = tiles.pages_per_block, 7
    tokens, q_heads, _ = operands.q.shape
    rows = tiles.query_block * q_heads // options.kv_heads
    size = rows * tpu_tiles.query_row_bytes(operands, options)
    if size > tpu_tiles.QUERY_TILE_BYTES:
      return (
        f"{rows} query rows of {options.kv_heads} KV heads take {size} bytes of"
        f" VMEM, expected at most {tpu_tiles.QUERY_TILE_BYTES}"
      )
    num_tiles = -(-tokens // tiles.query_block)
    num_items = num_tiles + operands.page_table.shape[0]
  sequences, width = operands.page_table.shape
  tables = 1 if operands.v_page_table is None else 2
  row = tpu_calls.table_width(width, pages)
  return tpu_memory.smem_reason(
    scalars * page_shape.round_up(num_items + 1, 128) + 2 * tables * row,
    f"{sequences} sequences of {width} pages",
  )
