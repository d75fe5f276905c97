"""What a cache must do, said with dictionaries and loops.

Shares no code with the package. A row's *content* is the number of its whole
history (root and every token up to it): rows with equal histories, and only
those, hold equal K and V. `Memory` is a device that stores contents; whatever
an allocator decides is carried out on it and then read back.
"""

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence

EMPTY = -1


class Histories:
  """Numbers for token histories; equal numbers are equal computations."""

  def __init__(self) -> None:
    self._numbers: dict[tuple, int] = {}

  def root(self, key: object) -> int:
    return self._number(("root", key))

  def of(self, key: object, tokens: Iterable[int]) -> list[int]:
    """The content of every row of a sequence of these tokens."""
    rows, last = [], self.root(key)
    for token in tokens:
      last = self._number((last, token))
      rows.append(last)
    return rows

  def _number(self, key: tuple) -> int:
    return self._numbers.setdefault(key, len(self._numbers))


class Memory:
  """The pages of one cache group: what every row of them holds."""

  def __init__(self, num_pages: int, page_size: int) -> None:
    self.page_size = page_size
    self.rows = [[EMPTY] * page_size for _ in range(num_pages + 1)]

  def copy(self, moves: Sequence[tuple[int, int, int]]) -> None:
    """Copies (source, destination, rows), all gathered before all written."""
    sources = {source for source, _, count in moves if count}
    targets = [target for _, target, count in moves if count]
    assert not sources.intersection(targets), "a destination is a source"
    assert len(set(targets)) == len(targets), "a destination is written twice"
    assert 0 not in targets, "the null page is a destination"
    gathered = [self.rows[source][:count] for source, _, count in moves]
    for (_, target, count), held in zip(moves, gathered, strict=True):
      assert EMPTY not in held, "a row that nobody wrote is copied"
      self.rows[target][:count] = held

  def write(self, slots: Sequence[int], contents: Sequence[int]) -> None:
    """Writes a step's rows; the null page swallows what it is given."""
    real = [slot for slot in slots if slot >= self.page_size]
    assert len(set(real)) == len(real), "two rows are written to one slot"
    for slot, content in zip(slots, contents, strict=True):
      if slot >= self.page_size:
        page, row = divmod(slot, self.page_size)
        self.rows[page][row] = content

  def read(self, pages: Sequence[int], length: int) -> list[int]:
    """What a sequence of `length` rows sees through its page table."""
    size = self.page_size
    return [self.rows[pages[at // size]][at % size] for at in range(length)]


@dataclasses.dataclass(frozen=True)
class Resident:
  """A prefix an index could hand out: all its tokens, and its last pages.

  Attributes:
    root: what the prefix belongs to.
    tokens: from the first token of the sequence.
    pages: for each group, the pages of the last unit (a bundle).
  """

  root: object
  tokens: tuple[int, ...]
  pages: tuple[tuple[int, ...], ...]


def longest_match(
  residents: Iterable[Resident],
  root: object,
  tokens: Sequence[int],
  *,
  unit: int,
  want_logits: bool,
  whole_units: bool,
) -> int:
  """Rows that a prompt may be spared, given what is resident."""
  limit = len(tokens) - 1 if want_logits else len(tokens)
  best = 0
  for resident in residents:
    if resident.root != root:
      continue
    same = 0
    for left, right in zip(resident.tokens, tokens, strict=False):
      if left != right:
        break
      same += 1
    best = max(best, min(same, limit))
  return best // unit * unit if whole_units else best


def check_prefix_closed(residents: Iterable[Resident], unit: int) -> None:
  """A unit can be reached only through every unit before it."""
  known = {(resident.root, resident.tokens) for resident in residents}
  for root, tokens in known:
    assert tokens
    if len(tokens) > unit:
      parent = tokens[: (len(tokens) - 1) // unit * unit]
      assert (root, parent) in known, "a resident unit has no parent"


def pages_needed(length: int, page_size: int) -> int:
  return -(-length // page_size)
