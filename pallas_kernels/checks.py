"""Checks of arguments: shapes at trace time, values on the host."""

import math
import numbers
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import errors


def require_arrays(
  required: Mapping[str, Any], optional: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """The arguments of a call as JAX arrays; lists are refused, as JAX does.

  Args:
    required: NumPy or JAX arrays by the arguments' names.
    optional: the same, or None.

  Returns:
    Both, with None where None was given.

  Raises:
    KernelArgumentError: with the name and type of what is no array.
  """
  arrays = {**required, **(optional or {})}
  for name, x in arrays.items():
    absent = x is None and name not in required
    if not absent and not (hasattr(x, "shape") and hasattr(x, "dtype")):
      raise errors.KernelArgumentError(
        f"{name} is of type {type(x).__name__}, expected an array"
      )
  return {
    name: None if x is None else jnp.asarray(x) for name, x in arrays.items()
  }


def require_finite(name: str, value: Any) -> float:
  """The number as a float that float32 holds.

  Raises:
    KernelArgumentError: it is not a number, NaN, or beyond float32.
  """
  largest = float(np.finfo(np.float32).max)
  is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  found = float(value) if is_number else math.nan
  if not abs(found) <= largest:
    raise errors.KernelArgumentError(
      f"{name}={value!r}, expected a number within float32, +-{largest:.1e}"
    )
  return found


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
    expected: the size of each axis, None where any from 1 on will do.

  Raises:
    KernelArgumentError: with the name, the shape and what was expected.
  """
  fits = len(array.shape) == len(expected) and all(
    got > 0 if want is None else got == want
    for got, want in zip(array.shape, expected, strict=True)
  )
  if not fits:
    sizes = ", ".join("1 or more" if n is None else str(n) for n in expected)
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
  _require_positive("page_size", page_size)
  _require_positive("num_pages", num_pages)
  table = _host_integers("page_table", page_table)
  lens = _host_integers("context_lens", context_lens)
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
    starts = _host_integers("query_starts", query_starts)
    _check_query_starts(starts, lens, num_tokens)


def check_slots(slots: np.ndarray, *, page_size: int, num_pages: int) -> None:
  """Checks on the host where `write_kv` would write.

  Args:
    slots: `[tokens]`, `page * page_size + row`, padding included.
    page_size: token rows of a page.
    num_pages: pages of the arrays that are written.

  Raises:
    KernelArgumentError: naming the first slot that is out of bounds.
  """
  _require_positive("page_size", page_size)
  _require_positive("num_pages", num_pages)
  found = _host_integers("slots", slots)
  end = page_size * num_pages
  for at in np.argwhere((found < 0) | (found >= end))[:1]:
    raise errors.KernelArgumentError(
      f"slots{at.tolist()}={found[tuple(at)]}, expected 0 to {end - 1}, the"
      f" rows of {num_pages} pages"
    )


def _require_positive(name: str, value: int) -> None:
  if not isinstance(value, numbers.Integral) or value < 1:
    raise errors.KernelArgumentError(
      f"{name}={value!r}, expected an integer from 1 on"
    )


def _host_integers(name: str, values: np.ndarray) -> np.ndarray:
  array = np.asarray(values)
  if array.dtype.kind not in "iu":
    raise errors.KernelArgumentError(
      f"{name} has dtype {array.dtype}, expected integers"
    )
  return array


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
