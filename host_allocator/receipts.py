"""Immutable records of what happened: facts, not policy (R12).

A receipt carries epochs and generations, so that whoever uses one later can be
told that the world has moved on.  Digests are there when the allocator was
built to record them.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from host_allocator import identity
from host_allocator import pages


class PrefixMatchReceipt(NamedTuple):
  """What one look-up proved, and what remains to be executed (§0x07G).

  Attributes:
    pool: Number of the allocator that was asked; see `State.number`.
    root: Whose index was read, at which generation.
    epoch: Allocator epoch at the look-up.
    prompt_tokens: Tokens looked up.
    semantic_tokens: Longest exact prefix in the index, S_indexed.
    matched_tokens: Rows returned, S_runtime (R9).
    copied_rows: Rows of a partly matching page that the first write copies.
    group_pages: intp page ids per group, in token order; read-only.
    group_generations: int64, their generations; read-only.
  """

  pool: int
  root: identity.RootKey
  epoch: int
  prompt_tokens: int
  semantic_tokens: int
  matched_tokens: int
  copied_rows: int
  group_pages: tuple[np.ndarray, ...]
  group_generations: tuple[np.ndarray, ...]

  @property
  def namespace(self) -> str:
    """The namespace whose index was read."""
    return self.root.namespace

  @property
  def namespace_generation(self) -> int:
    """The generation of that namespace."""
    return self.root.namespace_generation

  @property
  def recomputed_tokens(self) -> int:
    """Prompt rows that are left to compute, S_recompute."""
    return self.prompt_tokens - self.matched_tokens

  def handles(self) -> tuple[tuple[pages.PageHandle, ...], ...]:
    """The matched pages per group as generation-fenced handles."""
    return handles(self.pool, self.group_pages, self.group_generations)


def handles(
  pool: int,
  group_pages: tuple[np.ndarray, ...],
  group_generations: tuple[np.ndarray, ...],
) -> tuple[tuple[pages.PageHandle, ...], ...]:
  """Pages and their generations per group as handles."""
  return tuple(
    tuple(
      pages.PageHandle(pool, group, page, generation)
      for page, generation in zip(
        ids.tolist(), generations.tolist(), strict=True
      )
    )
    for group, (ids, generations) in enumerate(
      zip(group_pages, group_generations, strict=True)
    )
  )


class StepReceipt(NamedTuple):
  """What one step did to the pools (§0x04D).

  Attributes:
    outcome: "committed" or "aborted".
    epoch: Allocator epoch after it.
    num_tokens: Rows that became visible.
    new_pages: Pages taken, per group.
    copied_rows: Rows copied before the writes, per group.
    copied_bytes: Payload of those copies, read once and written once each.
    released_duplicates: Pages given up because another sequence had published
      the same rows first, per group.
    predecessor_digest: State before, where digests are recorded.
    successor_digest: State after, where digests are recorded.
  """

  outcome: str
  epoch: int
  num_tokens: int
  new_pages: tuple[int, ...]
  copied_rows: tuple[int, ...]
  copied_bytes: int
  released_duplicates: tuple[int, ...]
  predecessor_digest: str | None = None
  successor_digest: str | None = None


class ReleaseReceipt(NamedTuple):
  """What closing, cancelling or truncating gave up.

  Attributes:
    outcome: "closed", "cancelled", "cancel_pending" or "truncated".
    epoch: Allocator epoch after it.
    generation: Of the sequence's row.
    length: Rows it had before.
    dropped_pages: Table references dropped, per group.
  """

  outcome: str
  epoch: int
  generation: int
  length: int
  dropped_pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
  """A reader's strong reference to pages, until it is released.

  While it lasts the pages are neither recycled nor overwritten in rows that
  were valid; their owner may still append to them.

  Attributes:
    pool: Number of the allocator that lent it; see `State.number`.
    number: Of the lease.
    group_pages: Page ids per group, in token order; read-only.
    group_generations: Their generations; read-only.
    num_tokens: Rows that can be read.
  """

  pool: int
  number: int
  group_pages: tuple[np.ndarray, ...]
  group_generations: tuple[np.ndarray, ...]
  num_tokens: int
