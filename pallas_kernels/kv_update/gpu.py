"""Updates for Hopper GPUs: states what is refused, runs the kernels."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels import bits
from pallas_kernels import gpu_device
from pallas_kernels import page_shape
from pallas_kernels.kv_update import operands as operands_lib
from pallas_kernels.kv_update import quantize
from pallas_kernels.kv_update import xla

# Rows that one bulk copy moves where it can, and so a unit of pages.
GROUP_ROWS = 8
# Elements of one axis of a bulk copy.
LARGEST_BOX = 256
# A bulk copy moves whole units of this many bytes.
COPY_BYTES = 16
# Shared memory of one block.
SHARED_BYTES = 232_448 - 1_024


def why_write_unsupported(
  operands: operands_lib.WriteOperands, options: operands_lib.WriteOptions
) -> str | None:
  """Why the GPU kernel cannot write these rows, or None."""
  return (
    gpu_device.why_unsupported()
    or _geometry_reason("k_pages", operands.k_pages, options.k_geometry)
    or _geometry_reason("v_pages", operands.v_pages, options.v_geometry)
    or _memory_reason(shared_bytes(operands, options))
  )


def why_copy_unsupported(
  operands: operands_lib.CopyOperands, options: operands_lib.CopyOptions
) -> str | None:
  """Why the GPU kernel cannot copy these rows, or None."""
  page_size = options.geometry.page_size
  if page_size % GROUP_ROWS:
    return f"page_size {page_size}, expected a multiple of {GROUP_ROWS}"
  return (
    gpu_device.why_unsupported()
    or _geometry_reason("pages", operands.pages, options.geometry)
    or _memory_reason(shared_bytes(operands, options))
  )


def _geometry_reason(
  name: str, pages: jax.Array, geometry: page_shape.PageGeometry
) -> str | None:
  if geometry.lane != geometry.head_dim:
    return f"{name} are laid out for a TPU, {geometry.lane} lanes wide"
  row_bytes = geometry.head_dim * pages.dtype.itemsize
  if row_bytes % COPY_BYTES:
    return (
      f"{name} has rows of {row_bytes} bytes, expected a multiple of"
      f" {COPY_BYTES}, which bulk copies move"
    )
  for axis, size in (
    ("head_dim", geometry.head_dim),
    ("kv_heads", geometry.kv_heads),
  ):
    if size > LARGEST_BOX:
      return f"{name} has {axis} {size}, expected at most {LARGEST_BOX}"
  return None


def _memory_reason(size: int) -> str | None:
  if size <= SHARED_BYTES:
    return None
  return (
    f"a block takes {size} bytes of shared memory, expected at most"
    f" {SHARED_BYTES}"
  )


def write_kv(
  operands: operands_lib.WriteOperands, options: operands_lib.WriteOptions
) -> tuple[jax.Array, ...]:
  """`api.write_kv`: both sides' rows in one launch.

  Quantising is one pass over the rows, which XLA fuses, and scales are four
  bytes each, fewer than a bulk copy moves: XLA scatters them.
  """
  # Mosaic GPU is imported where it runs: a TPU's process does without.
  from pallas_kernels.kv_update import gpu_rows

  page_size, slots = options.k_geometry.page_size, operands.slots
  k, k_scales = _stored(
    operands.k, operands.k_pages, operands.k_scales, slots, page_size
  )
  v, v_scales = _stored(
    operands.v, operands.v_pages, operands.v_scales, slots, page_size
  )
  k_pages, v_pages = gpu_rows.write(
    k, v, operands.k_pages, operands.v_pages, slots
  )
  if k_scales is None or v_scales is None:
    return k_pages, v_pages
  return k_pages, v_pages, k_scales, v_scales


def _stored(
  x: jax.Array,  # [tokens, kv_heads, head_dim]
  pages: jax.Array,
  scales: jax.Array | None,
  slots: jax.Array,  # int32 [tokens]
  page_size: int,
) -> tuple[jax.Array, jax.Array | None]:
  """Rows as pages hold them, and the scales with theirs among them."""
  if scales is None:
    return bits.store(x, pages.dtype), None
  rows, factors = quantize.quantize_rows(x, bits.element_dtype(pages.dtype))
  page, row = slots // page_size, slots % page_size
  scales = xla.scatter_scales(scales, factors, page, row, page_size)
  return bits.store(rows, pages.dtype), scales


def copy_rows(
  operands: operands_lib.CopyOperands, options: operands_lib.CopyOptions
) -> jax.Array:
  """`api.copy_rows`."""
  from pallas_kernels.kv_update import gpu_rows

  del options
  return gpu_rows.copy(
    operands.pages,
    operands.source_pages,
    operands.destination_pages,
    operands.row_counts,
  )


def shared_bytes(
  operands: operands_lib.WriteOperands | operands_lib.CopyOperands,
  options: operands_lib.WriteOptions | operands_lib.CopyOptions,
) -> int:
  """Shared memory that one block of a call's kernel takes.

  Args:
    operands: arrays, or `jax.ShapeDtypeStruct`s.
    options: of the call.
  """
  del options
  if isinstance(operands, operands_lib.WriteOperands):
    return sum(
      _bytes((pages.shape[1], pages.shape[-1]), pages.dtype)
      for pages in (operands.k_pages, operands.v_pages)
    )
  _, _, page_size, head_dim = operands.pages.shape
  dtype = operands.pages.dtype
  tail = (GROUP_ROWS - 1, slot_elements(head_dim, dtype))
  return _bytes((page_size, head_dim), dtype) + _bytes(tail, dtype)


def slot_elements(head_dim: int, dtype: jnp.dtype) -> int:
  """Elements from one row to the next where each is copied on its own.

  Bulk copies begin at multiples of 128 bytes of shared memory.
  """
  itemsize = jnp.dtype(dtype).itemsize
  return page_shape.round_up(head_dim * itemsize, 128) // itemsize


def _bytes(shape: tuple[int, ...], dtype: jnp.dtype) -> int:
  return math.prod(shape) * jnp.dtype(dtype).itemsize
