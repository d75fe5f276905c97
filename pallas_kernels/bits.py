"""Pages of narrow floats, stored as integers where that moves them in place.

XLA for CPU widens whatever it does in fp8, and before JAX 0.11 in bfloat16, to
float32: to write one row it converts the whole pool.  The same bits stored as
unsigned integers are written in place, and turned back into floats a gathered
block at a time.  So an array of uint16 is bfloat16 pages, one of uint8 is
float8_e4m3fn pages, wherever this package takes pages.
"""

import jax
import jax.numpy as jnp
from jax import lax

_INTEGER_OF = {
  jnp.dtype(jnp.bfloat16): jnp.dtype(jnp.uint16),
  jnp.dtype(jnp.float8_e4m3fn): jnp.dtype(jnp.uint8),
}
_FLOAT_OF = {integer: narrow for narrow, integer in _INTEGER_OF.items()}


def storage_dtype(dtype: jnp.dtype, *, platform: str) -> jnp.dtype:
  """The dtype of the array that holds pages.

  Args:
    dtype: of the elements.
    platform: "cpu", "gpu" or "tpu".

  >>> storage_dtype(jnp.bfloat16, platform="cpu")
  dtype('uint16')
  >>> storage_dtype(jnp.bfloat16, platform="tpu")
  dtype(bfloat16)
  """
  dtype = jnp.dtype(dtype)
  return _INTEGER_OF.get(dtype, dtype) if platform == "cpu" else dtype


def element_dtype(dtype: jnp.dtype) -> jnp.dtype:
  """What the elements of an array of pages are, whatever it is stored as."""
  dtype = jnp.dtype(dtype)
  return _FLOAT_OF.get(dtype, dtype)


def load(stored: jax.Array) -> jax.Array:
  """Elements of what was read from pages."""
  element = element_dtype(stored.dtype)
  if element == stored.dtype:
    return stored
  return lax.bitcast_convert_type(stored, element)


def store(elements: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Elements as an array of pages of `dtype` stores them; rounds to fit."""
  elements = elements.astype(element_dtype(dtype))
  if elements.dtype == dtype:
    return elements
  return lax.bitcast_convert_type(elements, dtype)
