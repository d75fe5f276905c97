"""Roots, nodes and leaf eviction, which both indexes share."""

import abc
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import numpy as np

from host_allocator import pages as pages_lib
from host_allocator import sequence_rows
from host_allocator import telemetry
from host_allocator.prefix import base
from host_allocator.prefix import eviction as eviction_lib
from host_allocator.prefix import side_inputs


class Trees(base.PrefixIndex):
  """The trees of all roots; who stands where in them is open.

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
    rows: sequence_rows.SequenceRows,
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
      root.top = base.Node(root, None, 0, self._clock)
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

  def evict(self, shortage: list[int]) -> list[int]:
    """Withdraws entries until that many pages per group have become free."""
    missing = list(shortage)
    # Tails that nobody holds are let go together: what they are in is NumPy's.
    idle: list[tuple[np.ndarray, ...]] = []
    is_refilled = False
    while max(missing) > 0:
      node = self._victim()
      if node is None:
        if is_refilled:
          break
        self._refill()
        is_refilled = True
        continue
      cut = node.start if self._whole_edges else self._cut(node, missing)
      pages = self._tail(node, cut)
      if self._are_idle(pages):
        idle.append(pages)
        self._shorten(node, cut)
        freed = [len(ids) for ids in pages]
      else:
        self._reclaim(idle)
        held = self._held_end(node, cut)
        if held >= node.sealed_end:
          self._queue.pop()  # Filed again when whoever holds it lets go.
          continue
        freed = self._trim(node, max(cut, held))
      for group, count in enumerate(freed):
        missing[group] -= count
    self._reclaim(idle)
    return [want - left for want, left in zip(shortage, missing, strict=True)]

  def _victim(self) -> base.Node | None:
    """The leaf that should go first; it stays in the queue."""
    while True:
      node = self._queue.first()
      if node is None or (
        node.owner < 0 and node.children is None and node.root.alive
      ):
        return node
      self._queue.pop()

  def _refill(self) -> None:
    """Files every leaf: some may have been passed over while they were held."""
    for root in self._roots.values():
      for node in self.nodes(root):
        self._offer(node)

  def _offer(self, node: base.Node) -> None:
    """Files a leaf as a candidate; whether it is held shows when it is met."""
    if node.children is None and self.end(node) > node.start:
      self._queue.push(node)

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
    size = min(self._bundle, self.end(node) - node.start)
    if node.owner < 0:
      return node.data[: size * base.TOKEN_BYTES]
    return node.key[:size].tobytes()

  def _keep(self, node: base.Node, end: int) -> None:
    """Seals a node at `end` with copies of its key and pages up to there."""
    size = end - node.start
    pages = [
      ids[: -(-size // pool.page_size)].astype(np.intp)
      for pool, ids in zip(self._pools, node.pages, strict=True)
    ]
    node.seal(end, node.key[:size].tobytes(), tuple(pages))

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

  def _tail(self, node: base.Node, cut: int) -> tuple[np.ndarray, ...]:
    """A sealed node's pages per group from the bundle at `cut` on."""
    size, kept = node.sealed_end - node.start, cut - node.start
    return tuple(
      [
        ids[-(-kept // pool.page_size) : -(-size // pool.page_size)]
        for pool, ids in zip(self._pools, node.pages, strict=True)
      ]
    )

  def _are_idle(self, pages: tuple[np.ndarray, ...]) -> bool:
    """Whether nobody holds any of the pages, nor does any other path."""
    for pool, ids in zip(self._pools, pages, strict=True):
      if not pool.are_idle(ids):
        return False
    return True

  def _reclaim(self, tails: list[tuple[np.ndarray, ...]]) -> None:
    """Frees the pages of tails that were idle, and empties the list."""
    if tails:
      for pool, parts in zip(
        self._pools, zip(*tails, strict=True), strict=True
      ):
        pool.reclaim(np.concatenate(parts) if len(parts) > 1 else parts[0])
      tails.clear()

  def _trim(self, node: base.Node, cut: int) -> list[int]:
    """Cuts an unowned leaf at a bundle; removes it where nothing is left.

    Returns:
      Pages that became free, per group.
    """
    pages = self._tail(node, cut)
    self._shorten(node, cut)
    return [
      pool.withdraw(ids) for pool, ids in zip(self._pools, pages, strict=True)
    ]

  def _shorten(self, node: base.Node, cut: int) -> None:
    """The same, while the pages keep their entries."""
    if self._events is not None:
      self._report_removed(node, cut, node.sealed_end)
    size = cut - node.start
    if not size:
      self._remove(node)
      return
    node.sealed_end = cut
    if 2 * size < len(node.key):
      self._keep(node, cut)

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
