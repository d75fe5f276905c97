"""The obvious implementation: gather everything, one softmax, float32."""

import jax
import jax.numpy as jnp

from pallas_kernels import bits
from pallas_kernels import page_shape
from pallas_kernels.paged_attention import operands as operands_lib
from pallas_kernels.paged_attention import visibility


def why_unsupported(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> str | None:
  """None: it runs everything, slowly."""
  del operands, options
  return None


def paged_attention(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> tuple[jax.Array, jax.Array]:
  """`api.paged_attention` by the definition, every row of every table read."""
  q = operands.q
  tokens, q_heads, _ = q.shape
  group = q_heads // options.kv_heads
  k = _rows(
    operands.k_pages, operands.k_scales, operands.page_table, options.k_geometry
  )
  v_table = operands.v_page_table
  if v_table is None:
    v_table = operands.page_table
  v = _rows(operands.v_pages, operands.v_scales, v_table, options.v_geometry)

  sequence, seen = visible(operands, options, k.shape[1])
  heads = q.reshape(tokens, options.kv_heads, group, -1)
  logits = options.scale * jnp.einsum(
    "ihgd,irhd->ihgr",
    heads.astype(jnp.float32),
    k[sequence],
    precision="highest",
  )
  if options.soft_cap is not None:
    logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
  logits = jnp.where(seen[:, None, None, :], logits, -jnp.inf)
  values = jnp.where(seen[:, :, None, None], v[sequence], 0)
  sinks = jnp.full(logits.shape[1:3], -jnp.inf)
  if operands.sinks is not None:
    sinks = operands.sinks.astype(jnp.float32).reshape(sinks.shape)
  _, real = visibility.sequence_of_tokens(operands)
  sinks = jnp.where(real[:, None, None], sinks[None], -jnp.inf)
  top = jnp.maximum(logits.max(-1), sinks)
  top = jnp.where(top == -jnp.inf, 0, top)
  weights = jnp.exp(logits - top[..., None])
  total = weights.sum(-1) + jnp.exp(sinks - top)
  lse = top + jnp.log(total)
  weights = weights / jnp.where(total == 0, 1, total)[..., None]
  out = jnp.einsum("ihgr,irhd->ihgd", weights, values, precision="highest")
  return (
    out.reshape(tokens, q_heads, -1).astype(q.dtype),
    lse.reshape(tokens, q_heads),
  )


def visible(
  operands: operands_lib.Operands, options: operands_lib.Options, rows: int
) -> tuple[jax.Array, jax.Array]:
  """Each query row's sequence, and which of its rows the query sees.

  Returns:
    `(sequence, seen)`: int32 `[tokens]` and bool `[tokens, rows]`.
  """
  sequence, real = visibility.sequence_of_tokens(operands)
  position = visibility.token_positions(operands, sequence)
  row = jnp.arange(rows, dtype=jnp.int32)
  key_position = jnp.broadcast_to(row[None, :], (position.shape[0], rows))
  if operands.key_starts is not None:
    key_position = key_position + operands.key_starts[sequence][:, None]
  length = operands.context_lens[sequence]
  seen = real[:, None] & (row[None, :] < length[:, None])
  if options.causal:
    seen &= key_position <= position[:, None]
  if operands.window is not None:
    seen &= position[:, None] - key_position < operands.window
  return sequence, seen


def _rows(
  pages: jax.Array,  # [pages, kv_heads, page_size // fold, lane]
  scales: jax.Array | None,  # [pages, 1, scale lanes]
  table: jax.Array,  # [sequences, width]
  geometry: page_shape.PageGeometry,
) -> jax.Array:
  """Every row of every table, float32 `[sequences, rows, kv_heads, dim]`."""
  sequences, width = table.shape
  kv_heads, page_size = geometry.kv_heads, geometry.page_size
  found = bits.load(pages[table]).astype(jnp.float32)
  found = found.reshape(sequences, width, kv_heads, page_size, -1)
  found = found[..., : geometry.head_dim]
  if scales is not None:
    factors = scales[table][:, :, 0, : kv_heads * page_size]
    factors = factors.reshape(sequences, width, kv_heads, page_size, 1)
    found = found * factors
  found = jnp.moveaxis(found, 2, 3)
  return found.reshape(
    sequences, width * page_size, kv_heads, geometry.head_dim
  )
