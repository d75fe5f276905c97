"""Updates of pages for TPU: states what is refused."""

import jax
import jax.numpy as jnp

from pallas_kernels import page_shape
from pallas_kernels import tpu_memory
from pallas_kernels.kv_update import operands as operands_lib
from pallas_kernels.kv_update import tpu_copy
from pallas_kernels.kv_update import tpu_runs
from pallas_kernels.kv_update import tpu_tiles
from pallas_kernels.kv_update import tpu_write

# Of 16 MiB: the rest is the compiler's.
VMEM_BYTES = 12 << 20


def why_write_unsupported(
  operands: operands_lib.WriteOperands, options: operands_lib.WriteOptions
) -> str | None:
  """Why the TPU kernel cannot run this `write_kv`, or None."""
  k, v = options.k_geometry, options.v_geometry
  reason = _layout_reason("k_pages", operands.k_pages, k) or _layout_reason(
    "v_pages", operands.v_pages, v
  )
  if reason is not None:
    return reason
  if k.fold != v.fold:
    return (
      f"head_dim={k.head_dim} with v_head_dim={v.head_dim}: two rows share a"
      " lane row in one and not in the other"
    )
  size = k.page_size
  if operands.k_scales is not None and size & (size - 1):
    return f"page_size={size} with quantised pages, expected a power of two"
  tiles = tpu_tiles.write_tiles(operands, options)
  if tiles.vmem_bytes > VMEM_BYTES:
    return (
      f"rows of {k.kv_heads} KV heads of {k.head_dim} take"
      f" {tiles.vmem_bytes} bytes of VMEM, expected at most {VMEM_BYTES}"
    )
  tokens = operands.slots.shape[0]
  return tpu_memory.smem_reason(
    tokens + size + tpu_runs.BUCKETS + 4 * 128, f"slots of {tokens} tokens"
  )


def why_copy_unsupported(
  operands: operands_lib.CopyOperands, options: operands_lib.CopyOptions
) -> str | None:
  """Why the TPU kernel cannot run this `copy_rows`, or None."""
  geometry = options.geometry
  reason = _layout_reason("pages", operands.pages, geometry)
  if reason is not None:
    return reason
  _, kv_heads, rows, lane = operands.pages.shape
  # Two buffers of a source and a destination, and what is merged of them: bytes
  # are compared as 32-bit words on some generations.
  itemsize = operands.pages.dtype.itemsize
  size = (
    kv_heads * rows * lane * (4 * itemsize + (8 if itemsize == 1 else itemsize))
  )
  if size > VMEM_BYTES:
    return (
      f"pages of shape {operands.pages.shape[1:]} take {size} bytes of VMEM,"
      f" expected at most {VMEM_BYTES}: use a smaller page_size"
    )
  copies = operands.source_pages.shape[0]
  return tpu_memory.smem_reason(3 * copies, f"{copies} copies")


def write_kv(
  operands: operands_lib.WriteOperands, options: operands_lib.WriteOptions
) -> tuple[jax.Array, ...]:
  """`api.write_kv`."""
  return tpu_write.write_kv(operands, options)


def copy_rows(
  operands: operands_lib.CopyOperands, options: operands_lib.CopyOptions
) -> jax.Array:
  """`api.copy_rows`."""
  return tpu_copy.copy_rows(operands, options)


def _layout_reason(
  name: str, pages: jax.Array, geometry: page_shape.PageGeometry
) -> str | None:
  taken = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn)
  if pages.dtype not in taken:
    names = ", ".join(jnp.dtype(d).name for d in taken)
    return f"{name} has dtype {pages.dtype}, expected one of {names}"
  if geometry.lane % page_shape.TPU_LANE:
    return (
      f"{name} has shape {pages.shape}, laid out for another platform: its last"
      f" axis is no multiple of {page_shape.TPU_LANE}"
    )
  rows = geometry.page_size // geometry.fold
  if geometry.page_size % 8 or rows % tpu_tiles.tile_rows(geometry):
    return (
      f"page_size={geometry.page_size} with head_dim={geometry.head_dim},"
      f" expected 8 or a multiple of {8 * geometry.fold}: pages are written by"
      " whole tiles"
    )
  return None
