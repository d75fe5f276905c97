"""Token ids as a caller has them, to int32 with every id checked (R14)."""

import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from host_allocator import arguments
from host_allocator import errors

_INT32 = np.dtype(np.int32)
_UINT32 = np.dtype(np.uint32)
_INT32_IDS = 2**31


def limit(vocab_size: int | None) -> int:
  """The number that token ids stay below.

  Raises:
    LayoutError: Where a vocabulary is empty or does not fit int32.
  """
  if vocab_size is None:
    return _INT32_IDS
  return arguments.whole(
    "vocab_size", vocab_size, 1, _INT32_IDS, errors.LayoutError
  )


def to_array(
  tokens: Sequence[int] | np.ndarray, token_limit: int
) -> np.ndarray:
  """Token ids as int32 `[n]`; not a copy where they are that already.

  Args:
    tokens: Ids, `[n]`.
    token_limit: From `limit`.

  Raises:
    TokenOutOfRange: Naming the first bad id and the limit.
  """
  if not isinstance(tokens, (list, np.ndarray)):
    tokens = _known_kind(tokens)
  if isinstance(tokens, np.ndarray):
    is_ready = tokens.dtype is _INT32 and tokens.ndim == 1
    ids = tokens if is_ready else _checked_dtype(tokens)
  else:
    ids = _from_list(tokens)
  if ids.dtype is _INT32:
    ids = ids.view(_UINT32)  # Negative ids become the largest of all.
  if not len(ids) or _are_within(ids, token_limit):
    return ids.view(_INT32) if ids.dtype is _UINT32 else ids.astype(_INT32)
  given = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
  bad = next(i for i in given if not 0 <= i < token_limit)
  raise errors.TokenOutOfRange(
    f"token id {bad} is not within 0..{token_limit - 1}"
  )


def _are_within(ids: np.ndarray, token_limit: int) -> bool:
  if ids.dtype is not _UINT32:
    return bool(0 <= ids.min() <= ids.max() < token_limit)
  if token_limit == _INT32_IDS:  # Only the sign can be wrong.
    signed = ids.view(_INT32)
    return bool(signed[signed.argmin()] >= 0)  # Faster than a reduction.
  return bool(ids[ids.argmax()] < token_limit)


def _known_kind(tokens: Any) -> list[int] | np.ndarray:
  """Any sequence as a list, and what NumPy can take as an array of its own.

  Sets and iterators are refused, whose order or number nobody can look up.
  """
  if hasattr(tokens, "__array__"):
    return np.asarray(tokens)
  if not isinstance(tokens, Sequence):  # Raw bytes are a sequence of ids too.
    raise errors.TokenOutOfRange(
      "tokens must be a flat list of whole numbers, not"
      f" {type(tokens).__name__}"
    )
  return [*tokens]


def _from_list(tokens: list[int]) -> np.ndarray:
  """A list as uint32, or as objects where an id does not fit."""
  try:
    # Four times faster than np.array, and refuses negative numbers, fractions
    # and strings.
    return np.frombuffer(array.array("I", tokens), _UINT32)
  except (TypeError, OverflowError):
    whole = [each for each in tokens if isinstance(each, int | np.integer)]
    if len(whole) == len(tokens):
      return np.array(whole, object)
    raise errors.TokenOutOfRange(
      "tokens must be a flat list of whole numbers"
    ) from None


def _checked_dtype(tokens: np.ndarray) -> np.ndarray:
  if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
    raise errors.TokenOutOfRange(
      "tokens must be a flat list of whole numbers, not"
      f" {tokens.dtype} of shape {tokens.shape}"
    )
  return tokens if tokens.size else np.zeros(0, _INT32)
