"""Flat row scatters, which update pages in place on every backend."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import bits
from pallas_kernels import page_shape
from pallas_kernels.kv_update import operands as operands_lib
from pallas_kernels.kv_update import quantize


def why_write_unsupported(
  operands: operands_lib.WriteOperands, options: operands_lib.WriteOptions
) -> str | None:
  """None: it runs everything."""
  del operands, options
  return None


def why_copy_unsupported(
  operands: operands_lib.CopyOperands, options: operands_lib.CopyOptions
) -> str | None:
  """None: it runs everything."""
  del operands, options
  return None


def write_kv(
  operands: operands_lib.WriteOperands, options: operands_lib.WriteOptions
) -> tuple[jax.Array, ...]:
  """`api.write_kv`."""
  return operands_lib.write_both(_write, operands, options)


def _write(
  x: jax.Array,  # [tokens, kv_heads, head_dim]
  pages: jax.Array,
  scales: jax.Array | None,
  slots: jax.Array,
  geometry: page_shape.PageGeometry,
) -> tuple[jax.Array, jax.Array | None]:
  kv_heads, page_size = geometry.kv_heads, geometry.page_size
  page, row = slots // page_size, slots % page_size
  head = jnp.arange(kv_heads, dtype=jnp.int32)
  if scales is not None:
    x, factors = quantize.quantize_rows(x, bits.element_dtype(pages.dtype))
    scales = scatter_scales(scales, factors, page, row, page_size)
  # Offsets are counted in rows: in elements they pass int32 at 2 GiB of bytes.
  rows = (page[:, None] * kv_heads + head[None, :]) * page_size + row[:, None]
  stored = geometry.stored_dim
  if stored != geometry.head_dim:
    x = jnp.pad(x, ((0, 0), (0, 0), (0, stored - geometry.head_dim)))
  flat = pages.reshape(-1, stored)
  flat = flat.at[rows.reshape(-1)].set(
    bits.store(x, pages.dtype).reshape(-1, stored), mode="promise_in_bounds"
  )
  return flat.reshape(pages.shape), scales


def scatter_scales(
  scales: jax.Array,  # float32 [pages, 1, scale lanes]
  factors: jax.Array,  # float32 [tokens, kv_heads]
  page: jax.Array,  # int32 [tokens]
  row: jax.Array,  # int32 [tokens], of that page
  page_size: int,
) -> jax.Array:
  """Files each row's factors among its page's scales."""
  head = jnp.arange(factors.shape[1], dtype=jnp.int32)
  places = head[None, :] * page_size + row[:, None]
  return scales.at[page[:, None], 0, places].set(
    factors, mode="promise_in_bounds"
  )


def copy_rows(
  operands: operands_lib.CopyOperands, options: operands_lib.CopyOptions
) -> jax.Array:
  """`api.copy_rows`: a loop over the real copies, one page at a time.

  Destinations are never sources, so reading late reads the same.
  """
  pages, geometry = operands.pages, options.geometry
  _, kv_heads, rows, lane = pages.shape
  counts = operands.row_counts
  real = counts > 0
  order = jnp.argsort(~real, stable=True)
  element = jnp.arange(rows * lane, dtype=jnp.int32)
  row = (element // geometry.stored_dim).reshape(1, 1, rows, lane)
  zero = jnp.int32(0)

  def body(at: jax.Array, pages: jax.Array) -> jax.Array:
    copy = order[at]
    size = (1, kv_heads, rows, lane)
    source = (operands.source_pages[copy], zero, zero, zero)
    target = (operands.destination_pages[copy], zero, zero, zero)
    moved = jnp.where(
      row < counts[copy],
      lax.dynamic_slice(pages, source, size),
      lax.dynamic_slice(pages, target, size),
    )
    return lax.dynamic_update_slice(pages, moved, target)

  return lax.fori_loop(0, real.sum(dtype=jnp.int32), body, pages)
