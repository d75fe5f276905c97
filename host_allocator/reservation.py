"""What a step needs, room for it, and its reservation: all or nothing (R2)."""

import numpy as np

from host_allocator import errors
from host_allocator import sequences
from host_allocator import state as state_lib
from host_allocator import steps

_NONE = np.zeros(0, np.int32)


def reserve(
  state: state_lib.State, batch: sequences.Batch, counts: np.ndarray
) -> steps.StepPlan:
  """Plans and reserves a step; nothing of it can be seen yet.

  Args:
    state: Without an open step.
    batch: The members.
    counts: int32 `[n]`, rows to compute of each.

  Raises:
    BadStep, OutOfPages: Before anything is touched.
  """
  rows = batch.rows
  starts = state.rows.length[rows]
  ends = starts + counts
  _check_rows(state, rows, starts, ends, counts)
  writes = state.rows.present[rows]
  demands = [
    _demand(state, group, rows, writes, ends)
    for group in range(len(state.pools))
  ]
  needed = [len(copied) + len(fresh) for copied, fresh, _ in demands]
  state.phase("plan.counted")
  _make_room(state, needed)
  groups: list[steps.GroupPlan] = []
  try:
    for group, demand in enumerate(demands):
      state.phase(f"plan.reserving_{group}")
      groups.append(_group_plan(state, group, rows, writes, *demand))
    state.phase("plan.reserved")
  except BaseException:
    for pool, taken in zip(state.pools, groups, strict=False):
      pool.give_back(taken.pages)
    raise
  state.rows.in_step[rows] = True
  state.open_plan = steps.StepPlan(
    sequences=batch.sequences,
    rows=rows,
    starts=starts,
    counts=counts,
    ends=ends,
    writes=writes,
    groups=tuple(groups),
    num_tokens=int(counts.sum()),
    has_hidden=bool((writes > starts).any()),
  )
  return state.open_plan


def give_back(state: state_lib.State, plan: steps.StepPlan) -> None:
  """Returns a step's reserved pages."""
  for pool, group in zip(state.pools, plan.groups, strict=True):
    pool.give_back(group.pages)


def _check_rows(
  state: state_lib.State,
  rows: np.ndarray,
  starts: np.ndarray,
  ends: np.ndarray,
  counts: np.ndarray,
) -> None:
  if not len(rows) or counts.min() < 1:
    raise errors.BadStep(
      f"a step needs members, of one row or more each: {counts.tolist()}"
    )
  beyond = ends > state.rows.num_tokens[rows]
  if beyond.any():
    at = int(beyond.argmax())
    raise errors.BadStep(
      f"rows {starts[at]}..{ends[at] - 1} asked of a sequence of"
      f" {state.rows.num_tokens[rows[at]]} tokens"
    )


def _demand(
  state: state_lib.State,
  group: int,
  rows: np.ndarray,
  writes: np.ndarray,
  ends: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Pages that one group must find (R5).

  Returns:
    Members whose last page must be copied; then, for each fresh page, its
    member and its column in the table.
  """
  pool, arrays = state.pools[group], state.rows
  size = pool.page_size
  have = -(-writes // size)
  fresh = -(-ends // size) - have
  members = np.repeat(np.arange(len(rows)), fresh)
  columns = have[members]
  if len(members) and fresh.max() > 1:
    columns = columns + np.arange(len(members))
    columns -= (np.cumsum(fresh) - fresh)[members]
  offsets = writes % size
  suspects = (offsets > 0) & (ends > writes) & ~arrays.private[rows]
  if not suspects.any():
    return _NONE, members, columns
  inside = np.flatnonzero(suspects)
  at, offsets = rows[inside], offsets[inside]
  pages = arrays.tables[group][at, writes[inside] // size]
  alone = (
    (arrays.leased[group][at] == 0)
    & (pool.references[pages] == 1)
    & (pool.valid_rows[pages] <= offsets)
  )
  return inside[~alone], members, columns


def _make_room(state: state_lib.State, needed: list[int]) -> None:
  """Evicts so that every pool has what is needed free, or refuses.

  Eviction is an epoch of its own and stays, whatever becomes of the step.
  """
  shortage = [
    max(need - pool.num_free, 0)
    for need, pool in zip(needed, state.pools, strict=True)
  ]
  if not any(shortage):
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
  state.index.evict(shortage)
  state.epoch += 1
  state.phase("plan.evicted")


def _group_plan(
  state: state_lib.State,
  group: int,
  rows: np.ndarray,
  writes: np.ndarray,
  copied: np.ndarray,
  members: np.ndarray,
  columns: np.ndarray,
) -> steps.GroupPlan:
  pool = state.pools[group]
  pages = pool.take(len(copied) + len(members))
  if not len(copied):
    return steps.GroupPlan(members, columns, pages, _NONE, _NONE)
  tails = writes[copied] // pool.page_size
  return steps.GroupPlan(
    members=np.concatenate([copied, members]),
    columns=np.concatenate([tails, columns]),
    pages=pages,
    copy_sources=state.rows.tables[group][rows[copied], tails],
    copy_rows=writes[copied] % pool.page_size,
  )
