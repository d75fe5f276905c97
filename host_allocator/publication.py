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
  rows = state.rows
  # A lease taken since the step was planned ends a last page's privacy, too.
  plan.has_shared = bool(
    np.count_nonzero(rows.private[plan.rows]) < len(plan.rows)
  )
  for group, (pool, part) in enumerate(
    zip(state.pools, plan.groups, strict=True)
  ):
    if plan.has_shared:
      _make_private(state, plan, group)
    if len(part.pages):
      pool.commit(part.pages)
      at = plan.rows[part.members]
      rows.set_pages_at(group, at, part.columns, part.pages)
  if any(part.num_copies for part in plan.groups):
    # One new version, however many groups copied.
    copied = [part.members[: part.num_copies] for part in plan.groups]
    rows.versions[plan.rows[np.unique(np.concatenate(copied))]] += 1
  rows.length[plan.rows] = plan.ends
  rows.present[plan.rows] = plan.ends
  if plan.has_hidden:  # Who wrote nothing still shares its last page.
    rows.private[plan.rows[plan.ends > plan.writes]] = True
  else:
    rows.private[plan.rows] = True
  return _publish_prefixes(state, plan)


def _make_private(
  state: state_lib.State, plan: steps.StepPlan, group: int
) -> None:
  """Takes over the last pages that stay, and lets go those that were copied."""
  rows, pool, part = state.rows, state.pools[group], plan.groups[group]
  members, _, pages = steps.shared_tails(plan, rows, group)
  if not len(members):
    return
  copied = part.members[: part.num_copies]
  kept = np.ones(len(members), np.bool_)
  kept[members.searchsorted(copied)] = False  # Both ascend.
  pool.valid_rows[pages[kept]] = pool.page_size
  for member, source in zip(copied.tolist(), part.copy_sources, strict=True):
    sequence = plan.sequences[member]
    row = sequence.row
    state.index.detach(sequence)
    if rows.leased[group][row]:
      rows.leased[group][row] = 0
      pool.unlease(np.array([source]))
    else:
      pool.drop(np.array([source]))
    sequence.lease_node = None


def _publish_prefixes(
  state: state_lib.State, plan: steps.StepPlan
) -> list[int]:
  """Puts new rows into the index: prompts to the token, then whole bundles."""
  released = [0] * len(state.pools)
  rows = plan.rows
  if plan.is_decode:
    due = (plan.ends % state.bundle == 0).nonzero()[0]
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
