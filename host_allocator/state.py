"""What an allocator is made of; the modules beside this one work on it.

matching.py      what a new or waiting sequence takes over from the index
holding.py       references of tables and leases: fork, cut, release
reservation.py   what a step needs, room for it, and its reservation
publication.py   making a step's outcome visible
ending.py        closing sequences, ending steps, receipts of both
steps.py         the plan of a step and its packed buffer
allocator.py     the transactions, under one lock
"""

import itertools
from collections.abc import Callable
from collections.abc import Sequence

import numpy as np

from host_allocator import arguments
from host_allocator import errors
from host_allocator import identity
from host_allocator import layout as layout_lib
from host_allocator import pages
from host_allocator import receipts
from host_allocator import sequence_rows
from host_allocator import sequences
from host_allocator import steps
from host_allocator import telemetry
from host_allocator.prefix import base
from host_allocator.prefix import forest
from host_allocator.prefix import hash_chain
from host_allocator.prefix import none
from host_allocator.prefix import radix
from host_allocator.prefix import side_inputs

TAIL_POLICIES = ("copy_rows", "full_pages")
INDEXES: dict[str, type[forest.Forest]] = {
  "radix": radix.RadixIndex,
  "hash_chain": hash_chain.HashChainIndex,
}
_NUMBERS = itertools.count(1)


class State:
  """The parts of an allocator, and what all of its modules need.

  Attributes:
    number: Its own in this process: what page handles, leases and receipts name
      their allocator by. Decides nothing, so that processes may differ in it.
    layout: The cache groups.
    pools: One page pool per group.
    rows: The open sequences.
    index: What can be matched.
    namespaces: Who may match it.
    epoch: Counts commits of any kind.
    open_plan: The step that is neither committed nor aborted.
    bundle: Tokens of an index unit.
    longest: Tokens of the longest sequence that could ever be held.
    on_phase: Called with the name of each phase of a transaction that can
      still fail; tests make it raise.
  """

  def __init__(
    self,
    layout: layout_lib.CacheLayout,
    *,
    num_pages: int | Sequence[int],
    max_sequences: int,
    max_length: int,
    prefix_index: str | None,
    tail_policy: str,
    eviction: str,
    evict_whole_edges: bool,
    semantic_digest: str,
    record_events: bool,
  ):
    per_group = pages_per_group(layout, num_pages)
    limits = 1, arguments.MOST_INT32, errors.LayoutError
    max_sequences = arguments.whole("max_sequences", max_sequences, *limits)
    max_length = arguments.whole("max_length", max_length, *limits)
    if tail_policy not in TAIL_POLICIES:
      raise errors.LayoutError(f"{tail_policy=} is not one of {TAIL_POLICIES}")
    if prefix_index not in (None, *INDEXES):
      raise errors.LayoutError(
        f"{prefix_index=} is not one of {sorted(INDEXES)} or None"
      )
    self.number = next(_NUMBERS)
    self.layout = layout
    self.max_sequences = max_sequences
    self.max_length = max_length
    self.tail_policy = tail_policy
    self.bundle = layout.bundle_tokens
    self.pools = tuple(
      pages.PagePool(group.page_size, count)
      for group, count in zip(layout.groups, per_group, strict=True)
    )
    self.longest = min(
      max_length, *(pool.num_pages * pool.page_size for pool in self.pools)
    )
    self.rows = _make_rows(layout, max_sequences, max_length)
    self.namespaces = identity.Namespaces(semantic_digest, layout.digest)
    self.events = telemetry.EventLog() if record_events else None
    self.side_input_keys = side_inputs.SideInputKeys()
    self.index: base.PrefixIndex = none.NoIndex()
    if prefix_index is not None:
      self.index = INDEXES[prefix_index](
        self.rows,
        self.pools,
        bundle=self.bundle,
        eviction=eviction,
        whole_edges=evict_whole_edges,
        partial_tails=tail_policy == "copy_rows",
        side_input_keys=self.side_input_keys,
        events=self.events,
      )
    self.epoch = 0
    self.open_plan: steps.StepPlan | None = None
    self.held_leases: dict[int, receipts.Lease] = {}
    self.num_leases = self.num_leases_lost = 0
    self.lock = self.rows.lock
    self.on_phase: Callable[[str], None] | None = None

  @property
  def table_widths(self) -> tuple[int, ...]:
    """Pages a sequence can have, per group."""
    return self.rows.table_widths

  def phase(self, name: str) -> None:
    """Marks a point at which the transaction under way may still fail."""
    if self.on_phase is not None:
      self.on_phase(name)

  def idle_row(self, sequence: sequences.Sequence) -> int:
    """The row of an open sequence that is in no step.

    Raises:
      BadHandle, SequenceClosed, DeviceLost, SequenceInStep.
    """
    row = self.rows.row_of(sequence)
    if self.open_plan is not None and row in self.open_plan.rows:
      raise errors.SequenceInStep(
        f"the sequence in row {row} is a member of the open step"
      )
    return row


def pages_per_group(
  layout: layout_lib.CacheLayout, num_pages: int | Sequence[int]
) -> tuple[int, ...]:
  """The pages of each group's pool.

  Raises:
    LayoutError: Where there is not one number for each group, one is below 1,
      or the slots of so many pages do not fit int32.
  """
  if not isinstance(layout, layout_lib.CacheLayout):
    raise errors.LayoutError(f"{layout=!r} is not a CacheLayout")
  groups = layout.groups
  if arguments.is_whole(num_pages):
    counts: tuple = (num_pages,) * len(groups)
  elif isinstance(num_pages, Sequence | np.ndarray):
    counts = tuple(num_pages)
  else:
    raise errors.LayoutError(f"{num_pages=!r} is not a whole number")
  if len(counts) != len(groups):
    raise errors.LayoutError(
      f"{num_pages=!r} is not one number for each of {len(groups)} groups"
    )
  return tuple(
    _pool_pages(group, count)
    for group, count in zip(groups, counts, strict=True)
  )


def _pool_pages(group: layout_lib.CacheGroup, num_pages: int) -> int:
  size = group.page_size
  # Slots go to `(num_pages + 1) * size - 1`: page 0 is the null page.
  return arguments.whole(
    "num_pages",
    num_pages,
    1,
    (arguments.MOST_INT32 + 1) // size - 1,
    lambda message: errors.LayoutError(
      f"{message}, for slots of group {group.name!r} in pages of {size} rows to"
      " fit int32"
    ),
  )


def _make_rows(
  layout: layout_lib.CacheLayout, max_sequences: int, max_length: int
) -> sequence_rows.SequenceRows:
  try:
    return sequence_rows.SequenceRows(layout, max_sequences, max_length)
  except (MemoryError, ValueError) as error:
    raise errors.LayoutError(
      f"there is no memory for tables of {max_sequences=} and {max_length=}"
    ) from error
