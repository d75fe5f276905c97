"""Rows to int8 or fp8 with one float32 scale per row and head, and back."""

import jax
import jax.numpy as jnp

LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}


def quantize_rows(
  rows: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
  """Quantises each row to the full range of a narrow dtype.

      row ~ quantized * scale,  scale = max |row| / largest(dtype)

  Args:
    rows: `[..., head_dim]`.
    dtype: int8 or float8_e4m3fn.

  Returns:
    `(quantized, scales)`: `[..., head_dim]` of dtype, float32 `[...]`.  A row
    of zeros has scale 1, and no scale is so small that a device flushes it to
    zero: nothing is ever divided by zero.
  """
  largest = LARGEST[jnp.dtype(dtype)]
  rows = rows.astype(jnp.float32)
  peak = jnp.abs(rows).max(-1)
  scales = jnp.maximum(peak / largest, jnp.finfo(jnp.float32).tiny)
  scales = jnp.where(peak == 0, 1.0, scales)
  scaled = rows / scales[..., None]
  if jnp.issubdtype(dtype, jnp.integer):
    scaled = jnp.round(scaled)
  scaled = jnp.clip(scaled, -largest, largest)
  return scaled.astype(dtype), scales
