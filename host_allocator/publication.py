"""Making a step's outcome visible, in one go.

Nothing here can be refused: whatever could fail has been checked when the step
was planned.  First the tables, which decide what is visible; then the index,
without which it is only not found.
"""

import numpy as np

from host_allocator import pages as pages_lib
from host_allocator import sequences
from host_allocator import state as state_lib
from host_allocator import steps
from host_allocator import strides


def enter(state: state_lib.State, plan: steps.StepPlan) -> None:
  """Writes the tables, counts and lengths of a step.

  Where this is interrupted half of a step is visible, and nothing but
  `poison` makes it good.
  """
  rows = state.rows
  if plan.stride is not None and plan.stride is rows.stride:
    _enter_in_stride(state, plan, plan.stride)
    return
  rows.stride = None
  # A lease taken since the step was planned ends a last page's privacy, too.
  if not plan.has_shared and not rows.are_private(plan.rows):
    plan.has_shared = steps.has_tails(plan, state.bundle)
  for group in range(len(state.pools)):
    if plan.has_shared:
      _make_private(state, plan, group)
    _enter_pages(state, plan, group)
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


def _enter_in_stride(
  state: state_lib.State, plan: steps.StepPlan, stride: strides.Stride
) -> None:
  """The same where every member gets a row in a last page of its own."""
  rows = state.rows
  for group in range(len(state.pools)):
    _enter_pages(state, plan, group)
  rows.length[plan.rows] = plan.ends
  rows.present[plan.rows] = plan.ends
  stride.step()


def _enter_pages(
  state: state_lib.State, plan: steps.StepPlan, group: int
) -> None:
  """Puts the step's pages of one group into the tables."""
  state.phase("commit.entering")
  part = plan.groups[group]
  if len(part.pages):
    state.pools[group].commit(part.pages)
    state.rows.set_pages_at(
      group, plan.rows[part.members], part.columns, part.pages
    )


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


def publish(
  state: state_lib.State, plan: steps.StepPlan, released: list[int]
) -> None:
  """Puts new rows into the index: prompts to the token, then whole bundles.

  Args:
    state: Where the step has been entered.
    plan: The step.
    released: Gets the duplicate pages let go added, per group (R11).
  """
  stride = plan.stride
  if stride is not None and stride is state.rows.stride:
    members, at = stride.full(state.bundle)
    _publish_bundles(state, plan, members, at, released)
    return
  if plan.is_decode:
    members = (plan.ends % state.bundle == 0).nonzero()[0]
    _publish_bundles(state, plan, members, plan.rows[members], released)
    return
  for sequence, count, end in zip(
    plan.sequences, plan.counts.tolist(), plan.ends.tolist(), strict=True
  ):
    stop = end if count > 1 else end - end % state.bundle
    _insert(state, sequence, stop, released)


def _publish_bundles(
  state: state_lib.State,
  plan: steps.StepPlan,
  members: np.ndarray,
  rows: np.ndarray,
  released: list[int],
) -> None:
  """Puts the bundles into the index that some members have just completed."""
  if not len(members):
    return
  growing = state.rows.growing[rows]
  if b"\0" not in growing.tobytes():
    state.index.grow(rows, plan.ends[members])
    return
  if b"\1" in growing.tobytes():
    state.index.grow(rows[growing], plan.ends[members[growing]])
    members = members[~growing]
  for member in members.tolist():
    _insert(state, plan.sequences[member], int(plan.ends[member]), released)


def _insert(
  state: state_lib.State,
  sequence: sequences.Sequence,
  num_tokens: int,
  released: list[int],
) -> None:
  """Publishes one sequence, and counts the duplicates let go."""
  state.phase("commit.indexing")
  for group, count in enumerate(state.index.insert(sequence, num_tokens)):
    released[group] += count


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
