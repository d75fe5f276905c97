"""What both indexes share: the places of sequences.

A sequence's *place* is the node and depth where its published rows end.  It is
kept as a hint that is put right when used: a node that is split stays the lower
part, so a hint is never too high and a walk up finds the place.
"""

import abc

import numpy as np

from host_allocator import sequences
from host_allocator import telemetry
from host_allocator.prefix import base
from host_allocator.prefix import trees


class Forest(trees.Trees):
  """Trees that sequences publish in; how to match and insert is open."""

  @abc.abstractmethod
  def _reach(self, node: base.Node, stop: int) -> list[base.Node]:
    """The part of a node up to a whole bundle at `stop`, as nodes.

    Empty where it has no bundle before that.
    """

  @abc.abstractmethod
  def _insert(
    self, sequence: sequences.Sequence, num_tokens: int, released: list[int]
  ) -> None:
    """Publishes what a sequence has not published yet, up to `num_tokens`.

    Duplicate pages let go are added to `released`, per group.
    """

  def settle(
    self,
    sequence: sequences.Sequence,
    match: base.PrefixMatch,
    num_tokens: int,
  ) -> None:
    """Makes the first `num_tokens` of a match the sequence's own place."""
    self._clock += 1
    aligned = num_tokens - num_tokens % self._bundle
    path = list(match.path)
    while path[-1].start >= num_tokens:
      path.pop()
    last = path[-1]
    if num_tokens < self.end(last):
      path[-1:] = self._reach(last, aligned)
    for node in path:
      node.last_used = self._clock
      node.hits += 1
      node.priority = max(node.priority, sequence.priority)
    self._rows.published[sequence.row] = aligned
    sequence.node = last
    sequence.node, _ = self._place(sequence)
    sequence.lease_node = last if aligned < num_tokens else None

  def insert(self, sequence: sequences.Sequence, num_tokens: int) -> list[int]:
    """Publishes a sequence's rows up to `num_tokens`."""
    released = [0] * len(self._pools)
    if not self._partial_tails:
      num_tokens -= num_tokens % self._bundle
    published = self._rows.published[sequence.row]
    if num_tokens > published and sequence.root.alive:
      self._clock += 1
      self._insert(sequence, num_tokens, released)
    return released

  def detach(self, sequence: sequences.Sequence) -> None:
    """Makes what a sequence published independent of its rows."""
    if sequence.root.alive and sequence.node.owner == sequence.row:
      self._seal(sequence.node)

  def release(self, sequence: sequences.Sequence) -> None:
    """Lets a sequence go that is about to drop its pages."""
    root = sequence.root
    root.num_sequences -= 1
    if not root.alive:
      return
    self.detach(sequence)
    self._clock += 1
    node, depth = self._place(sequence)
    self._offer(node)
    while node.parent is not None:
      node.last_used = self._clock
      node = node.parent
    if sequence.lease_node is not None:
      self._offer(self._holder(sequence.lease_node, depth))
    self._prune(root)

  def shorten(self, sequence: sequences.Sequence, num_tokens: int) -> None:
    """Takes a sequence's place back to at most `num_tokens`."""
    row = sequence.row
    if num_tokens >= self._rows.published[row]:
      return
    if not sequence.root.alive:
      self._rows.published[row] = num_tokens
      return
    self.detach(sequence)
    self._offer(self._place(sequence)[0])
    self._rows.published[row] = num_tokens - num_tokens % self._bundle
    sequence.node, _ = self._place(sequence)

  def drop(self, root: base.Root) -> None:
    """Forgets everything under a root and marks it dead."""
    root.alive = False
    del self._roots[root.key]
    nodes = list(self.nodes(root))
    for node in nodes:
      end = self.end(node)
      if node.owner >= 0:
        self._rows.growing[node.owner] = False
      for pool, ids in zip(self._pools, node.pages, strict=True):
        pool.withdraw(ids[: -(-(end - node.start) // pool.page_size)])
      self._queue.forget(node)
      self._forget(node)
      node.parent = node.children = None
      node.seal(end, b"", ())
    if self._events is not None:
      self._events.add(telemetry.RootCleared(tuple(root.key)))
    root.top.children = None
    root.top = None  # No reference cycle outlives the root.

  def _place(self, sequence: sequences.Sequence) -> tuple[base.Node, int]:
    """The node in which a sequence's published whole bundles end, and where."""
    depth = int(self._rows.published[sequence.row])
    depth -= depth % self._bundle
    node = sequence.node
    while node.start >= depth and node.parent is not None:
      node = node.parent
    return node, depth

  def _holder(self, node: base.Node, depth: int) -> base.Node:
    """The node on the path up from `node` that holds the bundle at `depth`."""
    while node.start > depth and node.parent is not None:
      node = node.parent
    return node

  def _nearest(
    self, node: base.Node, bundle: bytes
  ) -> tuple[base.Node | None, int]:
    """The child that shares most of a bundle, and how many tokens."""
    if not self._partial_tails or self._bundle == 1 or node.children is None:
      return None, 0
    return node.children.nearest(bundle)

  def _seal(self, node: base.Node) -> None:
    """Gives an owned node its own key and pages, and its owner no growth."""
    row = node.owner
    end = int(self._rows.published[row])
    self._keep(node, end)
    self._rows.growing[row] = False
    self._rows.published[row] = end - end % self._bundle

  def _share(
    self,
    sequence: sequences.Sequence,
    node: base.Node,
    start: int,
    stop: int,
    released: list[int],
  ) -> None:
    """Points a table's bundles `[start, stop)` at the node's equal ones (R11).

    Duplicate pages let go are added to `released`, per group.
    """
    row = sequence.row
    for group, pool in enumerate(self._pools):
      first, last = start // pool.page_size, stop // pool.page_size
      offset = node.start // pool.page_size
      kept = node.pages[group][first - offset : last - offset]
      own = self._rows.table_rows[group][row][first:last]
      differ = np.flatnonzero(own != kept)
      released[group] += len(differ)
      for i in differ.tolist():
        self._replace(row, group, first + i, int(own[i]), int(kept[i]))

  def _replace(
    self, row: int, group: int, column: int, page: int, kept: int
  ) -> None:
    """Points a table, and every other that holds `page`, at `kept`.

    A page that is also published on another path, whose bundle begins with the
    same tokens, is no duplicate there and stays in the others' tables.
    """
    pool, table = self._pools[group], self._rows.tables[group]
    self._rows.stride = None
    holders = np.array([row])
    if pool.references[page] > 1 and not pool.entries[page]:
      holders = np.flatnonzero(table[:, column] == page)
      holders = holders[self._rows.leased[group][holders] != page]
    for holder in holders.tolist():
      table[holder, column] = kept
      self._rows.versions[holder] += 1
      pool.hold(np.array([kept]))
      pool.drop(np.array([page]))


def common_length(a: np.ndarray, b: np.ndarray) -> int:
  """How many leading elements two arrays of one length share."""
  if not len(a):
    return 0
  differ = a != b
  first = int(differ.argmax())
  return first if differ[first] else len(a)
