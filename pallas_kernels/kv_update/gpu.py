"""Updates on a GPU are XLA's: scatters in place, which a kernel could not beat.

Rows that are written or copied are read once and written once.  What a kernel
might save is launches, one for K and V together; that is not measured yet.
"""

from typing import NoReturn

from pallas_kernels import errors
from pallas_kernels.kv_update import operands as operands_lib

WRITE_REASON = (
  "XLA scatters rows into donated pages in place, and a kernel of its own would"
  " move the same bytes"
)
COPY_REASON = (
  "XLA gathers and scatters only the rows that are copied, and a kernel of its"
  " own would move the same bytes"
)


def why_write_unsupported(
  operands: operands_lib.WriteOperands, options: operands_lib.WriteOptions
) -> str:
  """Why `xla` writes rows on a GPU."""
  del operands, options
  return WRITE_REASON


def why_copy_unsupported(
  operands: operands_lib.CopyOperands, options: operands_lib.CopyOptions
) -> str:
  """Why `xla` copies rows on a GPU."""
  del operands, options
  return COPY_REASON


def write_kv(
  operands: operands_lib.WriteOperands, options: operands_lib.WriteOptions
) -> NoReturn:
  """Raises: `why_write_unsupported` says why.

  Raises:
    KernelUnsupported: always.
  """
  raise errors.KernelUnsupported(why_write_unsupported(operands, options))


def copy_rows(
  operands: operands_lib.CopyOperands, options: operands_lib.CopyOptions
) -> NoReturn:
  """Raises: `why_copy_unsupported` says why.

  Raises:
    KernelUnsupported: always.
  """
  raise errors.KernelUnsupported(why_copy_unsupported(operands, options))
