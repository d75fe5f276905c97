"""Images and prompt embeddings in an index key.

K/V of a placeholder token depends on what it stands for, so its key is not the
token but a negative number that stands for (digest, token, is it the first
placeholder of its input).  Two prompts with the same tokens and different
images so part at the first placeholder, and one comparison of flat int32
buffers still decides.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from host_allocator import arguments
from host_allocator import errors


class SideInput(NamedTuple):
  """What a run of placeholder tokens stands for.

  Attributes:
    offset: Position of the first placeholder.
    length: How many placeholders there are.
    digest: Identity of the content, as the caller hashed it.
  """

  offset: int
  length: int
  digest: str


_Mark = tuple[str, int, bool]


class SideInputKeys:
  """Numbers for side inputs, as long as anything in an index uses them."""

  def __init__(self) -> None:
    self._numbers: dict[_Mark, int] = {}
    self._marks: dict[int, _Mark] = {}
    self._unused: list[int] = []
    self._due_at = 64

  def __len__(self) -> int:
    return len(self._numbers)

  @property
  def is_due(self) -> bool:
    """Whether so many were named that a sweep is paid for by them."""
    return len(self._numbers) > self._due_at

  def keys(
    self, tokens: np.ndarray, side_inputs: Sequence[SideInput]
  ) -> np.ndarray:
    """A copy of the tokens with side inputs put in.

    Args:
      tokens: int32 `[n]`.
      side_inputs: Disjoint, within the tokens.

    Raises:
      BadSideInput: Where one is empty, overlaps, leaves the tokens or is none;
        nothing was numbered.
    """
    keys = tokens.copy()
    for offset, length, digest in _checked(side_inputs, len(tokens)):
      end = offset + length
      keys[offset:end] = [
        self._number((digest, token, i == 0))
        for i, token in enumerate(tokens[offset:end].tolist())
      ]
    return keys

  def describe(self, keys: np.ndarray) -> tuple[str, ...]:
    """What the negative keys stand for, the same in every process."""
    return tuple(
      f"{place}:{self._marks[int(keys[place])]!r}"
      for place in np.flatnonzero(keys < 0).tolist()
    )

  def forget_unused(self, used: Iterable[np.ndarray]) -> None:
    """Drops every number that occurs in none of the keys."""
    kept: set[int] = set()
    for keys in used:
      kept.update(keys[keys < 0].tolist())
    for number in [n for n in self._marks if n not in kept]:
      del self._numbers[self._marks.pop(number)]
      self._unused.append(number)
    self._due_at = max(64, 2 * len(self._numbers))

  def _number(self, mark: _Mark) -> int:
    number = self._numbers.get(mark)
    if number is None:
      # Used numbers and unused ones are together -1, -2, ... without a gap.
      fresh = self._unused.pop() if self._unused else -1 - len(self._marks)
      number = self._numbers[mark] = fresh
      self._marks[number] = mark
    return number


def _checked(
  side_inputs: Iterable[SideInput], num_tokens: int
) -> list[SideInput]:
  """Side inputs in order, each of which can be."""
  try:
    found = sorted(map(_parts, side_inputs))
  except TypeError as error:
    raise errors.BadSideInput(
      f"side_inputs={side_inputs!r} is no list"
    ) from error
  end = 0
  for side_input in found:
    offset, length, digest = side_input
    if offset < end or length < 1 or offset + length > num_tokens:
      raise errors.BadSideInput(
        f"{side_input} is empty, overlaps another, or leaves the"
        f" {num_tokens} tokens"
      )
    if not digest:
      raise errors.BadSideInput(f"{side_input} has no digest")
    end = offset + length
  return found


def _parts(side_input: SideInput) -> SideInput:
  """The three parts of a side input, each of its type."""
  try:
    offset, length, digest = side_input
  except (TypeError, ValueError) as error:
    raise errors.BadSideInput(
      f"{side_input!r} is not (offset, length, digest)"
    ) from error
  whole, refusal = arguments.whole, errors.BadSideInput
  return SideInput(
    whole("offset", offset, refusal=refusal),
    whole("length", length, refusal=refusal),
    arguments.text("digest", digest, refusal),
  )
