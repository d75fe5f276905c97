"""The index of a cache that reuses nothing: every look-up is a miss."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from host_allocator import sequences
from host_allocator.prefix import base


class NoIndex(base.PrefixIndex):
  """`PrefixIndex` that keeps nothing."""

  def root(self, key: tuple[Any, ...]) -> base.Root:
    return base.Root(key)

  def match(
    self, sequence: sequences.Sequence, num_tokens: int
  ) -> base.PrefixMatch:
    return base.PrefixMatch(0, [])

  def settle(
    self,
    sequence: sequences.Sequence,
    match: base.PrefixMatch,
    num_tokens: int,
  ) -> None:
    pass

  def insert(self, sequence: sequences.Sequence, num_tokens: int) -> list[int]:
    return []

  def grow(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
    pass

  def detach(self, sequence: sequences.Sequence) -> None:
    pass

  def release(self, sequence: sequences.Sequence) -> None:
    pass

  def shorten(self, sequence: sequences.Sequence, num_tokens: int) -> None:
    pass

  def evict(self, shortage: list[int]) -> list[int]:
    return [0] * len(shortage)

  def drop(self, root: base.Root) -> None:
    root.alive = False

  def roots(self) -> Iterable[base.Root]:
    return ()

  def nodes(self, root: base.Root) -> Iterable[base.Node]:
    return ()

  def end(self, node: base.Node) -> int:
    return node.sealed_end
