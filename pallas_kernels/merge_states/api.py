"""The public op: validates and selects."""

import jax
import jax.numpy as jnp

from pallas_kernels import checks
from pallas_kernels import dispatch
from pallas_kernels import errors
from pallas_kernels import gradients
from pallas_kernels.merge_states import operands as operands_lib

OP = dispatch.Op("pallas_kernels.merge_states", "merge_states")


def merge_states(
  outs: jax.Array, lses: jax.Array, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
  """Merges attention over disjoint sets of keys into attention over them all.

      lse = log(sum_p exp(lse_p)),  out = sum_p exp(lse_p - lse) out_p

  `(0, -inf)` is a part that saw nothing, and the identity on both sides.

  Args:
    outs: `[parts, tokens, heads, head_dim]`.
    lses: float32 `[parts, tokens, heads]`, natural logarithm.
    implementation: one of `dispatch.IMPLEMENTATIONS`, or None.

  Returns:
    `(out, lse)`: `[tokens, heads, head_dim]` of outs' dtype, float32 `[tokens,
    heads]`.  The out of a part whose lse is -inf is not read.

  Raises:
    KernelArgumentError: shapes or dtypes that do not fit.
    KernelUnsupported: the named implementation cannot run it, and why.
    InferenceOnly: under differentiation.
  """
  arrays = checks.require_arrays({"outs": outs, "lses": lses})
  outs, lses = (
    gradients.inference_only("merge_states", x) for x in arrays.values()
  )
  checks.require_shape(
    "outs", outs, "[parts, tokens, heads, head_dim]", [None] * 4
  )
  checks.require_shape("lses", lses, "[parts, tokens, heads]", outs.shape[:3])
  if lses.dtype != jnp.float32:
    raise errors.KernelArgumentError(
      f"lses has dtype {lses.dtype}, expected float32"
    )
  operands = operands_lib.Operands(outs=outs, lses=lses)
  options = operands_lib.Options()
  module = OP.select(implementation, operands, options)
  return module.merge_states(operands, options)
