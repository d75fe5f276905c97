"""The ends of sequences and of steps, and the receipts for them."""

from host_allocator import holding
from host_allocator import matching
from host_allocator import receipts
from host_allocator import sequences
from host_allocator import state as state_lib
from host_allocator import steps


def close(
  state: state_lib.State, sequence: sequences.Sequence, outcome: str
) -> receipts.ReleaseReceipt:
  """Publishes what a sequence has computed, and drops all that it holds."""
  length = int(state.rows.length[sequence.row])
  generation = sequence.generation
  state.index.insert(sequence, length)
  dropped = holding.release(state, sequence)
  if state.side_input_keys.is_due:
    state.side_input_keys.forget_unused(matching.keys_in_use(state))
  return receipts.ReleaseReceipt(
    outcome, state.epoch, generation, length, dropped
  )


def close_cancelled(state: state_lib.State, plan: steps.StepPlan) -> None:
  """Ends the open step, and closes its members that were cancelled in it."""
  state.open_plan = None
  for sequence in plan.cancelled:
    close(state, sequence, "cancelled")


def step_receipt(
  state: state_lib.State,
  plan: steps.StepPlan,
  outcome: str,
  released: tuple[int, ...],
  before: str | None,
  after: str | None,
) -> receipts.StepReceipt:
  """The record of a step that was committed or aborted."""
  copied = tuple([group.num_copied_rows for group in plan.groups])
  return receipts.StepReceipt(
    outcome,
    state.epoch,
    plan.num_tokens,
    tuple([len(group.pages) for group in plan.groups]),
    copied,
    _copied_bytes(state, copied),
    released,
    before,
    after,
  )


def _copied_bytes(state: state_lib.State, copied: tuple[int, ...]) -> int:
  if not any(copied):
    return 0
  return sum(
    rows * group.row_bytes
    for rows, group in zip(copied, state.layout.groups, strict=True)
  )
