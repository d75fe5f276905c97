"""Merging for TPU: one pass over the parts, a block of tokens at a time."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import page_shape
from pallas_kernels.merge_states import operands as operands_lib

Ref = Any
NEG_INF = float("-inf")
# Of all parts of a block of tokens, float32; there are two such blocks and
# their products.
BLOCK_BYTES = 2 << 20


def why_unsupported(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> str | None:
  """Why the TPU kernel cannot run this call, or None."""
  del options
  if operands.outs.dtype not in (jnp.float32, jnp.bfloat16):
    return f"outs has dtype {operands.outs.dtype}, expected float32 or bfloat16"
  size = _token_bytes(operands)
  if size > BLOCK_BYTES:
    parts = operands.outs.shape[0]
    return (
      f"{parts} parts of a token take {size} bytes of VMEM, expected at most"
      f" {BLOCK_BYTES}: merge fewer at a time"
    )
  return None


def merge_states(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> tuple[jax.Array, jax.Array]:
  """`api.merge_states`."""
  del options
  outs, lses = operands.outs, operands.lses
  parts, tokens, heads, head_dim = outs.shape
  if tokens == 0:
    return outs[0], lses[0]
  block = max(1, BLOCK_BYTES // _token_bytes(operands))
  # The tokens are lanes' rows of the LSEs: whole tiles, or all of them.
  block = tokens if block >= tokens else max(8, block // 8 * 8)
  out, lse = pl.pallas_call(
    _kernel,
    out_shape=(
      jax.ShapeDtypeStruct(outs.shape[1:], outs.dtype),
      jax.ShapeDtypeStruct(lses.shape[1:], jnp.float32),
    ),
    grid=(pl.cdiv(tokens, block),),
    in_specs=[
      pl.BlockSpec((parts, block, heads, head_dim), lambda t: (0, t, 0, 0)),
      pl.BlockSpec((parts, block, heads), lambda t: (0, t, 0)),
    ],
    out_specs=(
      pl.BlockSpec((block, heads, head_dim), lambda t: (t, 0, 0)),
      pl.BlockSpec((block, heads), lambda t: (t, 0)),
    ),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    name="kvjax_merge_states",
  )(outs, lses)
  return out, lse


def _kernel(
  outs_ref: Ref,  # VMEM [parts, tokens, heads, head_dim]
  lses_ref: Ref,  # VMEM float32 [parts, tokens, heads]
  out_ref: Ref,  # VMEM [tokens, heads, head_dim]
  lse_ref: Ref,  # VMEM float32 [tokens, heads]
) -> None:
  lses = lses_ref[...]
  top = lses.max(0)
  safe = jnp.where(top == NEG_INF, 0.0, top)
  weights = jnp.exp(lses - safe[None])
  total = weights.sum(0)
  divisor = jnp.where(total == 0.0, 1.0, total)
  acc = jnp.zeros(out_ref.shape, jnp.float32)
  for part in range(lses.shape[0]):
    weight = jnp.broadcast_to(
      (weights[part] / divisor)[..., None], out_ref.shape
    )
    # Nobody says what a part that saw nothing holds.
    added = outs_ref[part].astype(jnp.float32) * weight
    acc += jnp.where(weight == 0.0, 0.0, added)
  out_ref[...] = acc.astype(out_ref.dtype)
  lse_ref[...] = jnp.where(total == 0.0, NEG_INF, safe + jnp.log(divisor))


def _token_bytes(operands: operands_lib.Operands) -> int:
  """Bytes of a token's rows of all parts, as tiled in VMEM."""
  parts, _, heads, head_dim = operands.outs.shape
  lanes = page_shape.round_up(head_dim, 128)
  return parts * page_shape.round_up(heads, 8) * lanes * 4
