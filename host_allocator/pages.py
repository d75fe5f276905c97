"""One pool of pages per cache group: who holds each page, and which are free.

A page's state is derived from three counts, never stored (R3)::

    table references or leases > 0     LIVE
    none, but entries in an index > 0  EVICTABLE
    taken for a step not yet committed RESERVED
    none of these                      FREE

so `free + evictable + live + reserved` is the pool, always.  Page 0 is the null
page (R6): it is in none of the four.
"""

import dataclasses
import enum

import numpy as np

from host_allocator import errors

# NumPy takes an array of no dimensions faster than a Python number.
_ZERO, _ONE = np.array(0, np.int32), np.array(1, np.int32)
_NEXT = np.array(1, np.int64)
_ONE_BYTES = _ONE.tobytes()


class PageState(enum.Enum):
  """What a page is to the pool."""

  FREE = "free"
  LIVE = "live"
  EVICTABLE = "evictable"
  RESERVED = "reserved"


@dataclasses.dataclass(frozen=True, slots=True)
class PageHandle:
  """A page for as long as it is not recycled (R1).

  Attributes:
    pool: Number of the allocator whose page it is; see `State.number`.
    group: Index of the cache group.
    page: Page id, 1..num_pages.
    generation: How often the page had been taken when the handle was made.
  """

  pool: int
  group: int
  page: int
  generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class PoolUsage:
  """How the pages of one group partition, null page apart.

  `pending` counts live pages that the open step's end will let go, because
  their sequence was cancelled: a scheduler need not pre-empt for those.
  """

  total: int
  free: int
  evictable: int
  live: int
  reserved: int
  pending: int = 0


class PagePool:
  """The pages of one cache group.

  Arrays are indexed by page id and hold the null page at 0.  Every method that
  takes page ids wants them distinct; a sequence's table never repeats one.  Ids
  may be of any integer type; intp is three times faster than int32.

  Attributes:
    references: int32, page table entries that hold the page.
    leases: int32, readers that keep it from being recycled (R3: a lease does
      not make its owner copy before writing).
    entries: int32, index entries that name it; weak.
    valid_rows: int32, rows that were computed and committed. A sequence's
      private last page stands at `page_size` here, and the sequence's own
      length says how many there are: see `holding.note_valid_rows`.
    generations: int64, raised whenever the page is taken.
  """

  def __init__(self, page_size: int, num_pages: int):
    self.page_size = page_size
    self.num_pages = num_pages
    self.references = np.zeros(num_pages + 1, np.int32)
    self.leases = np.zeros(num_pages + 1, np.int32)
    self.entries = np.zeros(num_pages + 1, np.int32)
    self.valid_rows = np.zeros(num_pages + 1, np.int32)
    self.generations = np.zeros(num_pages + 1, np.int64)
    self.num_free = num_pages
    self.num_evictable = 0
    self.num_reserved = 0
    self._num_leases = 0
    # A stack: the pages freed last are taken first, while they are warm.
    self._free = np.arange(num_pages, 0, -1, dtype=np.intp)

  @property
  def available(self) -> int:
    """Pages that can be had now, by taking or by evicting."""
    return self.num_free + self.num_evictable

  @property
  def free_pages(self) -> np.ndarray:
    """The free page ids, a read-only view in no particular order."""
    view = self._free[: self.num_free]
    view.flags.writeable = False
    return view

  def usage(self, pending: int = 0) -> PoolUsage:
    """The partition of the pool."""
    idle = self.num_free + self.num_evictable + self.num_reserved
    return PoolUsage(
      total=self.num_pages,
      free=self.num_free,
      evictable=self.num_evictable,
      live=self.num_pages - idle,
      reserved=self.num_reserved,
      pending=pending,
    )

  def take(self, count: int) -> np.ndarray:
    """Reserves `count` free pages under a new generation.

    Ownership: the caller commits them with `commit` or returns them with
    `give_back`.
    """
    if count > self.num_free:
      raise errors.OutOfPages(count, self.num_free, {})
    rest = self.num_free - count
    pages = self._free[rest : self.num_free][::-1].copy()
    self.num_free = rest
    self.num_reserved += count
    self.generations[pages] += _NEXT
    return pages

  def commit(self, pages: np.ndarray) -> None:
    """Turns reserved pages into live ones, with one table reference each."""
    self.references[pages] = 1
    self.valid_rows[pages] = self.page_size
    self.num_reserved -= len(pages)

  def give_back(self, pages: np.ndarray) -> None:
    """Returns reserved pages; they come back FREE and without keys."""
    self.num_reserved -= len(pages)
    self._push(pages)

  def hold(self, pages: np.ndarray) -> None:
    """Adds a table reference to each page."""
    before = self.references[pages]
    self._count_revived(pages, before)
    before += _ONE
    self.references[pages] = before

  def drop(self, pages: np.ndarray) -> None:
    """Removes a table reference from each page.

    Raises:
      DoubleFree: Where one has none; nothing is changed.
    """
    counts = self.references[pages]
    if _least(counts) < 1:
      raise errors.DoubleFree(
        f"pages {pages[counts < 1].tolist()} have no table reference to drop"
      )
    counts -= _ONE
    self.references[pages] = counts
    pages = pages[counts == _ZERO]
    if self._num_leases:
      pages = pages[self.leases[pages] == 0]
    self._settle(pages)

  def lease(self, pages: np.ndarray) -> None:
    """Adds a read lease to each page."""
    before = self.references[pages]
    self._count_revived(pages, before)
    self.leases[pages] += 1
    self._num_leases += len(pages)

  def unlease(self, pages: np.ndarray) -> None:
    """Removes a read lease from each page.

    Raises:
      DoubleFree: Where one has none; nothing is changed.
    """
    counts = self.leases[pages]
    if _least(counts) < 1:
      raise errors.DoubleFree(
        f"pages {pages[counts < 1].tolist()} have no lease to drop"
      )
    counts -= _ONE
    self.leases[pages] = counts
    self._num_leases -= len(pages)
    idle = pages[counts == _ZERO]
    self._settle(idle[self.references[idle] == 0])

  def publish(self, pages: np.ndarray) -> None:
    """Adds an index entry to each page; somebody holds them meanwhile."""
    self.entries[pages] += _ONE

  def withdraw(self, pages: np.ndarray) -> int:
    """Removes an index entry from each page.

    Returns:
      How many pages became free by it.
    """
    left = self.entries[pages]
    left -= _ONE
    self.entries[pages] = left
    if np.count_nonzero(left) or self.num_held(pages):
      pages = pages[(left == 0) & self.unheld(pages)]
    self.num_evictable -= len(pages)
    self._push(pages)
    return len(pages)

  def are_idle(self, pages: np.ndarray) -> bool:
    """Whether each of the pages has one index entry and nobody holds it."""
    counts = self.references[pages]
    counts += self.entries[pages]
    if self._num_leases:
      counts += self.leases[pages]
    return counts.tobytes() == _ONE_BYTES * len(pages)

  def reclaim(self, pages: np.ndarray) -> None:
    """Frees pages of which `are_idle` is true."""
    self.entries[pages] = 0
    self.num_evictable -= len(pages)
    self._push(pages)

  def unheld(self, pages: np.ndarray) -> np.ndarray:
    """Which of the pages have neither table references nor leases."""
    unheld = self.references[pages] == 0
    if self._num_leases:
      unheld &= self.leases[pages] == 0
    return unheld

  def state(self, page: int) -> PageState:
    """The state of one page; RESERVED is what no count explains."""
    if self.references[page] or self.leases[page]:
      return PageState.LIVE
    if self.entries[page]:
      return PageState.EVICTABLE
    if page in self._free[: self.num_free]:
      return PageState.FREE
    return PageState.RESERVED

  def reset(self) -> None:
    """Makes every page FREE under a new generation."""
    for counts in (self.references, self.leases, self.entries):
      counts[:] = 0
    self.valid_rows[:] = 0
    self.generations += 1
    self.num_free = self.num_pages
    self.num_evictable = self.num_reserved = self._num_leases = 0
    self._free[:] = np.arange(self.num_pages, 0, -1)

  def _count_revived(self, pages: np.ndarray, references: np.ndarray) -> None:
    """Takes pages that were idle until now out of the evictable count."""
    if self._num_leases:
      references = references + self.leases[pages]
    if not _least(references):
      self.num_evictable -= len(pages) - int(np.count_nonzero(references))

  def _settle(self, idle: np.ndarray) -> None:
    """Files pages that nobody holds any more as evictable or free."""
    entries = self.entries[idle]
    if not _least(entries):
      self._push(idle[entries == _ZERO])
      idle = idle[entries > _ZERO]
    self.num_evictable += len(idle)

  def num_held(self, pages: np.ndarray) -> int:
    """How many leading pages there are up to the last held one."""
    if not self._num_leases and not np.count_nonzero(self.references[pages]):
      return 0
    held = (~self.unheld(pages)).nonzero()[0]
    return int(held[-1]) + 1 if len(held) else 0

  def _push(self, pages: np.ndarray) -> None:
    count = self.num_free + len(pages)
    self._free[self.num_free : count] = pages
    self.num_free = count


def _least(counts: np.ndarray) -> int:
  """The least of some counts, 1 of none; argmin is faster than a reduction."""
  return counts[counts.argmin()] if len(counts) else 1
