"""What both indexes share: roots, places, leaf eviction and dropping.

A sequence's *place* is the node and depth where its published rows end.  It is
kept as a hint that is put right when used: a node that is split stays the lower
part, so a hint is never too high and a walk up finds the place.
"""

import abc
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import numpy as np

from host_allocator import pages as pages_lib
from host_allocator import sequences
from host_allocator import telemetry
from host_allocator.prefix import base
from host_allocator.prefix import eviction as eviction_lib
from host_allocator.prefix import side_inputs

_NO_KEY = np.zeros(0, np.int32)


class Forest(base.PrefixIndex):
  """Roots and nodes with their eviction; how to match and insert is open.

  Args:
    rows: The sequences whose rows are published.
    pools: One per group; holds and entries are counted there.
    bundle: Tokens of an index unit.
    eviction: One of `eviction.POLICIES`.
    whole_edges: Evict a leaf's whole unheld part, as the papers do, instead of
      only as many pages of its tail as are needed.
    partial_tails: Whether a less than full bundle can be published and found.
    side_input_keys: What the negative keys stand for.
    events: Where to report what was stored and removed, or None.
  """

  def __init__(
    self,
    rows: sequences.SequenceRows,
    pools: tuple[pages_lib.PagePool, ...],
    *,
    bundle: int,
    eviction: str,
    whole_edges: bool,
    partial_tails: bool,
    side_input_keys: side_inputs.SideInputKeys,
    events: telemetry.EventLog | None,
  ):
    self._rows = rows
    self._pools = pools
    self._bundle = bundle
    self._whole_edges = whole_edges
    self._partial_tails = partial_tails
    self._side_input_keys = side_input_keys
    self._events = events
    self._queue = eviction_lib.EvictionQueue(eviction)
    self._roots: dict[tuple[Any, ...], base.Root] = {}
    self._clock = 0

  @abc.abstractmethod
  def _forget(self, node: base.Node) -> None:
    """Removes what finds a node besides its parent's children."""

  def root(self, key: tuple[Any, ...]) -> base.Root:
    """The root of an isolation key, made where there is none."""
    root = self._roots.get(key)
    if root is None:
      root = base.Root(key)
      pages = tuple(_NO_KEY for _ in self._pools)
      root.top = base.Node(root, None, 0, 0, _NO_KEY, pages, self._clock)
      self._roots[key] = root
    return root

  def roots(self) -> Iterable[base.Root]:
    """The live roots."""
    return list(self._roots.values())

  def nodes(self, root: base.Root) -> Iterator[base.Node]:
    """Every node below a root, parents first."""
    stack = list(root.top.children or ())
    while stack:
      node = stack.pop()
      yield node
      stack.extend(node.children or ())

  def end(self, node: base.Node) -> int:
    """Tokens up to a node's end."""
    if node.owner >= 0:
      return int(self._rows.published[node.owner])
    return node.sealed_end

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

  def detach(self, sequence: sequences.Sequence) -> None:
    """Makes what a sequence published independent of its rows."""
    if sequence.root.alive and sequence.node.owner == sequence.row:
      self._seal(sequence.node)

  def evict(self, shortage: list[int]) -> list[int]:
    """Withdraws entries until that many pages per group have become free."""
    missing = list(shortage)
    is_refilled = False
    while max(missing) > 0:
      node = self._queue.first()
      if node is None:
        if is_refilled:
          break
        self._refill()
        is_refilled = True
        continue
      if node.owner >= 0 or node.children is not None or not node.root.alive:
        self._queue.pop()
        continue
      cut = node.start if self._whole_edges else self._cut(node, missing)
      held = self._held_end(node, cut)
      if held >= node.sealed_end:
        self._queue.pop()  # Filed again when whoever holds it lets go.
        continue
      for group, count in enumerate(self._trim(node, max(cut, held))):
        missing[group] -= count
    return [want - left for want, left in zip(shortage, missing, strict=True)]

  def drop(self, root: base.Root) -> None:
    """Forgets everything under a root and marks it dead."""
    root.alive = False
    del self._roots[root.key]
    nodes = list(self.nodes(root))
    for node in nodes:
      end = self.end(node)
      if node.owner >= 0:
        self._rows.growing[node.owner] = False
        node.sealed_end, node.owner = end, -1
      for pool, ids in zip(self._pools, node.pages, strict=True):
        pool.withdraw(ids[: -(-(end - node.start) // pool.page_size)])
      self._queue.forget(node)
      self._forget(node)
      node.parent = node.children = None
      node.key = _NO_KEY
      node.pages = ()
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

  def _offer(self, node: base.Node) -> None:
    """Files a leaf as a candidate; whether it is held shows when it is met."""
    if node.children is None and self.end(node) > node.start:
      self._queue.push(node)

  def _refill(self) -> None:
    """Files every leaf: some may have been passed over while they were held."""
    for root in self._roots.values():
      for node in self.nodes(root):
        self._offer(node)

  def _use(self, path: list[base.Node], priority: int) -> None:
    """Counts a use of each node."""
    for node in path:
      node.last_used = self._clock
      node.hits += 1
      node.priority = max(node.priority, priority)

  def _nearest(
    self, node: base.Node, bundle: np.ndarray
  ) -> tuple[base.Node | None, int]:
    """The child that shares most of a bundle, and how many tokens."""
    if not self._partial_tails or self._bundle == 1 or node.children is None:
      return None, 0
    return node.children.nearest(bundle.tobytes())

  def _report_stored(self, node: base.Node, start: int, stop: int) -> None:
    """Reports the whole bundles of `[start, stop)` of a node's path."""
    start -= start % self._bundle
    stop -= stop % self._bundle
    if self._events is None or start >= stop:
      return
    parent = node if start > node.start else node.parent
    before = self._bundle_ids(parent, start - self._bundle, start)
    self._events.add(
      telemetry.BundlesStored(
        root=tuple(node.root.key),
        parent=before[0] if before else None,
        bundles=self._bundle_ids(node, start, stop),
        keys=tuple(node.key[start - node.start : stop - node.start].tolist()),
      )
    )

  def _report_removed(self, node: base.Node, start: int, stop: int) -> None:
    """Reports the whole bundles of `[start, stop)` of a node's path."""
    stop -= stop % self._bundle
    if self._events is not None and start < stop:
      self._events.add(
        telemetry.BundlesRemoved(
          tuple(node.root.key), self._bundle_ids(node, start, stop)
        )
      )

  def _bundle_ids(
    self, node: base.Node | None, start: int, stop: int
  ) -> tuple[telemetry.BundleId, ...]:
    if node is None or node.parent is None:
      return ()
    pool, step = self._pools[0], self._bundle // self._pools[0].page_size
    first = (start - node.start) // pool.page_size
    last = (stop - node.start) // pool.page_size
    ids = node.pages[0][first:last:step]
    return telemetry.bundle_ids(ids, pool.generations)

  def _first_key(self, node: base.Node) -> bytes:
    """The bytes that find a node among its parent's children."""
    return node.key[: min(self._bundle, self.end(node) - node.start)].tobytes()

  def _seal(self, node: base.Node) -> None:
    """Gives an owned node its own key and pages, and its owner no growth."""
    row, end = node.owner, self.end(node)
    node.sealed_end, node.owner = end, -1
    size = end - node.start
    self._shrink(node, size)
    self._rows.growing[row] = False
    self._rows.published[row] = end - end % self._bundle

  def _cut(self, node: base.Node, missing: list[int]) -> int:
    """Where to cut a leaf's tail so as to free what is missing, and no more."""
    size = node.sealed_end - node.start
    cut = size
    for pool, count in zip(self._pools, missing, strict=True):
      if count > 0:
        keep = max(-(-size // pool.page_size) - count, 0)
        cut = min(cut, keep * pool.page_size)
    return node.start + cut - cut % self._bundle

  def _held_end(self, node: base.Node, cut: int) -> int:
    """Whole bundles of a leaf's path that somebody holds, if past `cut`.

    References do not grow along a path, so in each group the held pages lead,
    and no sequence sees more rows than the least of what they cover.
    """
    held = node.sealed_end
    for pool, ids in zip(self._pools, node.pages, strict=True):
      first = (cut - node.start) // pool.page_size
      last = -(-(node.sealed_end - node.start) // pool.page_size)
      count = pool.num_held(ids[first:last])
      if not count:
        return cut
      held = min(held, cut + count * pool.page_size)
    return held - (held % self._bundle if held < node.sealed_end else 0)

  def _trim(self, node: base.Node, cut: int) -> list[int]:
    """Cuts an unowned leaf at a bundle; removes it where nothing is left.

    Returns:
      Pages that became free, per group.
    """
    size, end = cut - node.start, node.sealed_end
    self._report_removed(node, cut, end)
    freed = []
    for pool, ids in zip(self._pools, node.pages, strict=True):
      keep = -(-size // pool.page_size)
      last = -(-(end - node.start) // pool.page_size)
      freed.append(pool.withdraw(ids[keep:last]))
    if not size:
      self._remove(node)
    else:
      node.sealed_end = cut
      if 2 * size < len(node.key):
        self._shrink(node, size)
    return freed

  def _shrink(self, node: base.Node, size: int) -> None:
    """Copies the first `size` tokens' worth, and lets go of what it was in."""
    node.key = node.key[:size].copy()
    node.pages = tuple(
      [
        ids[: -(-size // pool.page_size)].astype(np.intp)
        for pool, ids in zip(self._pools, node.pages, strict=True)
      ]
    )

  def _remove(self, node: base.Node) -> None:
    """Takes a leaf out, whose pages have been withdrawn."""
    parent, key = node.parent, self._first_key(node)
    if parent is None or parent.children is None:
      raise AssertionError("a leaf has a parent")
    node.sealed_end = node.start  # Empty, for whoever still points here.
    self._queue.forget(node)
    self._forget(node)
    parent.children.remove(key)
    if not len(parent.children):
      parent.children = None
      self._offer(parent)
      self._prune(node.root)

  def _prune(self, root: base.Root) -> None:
    """Forgets a root that nobody uses and nothing hangs on."""
    if not root.num_sequences and root.top.children is None:
      del self._roots[root.key]
      root.alive, root.top = False, None

  def _share(
    self,
    sequence: sequences.Sequence,
    node: base.Node,
    start: int,
    stop: int,
  ) -> list[int]:
    """Points a table's bundles `[start, stop)` at the node's equal ones (R11).

    Returns:
      Duplicate pages let go, per group.
    """
    row, counts = sequence.row, []
    for group, pool in enumerate(self._pools):
      first, last = start // pool.page_size, stop // pool.page_size
      offset = node.start // pool.page_size
      kept = node.pages[group][first - offset : last - offset]
      own = self._rows.table_rows[group][row][first:last]
      differ = np.flatnonzero(own != kept)
      counts.append(len(differ))
      for i in differ.tolist():
        self._replace(row, group, first + i, int(own[i]), int(kept[i]))
    return counts

  def _replace(
    self, row: int, group: int, column: int, page: int, kept: int
  ) -> None:
    """Points a table, and every other that holds `page`, at `kept`.

    A page that is also published on another path, whose bundle begins with the
    same tokens, is no duplicate there and stays in the others' tables.
    """
    pool, table = self._pools[group], self._rows.tables[group]
    holders = np.array([row])
    if pool.references[page] > 1 and not pool.entries[page]:
      holders = np.flatnonzero(table[:, column] == page)
      holders = holders[self._rows.leased[group][holders] != page]
    for holder in holders.tolist():
      table[holder, column] = kept
      self._rows.versions[holder] += 1
      pool.hold(np.array([kept]))
      pool.drop(np.array([page]))


def compact(view: np.ndarray) -> np.ndarray:
  """The view, or a copy where it would keep twice its size alive."""
  owner = view.base
  if owner is not None and owner.size > 2 * view.size:
    return view.copy()
  return view


def common_length(a: np.ndarray, b: np.ndarray) -> int:
  """How many leading elements two arrays of one length share."""
  if not len(a):
    return 0
  differ = a != b
  first = int(differ.argmax())
  return first if differ[first] else len(a)
