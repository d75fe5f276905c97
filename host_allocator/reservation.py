"""What a step needs, room for it, and its reservation: all or nothing (R2)."""

from collections.abc import Iterable

import numpy as np

from host_allocator import errors
from host_allocator import sequences
from host_allocator import state as state_lib
from host_allocator import steps
from host_allocator import tables

Pairs = Iterable[tuple[sequences.Sequence, int]]

_NONE = np.zeros(0, np.int32)


def columns(
  batch: Pairs, max_length: int
) -> tuple[list[sequences.Sequence], np.ndarray]:
  """The members of a step, and the rows to compute of each, int32 `[n]`.

  Raises:
    BadStep: These are no pairs, there is no member, or one has no rows, a
      fraction of one, or more than any sequence can have.
  """
  try:
    pairs = tuple(batch)
    named = [sequence for sequence, _ in pairs]
    counts = [count for _, count in pairs]
  except (TypeError, ValueError) as error:
    raise errors.BadStep(
      f"a step is (sequence, rows) pairs or a Batch, not {batch!r}"
    ) from error
  return named, _checked_counts(counts, max_length)


def _checked_counts(counts: list[int], max_length: int) -> np.ndarray:
  try:
    given = np.array(counts)
  except (ValueError, OverflowError):
    given = np.zeros((1, 1))
  if given.ndim != 1 or (len(given) and given.dtype.kind not in "iu"):
    raise errors.BadStep(f"rows to compute must be whole numbers: {counts}")
  if not len(given) or given.min() < 1:
    raise errors.BadStep(
      f"a step needs members, of one row or more each: {counts}"
    )
  if given.max() > max_length:
    raise errors.BadStep(
      f"{given.max()} rows asked of a sequence, of which none has more than"
      f" {max_length=}"
    )
  return given.astype(np.int32)


def reserve(
  state: state_lib.State,
  batch: sequences.Batch,
  counts: np.ndarray,
  num_tokens: int,
) -> steps.StepPlan:
  """Plans and reserves a step; nothing of it can be seen yet.

  Args:
    state: Without an open step.
    batch: The members.
    counts: int32 `[n]`, rows to compute of each, at least one.
    num_tokens: Their sum.

  Raises:
    BadStep, OutOfPages: Before anything is touched.
  """
  plan = _plan_in_stride(state, batch) or _plan(
    state, batch, counts, num_tokens
  )
  demands = [_demand(state, plan, group) for group in range(len(state.pools))]
  state.phase("plan.counted")
  _make_room(state, [len(copied) + len(at) for copied, at, _ in demands])
  try:
    for group, demand in enumerate(demands):
      state.phase(f"plan.reserving_{group}")
      plan.groups.append(_group_plan(state, plan, group, *demand))
    state.phase("plan.reserved")
  except BaseException:
    give_back(state, plan)
    raise
  if plan.stride is not None and plan.stride.buffers is not None:
    plan.stride.buffers.note(plan.groups)
  state.open_plan = plan
  return plan


def _plan_in_stride(
  state: state_lib.State, batch: sequences.Batch
) -> steps.StepPlan | None:
  """A row for each member of a batch that is in stride; else None."""
  stride = batch.stride
  if stride is None or stride is not state.rows.stride or not stride.is_ahead:
    return None
  return steps.StepPlan(
    batch.sequences,
    batch.rows,
    stride.lengths,
    batch.ones,
    stride.next_lengths,
    stride.lengths,
    len(batch.rows),
    stride,
  )


def _plan(
  state: state_lib.State,
  batch: sequences.Batch,
  counts: np.ndarray,
  num_tokens: int,
) -> steps.StepPlan:
  rows, arrays = batch.rows, state.rows
  starts = arrays.length[rows]
  _check_known(state, rows, starts, counts)
  ends = starts + counts
  if arrays.are_private(rows):
    return steps.StepPlan(
      batch.sequences, rows, starts, counts, ends, starts, num_tokens
    )
  writes = arrays.present[rows]
  plan = steps.StepPlan(
    batch.sequences,
    rows,
    starts,
    counts,
    ends,
    writes,
    num_tokens,
    has_hidden=writes.tobytes() != starts.tobytes(),
  )
  plan.has_shared = steps.has_tails(plan, state.bundle)
  return plan


def give_back(state: state_lib.State, plan: steps.StepPlan) -> None:
  """Returns a step's reserved pages."""
  for pool, group in zip(state.pools, plan.groups, strict=False):
    pool.give_back(group.pages)


def _check_known(
  state: state_lib.State,
  rows: np.ndarray,
  starts: np.ndarray,
  counts: np.ndarray,
) -> None:
  beyond = counts > state.rows.num_tokens[rows] - starts  # No sum to overflow.
  if b"\1" in beyond.tobytes():
    at = int(beyond.argmax())
    start, count = int(starts[at]), int(counts[at])
    raise errors.BadStep(
      f"rows {start}..{start + count - 1} asked of a sequence of"
      f" {state.rows.num_tokens[rows[at]]} tokens"
    )


def _demand(
  state: state_lib.State, plan: steps.StepPlan, group: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Pages that one group must find (R5).

  Returns:
    Members whose last page must be copied; then, for each fresh page, its
    member and its column in the table.
  """
  size = state.pools[group].page_size
  if plan.stride is not None:
    members, _ = plan.stride.full(size)
    return _NONE, members, plan.writes[members] // size
  if plan.is_decode:
    # At most one fresh page each, where the last one is full.
    full = plan.writes % size == 0
    if plan.has_hidden:
      full &= plan.ends > plan.writes
    members = full.nonzero()[0]
    columns = plan.writes[members] // size
  else:
    have = -(-plan.writes // size)
    fresh = -(-plan.ends // size) - have
    members = np.arange(len(plan.rows)).repeat(fresh)
    columns = have[members] + np.arange(len(members))
    columns -= (fresh.cumsum() - fresh)[members]
  copied = _shared_tails(state, plan, group) if plan.has_shared else _NONE
  return copied, members, columns


def _shared_tails(
  state: state_lib.State, plan: steps.StepPlan, group: int
) -> np.ndarray:
  """The members whose partly filled last page is not theirs to write."""
  pool, arrays = state.pools[group], state.rows
  members, rows, pages = steps.shared_tails(plan, arrays, group)
  if not len(members):
    return _NONE
  alone = (
    (arrays.leased[group][rows] == 0)
    & (pool.references[pages] == 1)
    & (pool.valid_rows[pages] <= plan.writes[members] % pool.page_size)
  )
  return members[~alone]


def _make_room(state: state_lib.State, needed: list[int]) -> None:
  """Evicts so that every pool has what is needed free, or refuses.

  Eviction is an epoch of its own and stays, whatever becomes of the step.
  """
  shortage = [
    need - pool.num_free for need, pool in zip(needed, state.pools, strict=True)
  ]
  if max(shortage) <= 0:
    return
  lacking = [
    group
    for group, need in enumerate(needed)
    if need > state.pools[group].available
  ]
  if lacking:
    raise errors.OutOfPages(
      sum(needed[group] for group in lacking),
      sum(state.pools[group].available for group in lacking),
      {
        group.name: (need, pool.available)
        for group, need, pool in zip(
          state.layout.groups, needed, state.pools, strict=True
        )
      },
    )
  state.index.evict([max(count, 0) for count in shortage])
  state.epoch += 1
  state.phase("plan.evicted")


def _group_plan(
  state: state_lib.State,
  plan: steps.StepPlan,
  group: int,
  copied: np.ndarray,
  members: np.ndarray,
  columns: np.ndarray,
) -> tables.GroupPlan:
  pool = state.pools[group]
  pages = pool.take(len(copied) + len(members))
  if not len(copied):
    return tables.GroupPlan(members, columns, pages, _NONE, _NONE)
  tails = plan.writes[copied] // pool.page_size
  return tables.GroupPlan(
    members=np.concatenate([copied, members]),
    columns=np.concatenate([tails, columns]),
    pages=pages,
    copy_sources=state.rows.pages_at(group, plan.rows[copied], tails),
    copy_rows=plan.writes[copied] % pool.page_size,
  )
