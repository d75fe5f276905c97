"""Who goes first: seven policies and one lazily cleaned queue.

A policy ranks nodes; the lowest rank is the first victim.  Ranks are made of
clock ticks and counts, never of wall-clock time, so decisions can be replayed.
"""

import collections
import heapq
from collections.abc import Callable

from host_allocator import errors
from host_allocator.prefix import base

Rank = tuple[int, ...]
_Entry = tuple[Rank, int, base.Node]  # The number of the push breaks ties.

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

  Under most policies nodes are filed in the order of their ranks; those make a
  run with nothing to sort, and only the others go through a heap.
  """

  def __init__(self, policy: str):
    if policy not in tuple(POLICIES):
      raise errors.LayoutError(
        f"eviction policy {policy!r} is not one of {sorted(POLICIES)}"
      )
    self._rank = POLICIES[policy]
    self._run: collections.deque[_Entry] = collections.deque()
    self._heap: list[_Entry] = []
    self._num_stale = 0
    self._pushes = 0

  def __len__(self) -> int:
    return len(self._run) + len(self._heap)

  def push(self, node: base.Node) -> None:
    """Files a node under its present rank."""
    rank = self._rank(node)
    if node.queued is not None:
      if node.queued == rank:
        return
      self.forget(node)
    node.queued = rank
    self._pushes += 1
    entry = (rank, self._pushes, node)
    if not self._run or self._run[-1] < entry:
      self._run.append(entry)
    else:
      heapq.heappush(self._heap, entry)
    if self._num_stale > 64 and 2 * self._num_stale > len(self):
      self._sweep()

  def first(self) -> base.Node | None:
    """The node that should go first, or None; it stays in the queue."""
    while self._run or self._heap:
      rank, _, node = self._heap[0] if self._heap_leads() else self._run[0]
      if node.queued is not rank:
        self._take()
        self._num_stale -= 1
      elif self._rank(node) == rank:
        return node
      else:
        self.pop()
        self.push(node)
    return None

  def pop(self) -> None:
    """Takes out the node that `first` has just returned."""
    _, _, node = self._take()
    node.queued = None

  def forget(self, node: base.Node) -> None:
    """Drops a node that has left the index."""
    if node.queued is not None:
      node.queued = None
      self._num_stale += 1

  def _heap_leads(self) -> bool:
    if not self._heap:
      return False
    return not self._run or self._heap[0] < self._run[0]

  def _take(self) -> _Entry:
    if self._heap_leads():
      return heapq.heappop(self._heap)
    return self._run.popleft()

  def _sweep(self) -> None:
    self._run = collections.deque(
      entry for entry in self._run if entry[2].queued is entry[0]
    )
    self._heap = [entry for entry in self._heap if entry[2].queued is entry[0]]
    heapq.heapify(self._heap)
    self._num_stale = 0
