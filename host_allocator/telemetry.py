"""What the index gained and lost, for a router that wants to know.

A router that sends requests where their prefix is needs to mirror each cache's
index.  Events name a bundle by its first group's first page and that page's
generation, which no other bundle ever has.
"""

import dataclasses
from typing import Any

import numpy as np

BundleId = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class BundlesStored:
  """Whole bundles became matchable.

  Attributes:
    root: Isolation key under which.
    parent: The bundle before them, None for the first of a path.
    bundles: In path order.
    keys: Their int32 index keys: token ids, or negative side-input marks.
  """

  root: tuple[Any, ...]
  parent: BundleId | None
  bundles: tuple[BundleId, ...]
  keys: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BundlesRemoved:
  """Bundles can no longer be matched."""

  root: tuple[Any, ...]
  bundles: tuple[BundleId, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RootCleared:
  """Nothing under an isolation key can be matched any more."""

  root: tuple[Any, ...]


Event = BundlesStored | BundlesRemoved | RootCleared


class EventLog:
  """Events since they were last drained; bounded by whoever drains."""

  def __init__(self) -> None:
    self._events: list[Event] = []

  def add(self, event: Event) -> None:
    """Adds an event."""
    self._events.append(event)

  def drain(self) -> tuple[Event, ...]:
    """Takes out all events so far, oldest first."""
    events, self._events = tuple(self._events), []
    return events


def bundle_ids(
  pages: np.ndarray, generations: np.ndarray
) -> tuple[BundleId, ...]:
  """Pairs of page and generation, for the first page of each bundle."""
  ids = zip(pages.tolist(), generations[pages].tolist(), strict=True)
  return tuple((page, generation) for page, generation in ids)
