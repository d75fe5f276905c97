"""What a prefix index is, and the pieces that both of them are made of.

An index is a forest: one root per isolation key (R7), a path below it for every
published token sequence, and pages on the path for the bundles it covers.  Its
entries are weak: they keep nothing alive, and go when the pool needs pages.

A *bundle* is the unit of the index, the least number of tokens that whole pages
of every group can hold.  Only the last bundle of a childless node may be less
than full: a *partial tail*, whose rows are immutable up to its end.
"""

import abc
import bisect
import dataclasses
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any
from typing import Generic
from typing import NamedTuple
from typing import TypeVar

import numpy as np

from host_allocator import sequences

TOKEN_BYTES = 4  # Of a token in a key.
_NO_KEY = np.zeros(0, np.int32)

NodeT = TypeVar("NodeT", bound="Node")


@dataclasses.dataclass(eq=False, slots=True)
class Root:
  """The index of one isolation key.

  Attributes:
    key: (namespace, namespace generation, semantic digest, layout digest,
      adapter, salt), a tuple, so that no two concatenate to the same.
    top: The node without tokens that all paths start from.
    alive: False once revoked: owners finish, nobody new matches.
    num_sequences: Open sequences under it.
  """

  key: tuple[Any, ...]
  top: Any = None
  alive: bool = True
  num_sequences: int = 0


class Node:
  """A stretch of a path: `end - start` tokens and the pages that hold them.

  A node that a live sequence is still growing has `owner >= 0`; its end is then
  `published[owner]`, and its key and pages are views of that sequence's rows.
  Any other is sealed, and its key is a view of its `data`.

  Attributes:
    start: Tokens before it on the path, whole bundles.
    key: int32 index keys from `start` on; `end - start` of them count.
    data: The key as bytes, for one comparison of memory; b"" while owned.
    pages: Per group, page ids from `start` on; those up to `end` count.
    queued: Rank of its latest entry in the eviction queue, or None.
  """

  __slots__ = (
    "children",
    "created",
    "data",
    "digest",
    "hits",
    "key",
    "last_used",
    "owner",
    "pages",
    "parent",
    "priority",
    "queued",
    "root",
    "sealed_end",
    "start",
  )

  def __init__(self, root: Root, parent: "Node | None", start: int, clock: int):
    self.root = root
    self.parent = parent
    # None, never empty.
    self.children: Children[Node] | None = None
    self.start = self.sealed_end = start
    self.owner = -1
    self.data = b""
    self.key = _NO_KEY
    self.pages: tuple[np.ndarray, ...] = ()
    self.created = self.last_used = clock
    self.hits = 0
    self.priority = 0
    self.queued: tuple[int, ...] | None = None
    self.digest = b""

  def seal(self, end: int, data: bytes, pages: tuple[np.ndarray, ...]) -> None:
    """Gives the node a key and pages of its own."""
    self.owner = -1
    self.sealed_end = end
    self.data = data
    self.key = np.frombuffer(data, np.int32)
    self.pages = pages


class Children(Generic[NodeT]):
  """A node's children by the bytes of their first bundle.

  To find the child that shares the longest part of a bundle they are also kept
  in byte order, where it is a neighbour of the place the bundle would take;
  apart by first token, since most bundles share not even that with any child.
  This order is made at the first such question, and then kept.
  """

  __slots__ = ("_by_token", "by_key")

  def __init__(self) -> None:
    self.by_key: dict[bytes, NodeT] = {}
    self._by_token: dict[bytes, list[bytes]] | None = None

  def __len__(self) -> int:
    return len(self.by_key)

  def __iter__(self) -> Iterator[NodeT]:
    return iter(self.by_key.values())

  def add(self, key: bytes, node: NodeT) -> None:
    """Adds a child, or replaces the one with that key."""
    if self._by_token is not None and key not in self.by_key:
      bisect.insort(self._by_token.setdefault(key[:TOKEN_BYTES], []), key)
    self.by_key[key] = node

  def remove(self, key: bytes) -> None:
    """Removes the child with that key."""
    del self.by_key[key]
    if self._by_token is not None:
      keys = self._by_token[key[:TOKEN_BYTES]]
      del keys[bisect.bisect_left(keys, key)]
      if not keys:
        del self._by_token[key[:TOKEN_BYTES]]

  def nearest(self, bundle: bytes) -> tuple[NodeT | None, int]:
    """The child whose first bundle shares the most leading tokens.

    Args:
      bundle: int32 bytes, of at most one bundle of tokens.

    Returns:
      The child and how many tokens it shares; (None, 0) where that is none.
    """
    if self._by_token is None:
      self._by_token = {}
      for key in sorted(self.by_key):
        self._by_token.setdefault(key[:TOKEN_BYTES], []).append(key)
    keys = self._by_token.get(bundle[:TOKEN_BYTES])
    if keys is None:
      return None, 0
    at = bisect.bisect_left(keys, bundle)
    neighbours = keys[max(at - 1, 0) : at + 1]
    shared = [common_tokens(key, bundle) for key in neighbours]
    most = max(shared)
    return self.by_key[neighbours[shared.index(most)]], most


def common_tokens(a: bytes, b: bytes) -> int:
  """How many leading int32 tokens two byte strings share."""
  size = min(len(a), len(b))
  differ = int.from_bytes(a[:size], "little") ^ int.from_bytes(
    b[:size], "little"
  )
  if not differ:
    return size // TOKEN_BYTES
  return ((differ & -differ).bit_length() - 1) // (8 * TOKEN_BYTES)


class PrefixMatch(NamedTuple):
  """The longest indexed prefix of a sequence of keys.

  Attributes:
    num_tokens: How many leading tokens are indexed, exact to the token.
    path: The nodes from below the root to the last that shares a token; all
      but the last are matched to their end.
  """

  num_tokens: int
  path: list[Node]


class PrefixIndex(abc.ABC):
  """`match / insert / evict / drop`, over the pages of a set of pools."""

  @abc.abstractmethod
  def root(self, key: tuple[Any, ...]) -> Root:
    """The root of an isolation key, made where there is none."""

  @abc.abstractmethod
  def match(self, sequence: sequences.Sequence, num_tokens: int) -> PrefixMatch:
    """The longest prefix of a sequence's keys; changes nothing.

    Looks on from where the sequence's published rows end.
    """

  @abc.abstractmethod
  def settle(
    self, sequence: sequences.Sequence, match: PrefixMatch, num_tokens: int
  ) -> None:
    """Makes the first `num_tokens` of a match the sequence's own place.

    Counts the use, splits the last node where the match ends inside it, and
    points the sequence at its place. The sequence has been detached.
    """

  @abc.abstractmethod
  def insert(self, sequence: sequences.Sequence, num_tokens: int) -> list[int]:
    """Publishes a sequence's rows up to `num_tokens`.

    Where the index has the same rows in other pages, the sequence's table (and
    every other that holds the duplicate) is pointed at the index's (R11).

    Returns:
      Duplicate pages let go, per group.
    """

  @abc.abstractmethod
  def grow(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
    """Publishes further bundles of rows that are `growing`, vectorised."""

  @abc.abstractmethod
  def detach(self, sequence: sequences.Sequence) -> None:
    """Makes what a sequence published independent of its rows."""

  @abc.abstractmethod
  def release(self, sequence: sequences.Sequence) -> None:
    """Lets a sequence go that is about to drop its pages."""

  @abc.abstractmethod
  def shorten(self, sequence: sequences.Sequence, num_tokens: int) -> None:
    """Takes a sequence's place back to at most `num_tokens`."""

  @abc.abstractmethod
  def evict(self, shortage: list[int]) -> list[int]:
    """Withdraws entries until that many pages per group have become free.

    Returns:
      Pages freed per group.
    """

  @abc.abstractmethod
  def drop(self, root: Root) -> None:
    """Forgets everything under a root and marks it dead."""

  @abc.abstractmethod
  def roots(self) -> Iterable[Root]:
    """The live roots."""

  @abc.abstractmethod
  def nodes(self, root: Root) -> Iterable[Node]:
    """Every node below a root, parents first."""

  @abc.abstractmethod
  def end(self, node: Node) -> int:
    """Tokens up to a node's end."""
