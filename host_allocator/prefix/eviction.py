"""Who goes first: seven policies and one lazily cleaned heap.

A policy ranks nodes; the lowest rank is the first victim.  Ranks are made of
clock ticks and counts, never of wall-clock time, so decisions can be replayed.
"""

import heapq
from collections.abc import Callable

from host_allocator import errors
from host_allocator.prefix import base

Rank = tuple[int, ...]

POLICIES: dict[str, Callable[[base.Node], Rank]] = {
  "lru": lambda node: (node.last_used,),
  "lfu": lambda node: (node.hits, node.last_used),
  "fifo": lambda node: (node.created,),
  "mru": lambda node: (-node.last_used,),
  "filo": lambda node: (-node.created,),
  "priority": lambda node: (node.priority, node.last_used),
  # Probation first: what was never found again goes before what was.
  "segmented_lru": lambda node: (min(node.hits, 1), node.last_used),
}


class EvictionQueue:
  """Candidates in the order in which they should go.

  Entries are not updated in place.  A node remembers the rank of its latest
  entry, older ones are skipped when met, and one whose rank has changed since
  is filed anew.  Skipped entries are swept once they outnumber the others, so
  the work is amortised over the pushes.
  """

  def __init__(self, policy: str):
    if policy not in POLICIES:
      raise errors.LayoutError(
        f"eviction policy {policy!r} is not one of {sorted(POLICIES)}"
      )
    self._rank = POLICIES[policy]
    self._heap: list[tuple[Rank, int, base.Node]] = []
    self._num_stale = 0
    self._pushes = 0

  def __len__(self) -> int:
    return len(self._heap)

  def push(self, node: base.Node) -> None:
    """Files a node under its present rank."""
    rank = self._rank(node)
    if node.queued is not None:
      if node.queued == rank:
        return
      self._num_stale += 1
    node.queued = rank
    self._pushes += 1
    heapq.heappush(self._heap, (rank, self._pushes, node))
    if self._num_stale > 64 and 2 * self._num_stale > len(self._heap):
      self._sweep()

  def first(self) -> base.Node | None:
    """The node that should go first, or None; it stays in the queue."""
    while self._heap:
      rank, _, node = self._heap[0]
      if node.queued is not rank:
        heapq.heappop(self._heap)
        self._num_stale -= 1
      elif self._rank(node) == rank:
        return node
      else:
        self.pop()
        self.push(node)
    return None

  def pop(self) -> None:
    """Takes out the node that `first` has just returned."""
    _, _, node = heapq.heappop(self._heap)
    node.queued = None

  def forget(self, node: base.Node) -> None:
    """Drops a node that has left the index."""
    if node.queued is not None:
      node.queued = None
      self._num_stale += 1

  def clear(self) -> None:
    """Drops everything."""
    for _, _, node in self._heap:
      node.queued = None
    self._heap.clear()
    self._num_stale = 0

  def _sweep(self) -> None:
    self._heap = [entry for entry in self._heap if entry[2].queued is entry[0]]
    heapq.heapify(self._heap)
    self._num_stale = 0
