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
      bundle = keys[depth : min(depth + self._bundle, num_tokens)].tobytes()
      child = self._find(node, bundle)
      if child is None:
        child, shared = self._nearest(node, bundle)
        if child is not None:
          path.append(child)
        return base.PrefixMatch(depth + shared, path)
      path.append(child)
      node, depth = child, child.sealed_end
    return base.PrefixMatch(depth, path)

  def _insert(
    self, sequence: sequences.Sequence, num_tokens: int, released: list[int]
  ) -> None:
    """Publishes what a sequence has not published yet, up to `num_tokens`."""
    row = sequence.row
    node, depth = self._place(sequence)
    keys = self._rows.keys[row]
    while depth < num_tokens:
      stop = min(depth + self._bundle, num_tokens)
      bundle = keys[depth:stop].tobytes()
      child = self._find(node, bundle)
      if child is None:
        rival, shared = self._nearest(node, bundle)
        if shared == stop - depth:
          break  # A partial tail, and all of it is there.
        if rival is not None and shared == rival.sealed_end - depth:
          self._trim(rival, depth)  # Its rows are in ours too.
        child = self._attach(sequence, node, bundle, depth, stop)
      elif child.sealed_end % self._bundle:
        break
      else:
        self._share(sequence, child, depth, stop, released)
      node, depth = child, stop
    self._rows.published[row] = depth
    sequence.node = node

  def grow(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
    """Publishes further bundles: rows of a hash chain are never `growing`."""
    raise AssertionError("a hash chain has no leaf to grow")

  def _find(self, node: base.Node, bundle: bytes) -> base.Node | None:
    """The child of a node with exactly these keys."""
    if len(bundle) < self._bundle * base.TOKEN_BYTES:
      children = node.children
      return children.by_key.get(bundle) if children else None
    child = self._by_digest.get(self._digest(node, bundle))
    if child is None or child.parent is not node:
      return None
    return child if child.data == bundle else None

  def _digest(self, node: base.Node, bundle: bytes) -> bytes:
    extras: tuple[str, ...] = ()
    if len(self._side_input_keys):
      keys = np.frombuffer(bundle, np.int32)
      if keys.min() < 0:
        extras = self._side_input_keys.describe(keys)
        # Their numbers differ between processes.
        bundle = np.maximum(keys, -1).tobytes()
    return self._key_function(node.digest, bundle, extras)

  def _attach(
    self,
    sequence: sequences.Sequence,
    node: base.Node,
    bundle: bytes,
    start: int,
    stop: int,
  ) -> base.Node:
    """Publishes the bundle of rows `[start, stop)` below a node."""
    row, pages = sequence.row, []
    for group, pool in enumerate(self._pools):
      first, last = start // pool.page_size, -(-stop // pool.page_size)
      ids = self._rows.table_rows[group][row][first:last].astype(np.intp)
      pool.publish(ids)
      pages.append(ids)
    child = base.Node(sequence.root, node, start, self._clock)
    child.seal(stop, bundle, tuple(pages))
    child.priority = sequence.priority
    if stop - start == self._bundle:
      child.digest = self._digest(node, bundle)
      self._by_digest[child.digest] = child
    if node.children is None:
      node.children = base.Children()
    node.children.add(bundle, child)
    self._report_stored(child, start, stop)
    return child

  def _reach(self, node: base.Node, stop: int) -> list[base.Node]:
    """The part of a node up to a whole bundle at `stop`: a node is a bundle."""
    return []

  def _forget(self, node: base.Node) -> None:
    """Removes what finds a node besides its parent's children."""
    if self._by_digest.get(node.digest) is node:
      del self._by_digest[node.digest]
