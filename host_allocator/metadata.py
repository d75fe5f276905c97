"""The bookkeeping ledger: what finding and owning pages costs in bytes.

Record sizes are parameters, because a Python object, a packed descriptor and
a device index differ in size and in where they live.

Reference: §0x02E.
"""

import dataclasses
import functools
from typing import Any

from host_allocator import arguments
from host_allocator import errors


@dataclasses.dataclass(frozen=True)
class RecordBytes:
  """Bytes of one bookkeeping record of each kind, wherever it is kept."""

  map_entry: int
  page_descriptor: int
  hash_entry: int
  request_tail: int
  free_entry: int
  fixed: int = 0

  def __post_init__(self) -> None:
    _check_counts(self, "record_size")


@dataclasses.dataclass(frozen=True)
class RecordCounts:
  """How many bookkeeping records of each kind there are."""

  map_entries: int
  page_descriptors: int
  hash_entries: int
  requests: int
  free_entries: int

  def __post_init__(self) -> None:
    _check_counts(self, "record_count")
    if self.free_entries > self.page_descriptors:
      raise errors.Unreconciled(
        "free_above_pool",
        f"{self.free_entries} free of {self.page_descriptors} pages",
      )


def metadata_bytes(sizes: RecordBytes, counts: RecordCounts) -> dict[str, int]:
  """Returns the bookkeeping bytes by kind of record, and their "total".

  Reference: §0x02E.
  """
  parts = {
    "map_entries": sizes.map_entry * counts.map_entries,
    "page_descriptors": sizes.page_descriptor * counts.page_descriptors,
    "hash_entries": sizes.hash_entry * counts.hash_entries,
    "request_tails": sizes.request_tail * counts.requests,
    "free_entries": sizes.free_entry * counts.free_entries,
    "fixed": sizes.fixed,
  }
  return {**parts, "total": sum(parts.values())}


def _check_counts(record: Any, reason: str) -> None:
  """Refuses a field that is not a whole number from 0."""
  refusal = functools.partial(errors.Unreconciled, reason)
  for field in dataclasses.fields(record):
    value = getattr(record, field.name)
    value = arguments.whole(field.name, value, 0, None, refusal)
    object.__setattr__(record, field.name, value)
