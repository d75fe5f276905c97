"""Making a step's outcome visible, in one go.

Nothing here can be refused: whatever could fail has been checked when the step
was planned.
"""

import numpy as np

from host_allocator import pages as pages_lib
from host_allocator import state as state_lib
from host_allocator import steps


def publish(state: state_lib.State, plan: steps.StepPlan) -> list[int]:
  """Writes tables, counts, lengths and index entries of a step.

  Returns:
    Duplicate pages let go, per group (R11).
  """
  for group, (pool, part) in enumerate(
    zip(state.pools, plan.groups, strict=True)
  ):
    if part.num_copies:
      _replace_copied(state, plan, group)
    if len(part.pages):
      pool.commit(part.pages)
      state.rows.set_pages_at(
        group, plan.rows[part.members], part.columns, part.pages
      )
    _mark_valid(state, plan, group)
  state.rows.length[plan.rows] = plan.ends
  state.rows.present[plan.rows] = plan.ends
  if plan.has_hidden:  # Who wrote nothing still shares its last page.
    state.rows.private[plan.rows[plan.ends > plan.writes]] = True
  else:
    state.rows.private[plan.rows] = True
  return _publish_prefixes(state, plan)


def _replace_copied(
  state: state_lib.State, plan: steps.StepPlan, group: int
) -> None:
  """Lets the pages go that have been copied, and what was leased for it."""
  rows, pool, part = state.rows, state.pools[group], plan.groups[group]
  for member, source in zip(
    part.members[: part.num_copies].tolist(), part.copy_sources, strict=True
  ):
    sequence = plan.sequences[member]
    row = sequence.row
    state.index.detach(sequence)
    if rows.leased[group][row]:
      rows.leased[group][row] = 0
      pool.unlease(np.array([source]))
    else:
      pool.drop(np.array([source]))
    rows.versions[row] += 1
    sequence.lease_node = None


def _mark_valid(
  state: state_lib.State, plan: steps.StepPlan, group: int
) -> None:
  """Writes down the valid rows of every page that the step filled.

  The last pages are private from now on, and theirs need no writing down.
  """
  pool = state.pools[group]
  size = pool.page_size
  if plan.is_decode:
    filled = np.flatnonzero(plan.ends % size == 0)
    if len(filled):
      columns = plan.ends[filled] // size - 1
      pages = state.rows.pages_at(group, plan.rows[filled], columns)
      pool.valid_rows[pages] = size
    return
  for row, start, stop in zip(
    plan.rows.tolist(),
    (plan.writes // size).tolist(),
    (plan.ends // size).tolist(),
    strict=True,
  ):
    pool.valid_rows[state.rows.table_rows[group][row][start:stop]] = size


def _publish_prefixes(
  state: state_lib.State, plan: steps.StepPlan
) -> list[int]:
  """Puts new rows into the index: prompts to the token, then whole bundles."""
  released = [0] * len(state.pools)
  rows = plan.rows
  if plan.is_decode:
    due = np.flatnonzero(plan.ends % state.bundle == 0)
    if len(due):
      growing = state.rows.growing[rows[due]]
      fast = due[growing]
      if len(fast):
        state.index.grow(rows[fast], plan.ends[fast])
        due = due[~growing]
  else:
    due = np.arange(len(rows))
  for member in due.tolist():
    stop = int(plan.ends[member])
    if plan.counts[member] == 1:
      stop -= stop % state.bundle
    counts = state.index.insert(plan.sequences[member], stop)
    if counts:  # an index that keeps nothing has nothing to count
      released = [a + b for a, b in zip(released, counts, strict=True)]
  return released


def pending(state: state_lib.State, plan: steps.StepPlan, group: int) -> int:
  """Pages that only cancelled members of a step hold."""
  held: dict[int, int] = {}
  for sequence in plan.cancelled:
    for page in state.rows.pages(sequence.row, group).tolist():
      held[page] = held.get(page, 0) + 1
  pool = state.pools[group]
  return sum(
    pool.references[page] + pool.leases[page] == count
    for page, count in held.items()
  )


def usage(state: state_lib.State) -> tuple[pages_lib.PoolUsage, ...]:
  """The partition of every pool."""
  plan = state.open_plan
  return tuple(
    pool.usage(pending(state, plan, group) if plan is not None else 0)
    for group, pool in enumerate(state.pools)
  )
