"""What an allocator answers, and lends, without changing what is cached."""

import numpy as np

from host_allocator import audit
from host_allocator import errors
from host_allocator import holding
from host_allocator import pages
from host_allocator import publication
from host_allocator import receipts
from host_allocator import sequences
from host_allocator import state
from host_allocator import telemetry


class Readers(state.State):
  """The reading half of `KVAllocator`; every method takes the lock."""

  def pages_needed(self, num_tokens: int) -> tuple[int, ...]:
    """Pages per group that a sequence of that length takes."""
    return self.layout.pages_for(num_tokens)

  def can_fit(self, num_tokens: int) -> bool:
    """Whether one sequence of that length fits an empty pool."""
    return num_tokens <= self.longest

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

    Ownership: the caller holds them until `release`.
    """
    with self.lock:
      lease = holding.lease(self, sequence, next(self.lease_numbers))
      self.held_leases[lease.number] = lease
      return lease

  def release(self, lease: receipts.Lease) -> None:
    """Ends a lease.

    Raises:
      DoubleFree: It has ended already.
    """
    with self.lock:
      if self.held_leases.get(lease.number) is not lease:
        raise errors.DoubleFree(f"lease {lease.number} is not held")
      del self.held_leases[lease.number]
      for pool, ids in zip(self.pools, lease.group_pages, strict=True):
        pool.unlease(ids)

  def handles(
    self, sequence: sequences.Sequence
  ) -> tuple[tuple[pages.PageHandle, ...], ...]:
    """The pages of a sequence's table per group, with their generations."""
    with self.lock:
      group_pages = holding.table_pages(self, sequence.row)
      return receipts.handles(
        group_pages, holding.generations(self, group_pages)
      )

  def check_handle(self, handle: pages.PageHandle) -> None:
    """Refuses a handle that does not name a page as it is now (R1).

    Raises:
      BadHandle: No such group or page.
      StaleHandle: The page was recycled since.
    """
    if not 0 <= handle.group < len(self.pools):
      raise errors.BadHandle(f"no cache group {handle.group}")
    pool = self.pools[handle.group]
    if not 1 <= handle.page <= pool.num_pages:
      raise errors.BadHandle(
        f"page {handle.page} is not within 1..{pool.num_pages}"
      )
    now = int(pool.generations[handle.page])
    if handle.generation != now:
      raise errors.StaleHandle(
        f"page {handle.page} is at generation {now}, not {handle.generation}"
      )

  def check_receipt(self, receipt: receipts.PrefixMatchReceipt) -> None:
    """Refuses a match receipt any of whose pages was recycled since.

    Raises:
      StaleReceipt: Naming the first such page.
    """
    with self.lock:
      for pool, ids, generations in zip(
        self.pools, receipt.group_pages, receipt.group_generations, strict=True
      ):
        stale = np.flatnonzero(pool.generations[ids] != generations)
        if len(stale):
          raise errors.StaleReceipt(
            f"page {ids[stale[0]]} was recycled after epoch {receipt.epoch}"
          )
