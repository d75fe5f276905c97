"""What K and V pools of one call must agree on, and their scales with them."""

from typing import Protocol

import jax
import jax.numpy as jnp

from pallas_kernels import bits
from pallas_kernels import checks
from pallas_kernels import errors
from pallas_kernels import page_shape

QUANTIZED_DTYPES = (jnp.int8, jnp.float8_e4m3fn)
FLOAT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


class Pools(Protocol):
  """The operands of a call, as far as they are pools."""

  @property
  def k_pages(self) -> jax.Array: ...  # [pages, *page_shape]
  @property
  def v_pages(self) -> jax.Array: ...  # [pages, *page_shape]
  @property
  def k_scales(self) -> jax.Array | None: ...  # float32 [pages, *scales_shape]
  @property
  def v_scales(self) -> jax.Array | None: ...  # the same


def dtype_names(dtypes: tuple[type, ...]) -> str:
  """The dtypes in words, for errors."""
  return ", ".join(jnp.dtype(dtype).name for dtype in dtypes)


def require_dtypes(pools: Pools) -> None:
  """Raises unless K and V pages are of one dtype that pages may have.

  Raises:
    KernelArgumentError: with the dtype and what was expected.
  """
  k, v = pools.k_pages.dtype, pools.v_pages.dtype
  if k != v:
    raise errors.KernelArgumentError(
      f"k_pages has dtype {k} and v_pages {v}, expected the same"
    )
  known = FLOAT_DTYPES + QUANTIZED_DTYPES
  if bits.element_dtype(k) not in known:
    raise errors.KernelArgumentError(
      f"k_pages has dtype {k}, expected one of {dtype_names(known)}"
    )


def require_equal_counts(pools: Pools) -> None:
  """Raises unless one page id is in range for both, or for neither.

  Raises:
    KernelArgumentError: with both numbers of pages.
  """
  k, v = pools.k_pages.shape[0], pools.v_pages.shape[0]
  if k != v:
    raise errors.KernelArgumentError(
      f"k_pages has {k} pages and v_pages {v}, expected the same number: one"
      " table or slot serves both"
    )


def require_scales(pools: Pools, geometry: page_shape.PageGeometry) -> None:
  """Raises unless scales are there exactly where pages are quantised.

  Args:
    pools: of the call.
    geometry: of the K pages; V's has the same heads and rows.

  Raises:
    KernelArgumentError: they are missing or too many, or of another shape or
      dtype.
  """
  dtype = pools.k_pages.dtype
  quantized = bits.element_dtype(dtype) in QUANTIZED_DTYPES
  shape = page_shape.scales_shape(geometry.kv_heads, geometry.page_size)
  sides = (
    ("k_scales", pools.k_scales, pools.k_pages),
    ("v_scales", pools.v_scales, pools.v_pages),
  )
  for name, scales, pages in sides:
    if (scales is not None) != quantized:
      raise errors.KernelArgumentError(
        f"{name} is {'missing' if quantized else 'given'}, expected scales"
        f" exactly where pages are int8 or fp8; they are {dtype}"
      )
    if scales is None:
      continue
    checks.require_shape(
      name, scales, "[pages, 1, scale lanes]", (pages.shape[0], *shape)
    )
    if scales.dtype != jnp.float32:
      raise errors.KernelArgumentError(
        f"{name} has dtype {scales.dtype}, expected float32"
      )
