"""Prefixes in the making: who waits for rows that somebody is computing.

Two prompts that arrive together with the same new prefix would both compute
it. Instead the second waits, holding nothing, until the first has committed
the rows they share, and then finds them in the cache::

    leader    |== computed ==|-- computing --|.... own tail ....|
    follower  |========= shared ============|.. own tail ..|
                                            ^ needed: here it wakes

A leader that ends in any way wakes its followers; the first of them to be
admitted computes on, and the others wait for that one.
"""

from collections.abc import Iterable

import numpy as np

from kvjax import request as requests


class PrefixRegistry:
  """Followers by their leader.

  Args:
    least_shared: rows that a follower must gain by waiting, at least; None
      where only samples of one request share anything.
  """

  def __init__(self, least_shared: int | None):
    self._least_shared = least_shared
    self._followers: dict[
      requests.Sample, list[tuple[requests.Sample, int]]
    ] = {}

  def park(
    self, sample: requests.Sample, running: Iterable[requests.Sample]
  ) -> bool:
    """Lets a sample wait for the one that shares most with it, if any does.

    Args:
      sample: about to be admitted.
      running: samples that have a sequence.

    Returns:
      Whether it waits; it then comes back from `wake` or `release`.
    """
    best: requests.Sample | None = None
    most = 0
    for leader in running:
      needed = self._needed(sample, leader)
      if needed > max(most, leader.computed):
        best, most = leader, needed
    if best is None:
      return False
    self._followers.setdefault(best, []).append((sample, most))
    return True

  def _needed(self, sample: requests.Sample, leader: requests.Sample) -> int:
    """Rows of the leader worth waiting for; 0 for none."""
    if leader.remaining <= 1:
      return 0
    most = len(sample.known) - 1  # the last row is computed for its logits
    if leader.request_id == sample.request_id and not sample.num_generated:
      return most  # then it is a fork of the leader
    if self._least_shared is None:
      return 0
    if leader.request.namespace != sample.request.namespace:
      return 0
    shared = min(common_prefix(leader.known, sample.known), most)
    gain = shared - leader.computed
    return shared if gain >= self._least_shared else 0

  def wake(self, leader: requests.Sample) -> list[requests.Sample]:
    """Takes out the followers whose rows the leader has committed."""
    followers = self._followers.pop(leader, None)
    if followers is None:
      return []
    asleep = [entry for entry in followers if entry[1] > leader.computed]
    if asleep:
      self._followers[leader] = asleep
    return [sample for sample, needed in followers if needed <= leader.computed]

  def release(self, leader: requests.Sample) -> list[requests.Sample]:
    """Takes out all followers of a leader that ended."""
    return [sample for sample, _ in self._followers.pop(leader, ())]

  @property
  def is_empty(self) -> bool:
    """Whether nobody waits for anybody."""
    return not self._followers

  def __len__(self) -> int:
    return sum(map(len, self._followers.values()))


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
  """Tokens at the front of both.

  Examples:
    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
  """
  length = min(len(first), len(second))
  differs = first[:length] != second[:length]
  where = int(differs.argmax()) if length else 0
  return where if length and differs[where] else length
