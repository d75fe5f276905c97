"""The obvious implementations: one row after another."""

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
  """None: it runs everything, slowly."""
  del operands, options
  return None


def why_copy_unsupported(
  operands: operands_lib.CopyOperands, options: operands_lib.CopyOptions
) -> str | None:
  """None: it runs everything, slowly."""
  del operands, options
  return None


def write_kv(
  operands: operands_lib.WriteOperands, options: operands_lib.WriteOptions
) -> tuple[jax.Array, ...]:
  """`api.write_kv`, one token after another."""
  return operands_lib.write_both(_write, operands, options)


def _write(
  x: jax.Array,  # [tokens, kv_heads, head_dim]
  pages: jax.Array,
  scales: jax.Array | None,
  slots: jax.Array,
  geometry: page_shape.PageGeometry,
) -> tuple[jax.Array, jax.Array | None]:
  kv_heads, page_size = geometry.kv_heads, geometry.page_size
  factors = None
  if scales is not None:
    x, factors = quantize.quantize_rows(x, bits.element_dtype(pages.dtype))
  x = bits.store(x, pages.dtype)

  def body(
    token: jax.Array, state: tuple[jax.Array, jax.Array | None]
  ) -> tuple[jax.Array, jax.Array | None]:
    pages, scales = state
    page, row = slots[token] // page_size, slots[token] % page_size
    lane = (row % geometry.fold) * geometry.stored_dim
    at = (page, 0, row // geometry.fold, lane)
    pages = lax.dynamic_update_slice(pages, x[token][None, :, None, :], at)
    if scales is not None and factors is not None:
      places = jnp.arange(kv_heads, dtype=jnp.int32) * page_size + row
      scales = scales.at[page, 0, places].set(factors[token])
    return pages, scales

  return lax.fori_loop(0, x.shape[0], body, (pages, scales))


def copy_rows(
  operands: operands_lib.CopyOperands, options: operands_lib.CopyOptions
) -> jax.Array:
  """`api.copy_rows`, one page after another."""
  pages, geometry = operands.pages, options.geometry
  _, _, rows, lane = pages.shape
  element = jnp.arange(rows * lane, dtype=jnp.int32)
  row = (element // geometry.stored_dim).reshape(1, rows, lane)
  before = operands.pages

  def body(copy: jax.Array, pages: jax.Array) -> jax.Array:
    destination = operands.destination_pages[copy]
    copied = row < operands.row_counts[copy]
    moved = jnp.where(
      copied, before[operands.source_pages[copy]], pages[destination]
    )
    return pages.at[destination].set(moved)

  return lax.fori_loop(0, operands.source_pages.shape[0], body, pages)
