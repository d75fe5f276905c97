"""A chain of hashes: one entry per bundle, found by what leads up to it.

    key of bundle i = H(key of bundle i - 1, its tokens, its side inputs)

A digest only finds an entry.  It is taken for a hit when the entry hangs on the
very entry matched before it and has the same tokens, so that a collision can
cost a miss and never a wrong answer, under any ancestor (R8).

Reference: §0x07, and vLLM's automatic prefix caching.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from host_allocator import identity
from host_allocator import sequences
from host_allocator.prefix import base
from host_allocator.prefix import forest

KeyFunction = Callable[[bytes, bytes, tuple[str, ...]], bytes]


class HashChainIndex(forest.Forest):
  """`PrefixIndex` as a hash table of bundles."""

  def __init__(
    self,
    *args: Any,
    key_function: KeyFunction = identity.page_key,
    **kwargs: Any,
  ):
    super().__init__(*args, **kwargs)
    self._key_function = key_function
    self._by_digest: dict[bytes, base.Node] = {}

  def root(self, key: tuple[Any, ...]) -> base.Root:
    """The root of an isolation key, made where there is none."""
    root = super().root(key)
    if not root.top.digest:
      fields = tuple(str(field) for field in key)
      root.top.digest = self._key_function(identity.NO_PARENT, b"", fields)
    return root

  def match(
    self, sequence: sequences.Sequence, num_tokens: int
  ) -> base.PrefixMatch:
    """The longest prefix of a sequence's keys; changes nothing."""
    path: list[base.Node] = []
    if not sequence.root.alive:
      return base.PrefixMatch(0, path)
    node, depth = self._place(sequence)
    keys = self._rows.keys[sequence.row]
    while depth < num_tokens:
      bundle = keys[depth : min(depth + self._bundle, num_tokens)]
      child = self._find(node, bundle)
      if child is None:
        child, shared = self._nearest(node, bundle)
        if child is not None:
          path.append(child)
        return base.PrefixMatch(depth + shared, path)
      path.append(child)
      node, depth = child, child.sealed_end
    return base.PrefixMatch(depth, path)

  def settle(
    self,
    sequence: sequences.Sequence,
    match: base.PrefixMatch,
    num_tokens: int,
  ) -> None:
    """Makes the first `num_tokens` of a match the sequence's own place."""
    self._clock += 1
    aligned = num_tokens - num_tokens % self._bundle
    path = [node for node in match.path if node.start < num_tokens]
    last = path[-1]
    if num_tokens < last.sealed_end:
      path.pop()
    self._use(path, sequence.priority)
    self._rows.published[sequence.row] = aligned
    sequence.node = last
    sequence.node, _ = self._place(sequence)
    sequence.lease_node = last if aligned < num_tokens else None

  def insert(self, sequence: sequences.Sequence, num_tokens: int) -> list[int]:
    """Publishes a sequence's rows up to `num_tokens`."""
    released = [0] * len(self._pools)
    if not self._partial_tails:
      num_tokens -= num_tokens % self._bundle
    row = sequence.row
    if not sequence.root.alive or num_tokens <= self._rows.published[row]:
      return released
    self._clock += 1
    node, depth = self._place(sequence)
    keys = self._rows.keys[row]
    while depth < num_tokens:
      stop = min(depth + self._bundle, num_tokens)
      bundle = keys[depth:stop]
      child = self._find(node, bundle)
      if child is None:
        rival, shared = self._nearest(node, bundle)
        if shared == len(bundle):
          break  # A partial tail, and all of it is there.
        if rival is not None and shared == rival.sealed_end - depth:
          self._trim(rival, depth)  # Its rows are in ours too.
        child = self._attach(sequence, node, depth, stop)
      elif child.sealed_end % self._bundle:
        break
      else:
        counts = self._share(sequence, child, depth, stop)
        released = [a + b for a, b in zip(released, counts, strict=True)]
      node, depth = child, stop
    self._rows.published[row] = depth
    sequence.node = node
    return released

  def grow(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
    """Publishes further bundles: rows of a hash chain are never `growing`."""
    raise AssertionError("a hash chain has no leaf to grow")

  def _find(self, node: base.Node, bundle: np.ndarray) -> base.Node | None:
    """The child of a node with exactly these keys."""
    if len(bundle) < self._bundle:
      children = node.children
      return children.by_key.get(bundle.tobytes()) if children else None
    child = self._by_digest.get(self._digest(node, bundle))
    if child is None or child.parent is not node:
      return None
    return child if np.array_equal(child.key, bundle) else None

  def _digest(self, node: base.Node, bundle: np.ndarray) -> bytes:
    extras: tuple[str, ...] = ()
    keys = bundle
    if len(self._side_input_keys) and bundle.min() < 0:
      extras = self._side_input_keys.describe(bundle)
      keys = np.maximum(bundle, -1)  # Their numbers differ between processes.
    return self._key_function(node.digest, keys.tobytes(), extras)

  def _attach(
    self, sequence: sequences.Sequence, node: base.Node, start: int, stop: int
  ) -> base.Node:
    row, pages = sequence.row, []
    for group, pool in enumerate(self._pools):
      first, last = start // pool.page_size, -(-stop // pool.page_size)
      ids = self._rows.table_rows[group][row][first:last].astype(np.intp)
      pool.publish(ids)
      pages.append(ids)
    key = self._rows.keys[row][start:stop].copy()
    child = base.Node(
      sequence.root, node, start, stop, key, tuple(pages), self._clock
    )
    child.priority = sequence.priority
    if stop - start == self._bundle:
      child.digest = self._digest(node, key)
      self._by_digest[child.digest] = child
    if node.children is None:
      node.children = base.Children()
    node.children.add(key.tobytes(), child)
    self._report_stored(child, start, stop)
    return child

  def _forget(self, node: base.Node) -> None:
    """Removes what finds a node besides its parent's children."""
    if self._by_digest.get(node.digest) is node:
      del self._by_digest[node.digest]
