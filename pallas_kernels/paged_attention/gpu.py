"""Paged attention for Hopper GPUs: states what is refused, picks the kernel."""

import jax
import jax.numpy as jnp

from pallas_kernels import gpu_device
from pallas_kernels.paged_attention import gpu_tiles
from pallas_kernels.paged_attention import operands as operands_lib
from pallas_kernels.paged_attention import visibility

HEAD_DIM_MULTIPLE = 64
LARGEST_HEAD_DIM = 256


def why_unsupported(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> str | None:
  """Why the GPU kernels cannot run this call, or None."""
  return (
    gpu_device.why_unsupported()
    or _dtype_reason(operands)
    or _shape_reason(operands, options)
  )


def _dtype_reason(operands: operands_lib.Operands) -> str | None:
  q, pages = operands.q.dtype, operands.k_pages.dtype
  if q != jnp.bfloat16:
    return (
      f"queries are {q}: WGMMA multiplies float32 as TF32, which misses the"
      " tolerance, so queries are bfloat16"
    )
  if pages not in (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn):
    return f"pages are {pages}, expected bfloat16, int8 or float8_e4m3fn"
  return None


def _shape_reason(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> str | None:
  for name, geometry in (("K", options.k_geometry), ("V", options.v_geometry)):
    dim = geometry.head_dim
    if dim % HEAD_DIM_MULTIPLE or dim > LARGEST_HEAD_DIM:
      return (
        f"{name} has head_dim {dim}, expected a multiple of"
        f" {HEAD_DIM_MULTIPLE} up to {LARGEST_HEAD_DIM}: a swizzled tile is"
        f" {HEAD_DIM_MULTIPLE} columns"
      )
    if geometry.lane != dim:
      return f"{name} pages are laid out for a TPU, {geometry.lane} lanes wide"
  if not gpu_tiles.fits(options.page_size):
    return (
      f"page_size {options.page_size}, expected a multiple of 8 that divides"
      f" {gpu_tiles.QUERY_ROWS}, or a multiple of {gpu_tiles.QUERY_ROWS}: a"
      " tile is whole pages or a part of one"
    )
  group = operands.q.shape[1] // options.kv_heads
  if group > gpu_tiles.QUERY_ROWS:
    return (
      f"{group} query heads share a KV head, expected at most"
      f" {gpu_tiles.QUERY_ROWS}, the rows of a tile"
    )
  return None


def paged_attention(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> tuple[jax.Array, jax.Array]:
  """`api.paged_attention`."""
  # Mosaic GPU is imported where it runs: a TPU's process does without.
  from pallas_kernels.paged_attention import gpu_decode
  from pallas_kernels.paged_attention import gpu_prefill

  sequence, real = visibility.sequence_of_tokens(operands)
  lo, hi = bounds(operands, options, sequence, real)
  if operands.is_decode:
    out, lse = gpu_decode.decode(operands, options, lo, hi)
  else:
    out, lse = gpu_prefill.prefill(operands, options, lo, hi)
    out = jnp.where(real[:, None, None], out, 0)
    lse = jnp.where(real[:, None], lse, -jnp.inf)
  if operands.sinks is not None:
    out, lse = _with_sinks(out, lse, operands.sinks, real)
  return out.astype(operands.q.dtype), lse


def shared_bytes(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> int:
  """Shared memory that one block of a call's kernel takes.

  Args:
    operands: arrays, or `jax.ShapeDtypeStruct`s.
    options: of the call.
  """
  from pallas_kernels.paged_attention import gpu_copies
  from pallas_kernels.paged_attention import gpu_decode
  from pallas_kernels.paged_attention import gpu_prefill
  from pallas_kernels.paged_attention import gpu_tile

  if operands.is_decode:
    cut = gpu_tiles.decode_tiles(operands, options)
    spec = gpu_tile.spec_of(operands, options, cut, workers=1)
    return gpu_copies.shared_bytes(gpu_decode.scratch(spec, cut))
  tiles = gpu_tiles.prefill_tiles(operands, options)
  spec = gpu_tile.spec_of(operands, options, tiles, workers=tiles.warpgroups)
  return gpu_copies.shared_bytes(gpu_prefill.scratch(spec))


def bounds(
  operands: operands_lib.Operands,
  options: operands_lib.Options,
  sequence: jax.Array,  # int32 [tokens]
  real: jax.Array,  # bool [tokens]
) -> tuple[jax.Array, jax.Array]:
  """The key rows that each query sees: positions, masks and windows in one.

  Returns:
    `(lo, hi)`, int32 [tokens]: rows lo..hi-1 of the query's own sequence.
  """
  at = visibility.token_positions(operands, sequence)
  if operands.key_starts is not None:
    at = at - operands.key_starts[sequence]
  hi = operands.context_lens[sequence]
  if options.causal:
    hi = jnp.minimum(hi, at + 1)
  lo = jnp.zeros_like(hi)
  if operands.window is not None:
    # Subtracted only where it cannot wrap: a window may be as large as int32.
    lo = jnp.where(at < operands.window, lo, at - operands.window + 1)
  hi = jnp.where(real, jnp.maximum(hi, 0), 0)
  return jnp.where(real, lo, 0), hi


def _with_sinks(
  out: jax.Array,  # [tokens, q_heads, v_head_dim]
  lse: jax.Array,  # float32 [tokens, q_heads]
  sinks: jax.Array,  # [q_heads]
  real: jax.Array,  # bool [tokens]
) -> tuple[jax.Array, jax.Array]:
  """Adds a logit without a value to what was attended."""
  logits = jnp.where(real[:, None], sinks.astype(jnp.float32)[None], -jnp.inf)
  total = jnp.logaddexp(lse, logits)
  share = jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - total))
  return out.astype(jnp.float32) * share[..., None], total
