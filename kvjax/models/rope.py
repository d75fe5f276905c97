"""Rotary position embeddings: frequencies, their scaling, the rotation.

Every scaling that kvjax runs is one vector of divisors: pair i of a head turns
by `position * theta ** (-2 i / head_dim) / factors[i]`. A GGUF file stores
that vector as it is; the formulas of config.json are evaluated here, once.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def linear_factors(head_dim: int, factor: float) -> tuple[float, ...]:
  """Divides every frequency alike (position interpolation)."""
  return (float(factor),) * (head_dim // 2)


def llama3_factors(
  head_dim: int,
  theta: float,
  *,
  factor: float,
  low_freq_factor: float,
  high_freq_factor: float,
  original_context: int,
) -> tuple[float, ...]:
  """The divisors of Llama 3.1's long-context scaling.

  Wavelengths above `original_context / low_freq_factor` are stretched by
  `factor`, those below `original_context / high_freq_factor` stay, and the
  frequency between is interpolated.

  Args:
    head_dim: Width of a head.
    theta: Base of the unscaled frequencies.
    factor: How many times longer the longest wavelengths become.
    low_freq_factor: Turns in the original context below which all of it is
      stretched.
    high_freq_factor: Turns in the original context above which none is.
    original_context: Tokens of context before the scaling.

  Returns:
    One divisor for each of the `head_dim // 2` pairs.

  Reference:
    The Llama 3 Herd of Models, section 3.4.3, and its released code.
  """
  factors = []
  for frequency in inverse_frequencies(head_dim, theta, None):
    turns = original_context * frequency / (2 * math.pi)
    smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    smooth = min(max(smooth, 0.0), 1.0)
    factors.append(float(1 / (smooth + (1 - smooth) / factor)))
  return tuple(factors)


def inverse_frequencies(
  head_dim: int, theta: float, factors: Sequence[float] | None
) -> np.ndarray:
  """Radians per position of each pair, float64 `[head_dim // 2]`."""
  exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
  frequencies = np.power(float(theta), -exponents)
  if factors is None:
    return frequencies
  return frequencies / np.asarray(factors, np.float64)


def angles(
  positions: jax.Array, frequencies: np.ndarray
) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines, float32 `[..., 1, head_dim // 2]`, for all layers.

  Args:
    positions: Integer positions `[...]`.
    frequencies: Radians per position `[head_dim // 2]`.
  """
  turns = jnp.expand_dims(positions, (-1, -2)).astype(jnp.float32)
  radians = turns * jnp.expand_dims(
    jnp.asarray(frequencies, jnp.float32), tuple(range(positions.ndim + 1))
  )
  return jnp.cos(radians), jnp.sin(radians)


def rotate(x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Turns pair (i, i + head_dim // 2) of every head by its angle.

  Args:
    x: `[..., heads, head_dim]`.
    cos_sin: What `angles` gave for the same leading axes.

  Returns:
    As `x`, computed in float32.
  """
  cos, sin = cos_sin
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = (first * cos - second * sin, second * cos + first * sin)
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)
