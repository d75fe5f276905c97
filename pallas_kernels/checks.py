"""Checks of arguments: shapes at trace time, values on the host."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import errors


def require_shape(
  name: str,
  array: jax.Array | jax.ShapeDtypeStruct,
  axes: str,
  expected: Sequence[int | None],
) -> None:
  """Raises unless an array has the expected shape.

  Args:
    name: the argument's name.
    array: the argument.
    axes: what its axes are, as in "[tokens, q_heads]".
    expected: the size of each axis, None where any will do.

  Raises:
    KernelArgumentError: with the name, the shape and what was expected.
  """
  fits = array.ndim == len(expected) and all(
    want in (None, got) for got, want in zip(array.shape, expected, strict=True)
  )
  if not fits:
    sizes = ", ".join("any" if n is None else str(n) for n in expected)
    raise errors.KernelArgumentError(
      f"{name} has shape {tuple(array.shape)}, expected {axes} = [{sizes}]"
    )


def require_int32(name: str, array: jax.Array | jax.ShapeDtypeStruct) -> None:
  """Raises unless an array is int32, as all indices are.

  Raises:
    KernelArgumentError: with the name and the dtype.
  """
  if array.dtype != jnp.int32:
    raise errors.KernelArgumentError(
      f"{name} has dtype {array.dtype}, expected int32"
    )


def check_tables(
  page_table: np.ndarray,
  context_lens: np.ndarray,
  *,
  page_size: int,
  num_pages: int,
  query_starts: np.ndarray | None = None,
  num_tokens: int | None = None,
) -> None:
  """Checks on the host the values that kernels trust.

  Kernels never clip: an id outside the pool reads somebody else's memory.

  Args:
    page_table: `[sequences, width]` page ids, padding included.
    context_lens: `[sequences]` rows of each sequence.
    page_size: token rows of a page.
    num_pages: pages of the array that the ids point into.
    query_starts: `[sequences + 1]` first query row of each sequence, and the
      end of the last one.
    num_tokens: query rows of the call, the padded ones included.

  Raises:
    KernelArgumentError: naming the first value that is out of bounds.
  """
  table = np.asarray(page_table)
  lens = np.asarray(context_lens)
  if table.ndim != 2 or lens.shape != table.shape[:1]:
    raise errors.KernelArgumentError(
      f"page_table {table.shape} and context_lens {lens.shape}, expected"
      " [sequences, width] and [sequences]"
    )
  rows = table.shape[1] * page_size
  for sequence in np.flatnonzero((lens < 0) | (lens > rows))[:1]:
    raise errors.KernelArgumentError(
      f"context_lens[{sequence}]={lens[sequence]}, expected 0 to {rows}, the"
      f" rows of a table of {table.shape[1]} pages"
    )
  for at in np.argwhere((table < 0) | (table >= num_pages))[:1]:
    raise errors.KernelArgumentError(
      f"page_table{at.tolist()}={table[tuple(at)]}, expected 0 to"
      f" {num_pages - 1}, the pages of the pool"
    )
  if query_starts is not None:
    _check_query_starts(np.asarray(query_starts), lens, num_tokens)


def _check_query_starts(
  starts: np.ndarray, lens: np.ndarray, num_tokens: int | None
) -> None:
  if starts.shape != (len(lens) + 1,):
    raise errors.KernelArgumentError(
      f"query_starts has shape {starts.shape}, expected [{len(lens) + 1}]"
    )
  counts = np.diff(starts)
  if starts[0] != 0 or (counts < 0).any():
    raise errors.KernelArgumentError(
      f"query_starts={starts.tolist()}, expected it to begin at 0 and not fall"
    )
  if num_tokens is not None and starts[-1] > num_tokens:
    raise errors.KernelArgumentError(
      f"query_starts ends at {starts[-1]}, expected at most {num_tokens=}"
    )
