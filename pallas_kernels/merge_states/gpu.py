"""Merging on a GPU is XLA's: one fused pass, which a kernel could not shorten."""

from typing import NoReturn

from pallas_kernels import errors
from pallas_kernels.merge_states import operands as operands_lib

REASON = (
  "XLA fuses a merge into one pass that reads each part once, and a kernel of"
  " its own would read no less"
)


def why_unsupported(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> str:
  """Why `xla` merges on a GPU."""
  del operands, options
  return REASON


def merge_states(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> NoReturn:
  """Raises: `why_unsupported` says why.

  Raises:
    KernelUnsupported: always.
  """
  raise errors.KernelUnsupported(why_unsupported(operands, options))
