"""Plain XLA."""

import jax

from pallas_kernels.paged_attention import operands as operands_lib
from pallas_kernels.paged_attention import reference


def why_unsupported(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> str | None:
  """None: it runs everything."""
  del operands, options
  return None


def paged_attention(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> tuple[jax.Array, jax.Array]:
  """`api.paged_attention`."""
  return reference.paged_attention(operands, options)
