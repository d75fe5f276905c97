"""What a caller hands in, held to its type and its limits (R14)."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from host_allocator import errors

MOST_INT32 = 2**31 - 1  # Page ids, slots and positions are int32 on the device.

_Refusal = Callable[[str], errors.KVError]


def is_whole(value: Any) -> bool:
  """Whether a value is a whole number: an int or a NumPy integer, no bool."""
  if isinstance(value, bool):
    return False
  try:
    operator.index(value)
  except TypeError:
    return False
  return True


def whole(
  name: str,
  value: Any,
  low: int | None = None,
  high: int | None = None,
  refusal: _Refusal = errors.BadArgument,
) -> int:
  """A whole number within limits, as an int.

  Args:
    name: What the caller knows it as.
    value: Whatever was handed in.
    low: The least that will do, or None.
    high: The most that will do, or None.
    refusal: Makes the error of its message.

  Raises:
    KVError: From `refusal`, naming the value and the limits.
  """
  if not is_whole(value):
    raise refusal(f"{name}={value!r} is not a whole number")
  number = operator.index(value)
  if low is not None and high is not None and not low <= number <= high:
    raise refusal(f"{name}={number} is not within {low}..{high}")
  if low is not None and number < low:
    raise refusal(f"{name}={number} is below {low}")
  if high is not None and number > high:
    raise refusal(f"{name}={number} is above {high}")
  return number


def flag(name: str, value: Any, refusal: _Refusal = errors.BadArgument) -> bool:
  """A bool, also NumPy's.

  Raises:
    KVError: From `refusal`, naming the value.
  """
  if not isinstance(value, bool | np.bool_):
    raise refusal(f"{name}={value!r} is neither True nor False")
  return bool(value)


def text(name: str, value: Any, refusal: _Refusal = errors.BadArgument) -> str:
  """A string.

  Raises:
    KVError: From `refusal`, naming the value.
  """
  if not isinstance(value, str):
    raise refusal(f"{name}={value!r} is not a string")
  return value
