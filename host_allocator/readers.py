"""What an allocator answers, and lends, without changing what is cached."""

from typing import TypeVar

import numpy as np

from host_allocator import arguments
from host_allocator import audit
from host_allocator import errors
from host_allocator import holding
from host_allocator import pages
from host_allocator import publication
from host_allocator import receipts
from host_allocator import sequences
from host_allocator import state
from host_allocator import telemetry

_Record = TypeVar(
  "_Record", receipts.Lease, receipts.PrefixMatchReceipt, pages.PageHandle
)


class Readers(state.State):
  """The reading half of `KVAllocator`.

  Every method takes the lock, but for the two that answer from constants.
  """

  def pages_needed(self, num_tokens: int) -> tuple[int, ...]:
    """Pages per group that a sequence of that length takes.

    Raises:
      BadArgument: The length is not a whole number from 0.
    """
    return self.layout.pages_for(arguments.whole("num_tokens", num_tokens, 0))

  def can_fit(self, num_tokens: int) -> bool:
    """Whether one sequence of that length fits an empty pool.

    Raises:
      BadArgument: The length is not a whole number from 0.
    """
    return arguments.whole("num_tokens", num_tokens, 0) <= self.longest

  def usage(self) -> tuple[pages.PoolUsage, ...]:
    """The partition of every pool."""
    with self.lock:
      return publication.usage(self)

  def audit(self) -> tuple[str, ...]:
    """Recomputes every invariant from scratch.

    Returns:
      What is wrong, in words; empty where nothing is.
    """
    with self.lock:
      return audit.audit(self)

  def state_digest(self) -> str:
    """SHA-256 of the committed state, without generations and recency."""
    with self.lock:
      return audit.state_digest(self)

  def drain_events(self) -> tuple[telemetry.Event, ...]:
    """Index events since the last call; empty unless they are recorded."""
    with self.lock:
      return () if self.events is None else self.events.drain()

  # Leases and handles --------------------------------------------------------

  def lease(self, sequence: sequences.Sequence) -> receipts.Lease:
    """Keeps a sequence's present rows from being recycled or overwritten.

    Raises:
      BadHandle, SequenceClosed, DeviceLost.

    Ownership: the caller holds them until `release`.
    """
    with self.lock:
      return holding.lease(self, self.rows.row_of(sequence))

  def release(self, lease: receipts.Lease) -> None:
    """Ends a lease.

    Raises:
      DoubleFree: It has ended already.
      DeviceLost: It ended when the device pages were lost.
      BadHandle: It is another allocator's, or none.
    """
    with self.lock:
      self._check_owner(lease, receipts.Lease)
      if lease.number <= self.num_leases_lost:
        raise errors.DeviceLost(
          f"lease {lease.number} ended when the device pages were lost"
        )
      if self.held_leases.get(lease.number) is not lease:
        raise errors.DoubleFree(f"lease {lease.number} is not held")
      del self.held_leases[lease.number]
      for pool, ids in zip(self.pools, lease.group_pages, strict=True):
        pool.unlease(ids)

  def handles(
    self, sequence: sequences.Sequence
  ) -> tuple[tuple[pages.PageHandle, ...], ...]:
    """The pages of a sequence's table per group, with their generations.

    Raises:
      BadHandle, SequenceClosed, DeviceLost.
    """
    with self.lock:
      group_pages = holding.table_pages(self, self.rows.row_of(sequence))
      return receipts.handles(
        self.number, group_pages, holding.generations(self, group_pages)
      )

  def check_handle(self, handle: pages.PageHandle) -> None:
    """Refuses a handle that does not name a page as it is now (R1).

    Raises:
      BadHandle: It is another allocator's, or there is no such group or page.
      StaleHandle: The page was recycled since.
    """
    self._check_owner(handle, pages.PageHandle)
    whole, bad = arguments.whole, errors.BadHandle
    group = whole("group", handle.group, 0, len(self.pools) - 1, bad)
    pool = self.pools[group]
    page = whole("page", handle.page, 1, pool.num_pages, bad)
    generation = whole("generation", handle.generation, refusal=bad)
    with self.lock:
      now = int(pool.generations[page])
    if generation != now:
      raise errors.StaleHandle(
        f"page {page} is at generation {now}, not {generation}"
      )

  def check_receipt(self, receipt: receipts.PrefixMatchReceipt) -> None:
    """Refuses a match receipt that says nothing of the present any more.

    Raises:
      BadHandle: It is another allocator's, or none.
      StaleReceipt: Its index was left behind since, or a page recycled; names
        the first.
    """
    self._check_owner(receipt, receipts.PrefixMatchReceipt)
    with self.lock:
      if not self.namespaces.is_current(receipt.root):
        raise errors.StaleReceipt(
          f"the index of namespace {receipt.namespace!r} was left behind after"
          f" epoch {receipt.epoch}"
        )
      for pool, ids, generations in zip(
        self.pools, receipt.group_pages, receipt.group_generations, strict=True
      ):
        stale = np.flatnonzero(pool.generations[ids] != generations)
        if len(stale):
          raise errors.StaleReceipt(
            f"page {ids[stale[0]]} was recycled after epoch {receipt.epoch}"
          )

  def _check_owner(self, record: _Record, kind: type[_Record]) -> None:
    """Refuses what is not of a kind, or was made by another allocator."""
    if type(record) is not kind:
      raise errors.BadHandle(f"{record!r} is not a {kind.__name__}")
    if record.pool != self.number:
      raise errors.BadHandle(
        f"the {kind.__name__} is of allocator {record.pool}, not {self.number}"
      )
