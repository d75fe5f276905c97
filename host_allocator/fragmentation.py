"""Waste that a byte ledger cannot show: holes, and tails on average.

Reference: §0x02F, §0x02G.
"""

import collections
import dataclasses
import fractions
from collections.abc import Sequence

from host_allocator import arguments
from host_allocator import errors

NOT_APPLICABLE = "not_applicable"


@dataclasses.dataclass(frozen=True)
class Arena:
  """The free stretches of a contiguously allocated memory.

  Attributes:
    total_bytes: the whole memory.
    free_extents: bytes of every free stretch.
  """

  total_bytes: int
  free_extents: tuple[int, ...]

  def __post_init__(self) -> None:
    whole, refusal = arguments.whole, errors.LedgerError
    object.__setattr__(
      self,
      "total_bytes",
      whole("total_bytes", self.total_bytes, 0, None, refusal),
    )
    extents = tuple(
      whole("free extent", extent, 1, None, refusal)
      for extent in self.free_extents
    )
    object.__setattr__(self, "free_extents", extents)
    if self.free_bytes > self.total_bytes:
      raise errors.LedgerError(
        f"{self.free_bytes} bytes free of {self.total_bytes}"
      )

  @property
  def free_bytes(self) -> int:
    """Bytes of all free stretches."""
    return sum(self.free_extents)

  @property
  def largest_free_bytes(self) -> int:
    """Bytes of the longest free stretch, 0 in a full memory."""
    return max(self.free_extents, default=0)

  @property
  def external_fragmentation(self) -> fractions.Fraction | str:
    """`1 - largest / free`, NOT_APPLICABLE where nothing is free.

    A ratio that describes holes; never bytes to add to a ledger.
    """
    if not self.free_extents:
      return NOT_APPLICABLE
    return 1 - fractions.Fraction(self.largest_free_bytes, self.free_bytes)

  def fits(self, contiguous_bytes: int) -> bool:
    """Returns whether one free stretch holds contiguous_bytes."""
    wanted = arguments.whole(
      "contiguous_bytes", contiguous_bytes, 0, None, errors.LedgerError
    )
    return wanted <= self.largest_free_bytes


def pages_for_bytes(num_bytes: int, page_bytes: int) -> int:
  """Returns the pages that num_bytes take, wherever each of them lies."""
  whole, refusal = arguments.whole, errors.LedgerError
  num_bytes = whole("num_bytes", num_bytes, 0, None, refusal)
  page_bytes = whole("page_bytes", page_bytes, 1, None, refusal)
  return -(-num_bytes // page_bytes)


def expected_tail_rows(page_size: int) -> fractions.Fraction:
  """Returns the unused rows of a last page whose fill is uniform on 1..P.

  `E[P - J] = (P - 1) / 2`; for lengths that are known, see mean_tail_rows.
  """
  page_size = _page_size(page_size)
  return fractions.Fraction(page_size - 1, 2)


def mean_tail_rows(
  lengths: Sequence[int], page_size: int
) -> fractions.Fraction | str:
  """Returns the mean unused rows of the last pages of these lengths.

  NOT_APPLICABLE where no length is above 0.
  """
  page_size = _page_size(page_size)
  known = [
    arguments.whole("length", length, 0, None, errors.LedgerError)
    for length in lengths
  ]
  tails = collections.Counter(
    -length % page_size for length in known if length > 0
  )
  if not tails:
    return NOT_APPLICABLE
  rows = sum(tail * count for tail, count in tails.items())
  return fractions.Fraction(rows, sum(tails.values()))


def _page_size(page_size: int) -> int:
  return arguments.whole("page_size", page_size, 1, None, errors.LedgerError)
