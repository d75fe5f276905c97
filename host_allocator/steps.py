"""One step of a batch: what it will write, and its packed buffer.

    rows of one member      0        present           end
                            |---------|-----------------|
    already in its table    xxxxxxxxxxx
    computed by the step          ooooooooooooooooooooooo
                                  ^ start = length
    written to pages                  wwwwwwwwwwwwwwwwwww

`present` exceeds `length` by one row where a prompt was found whole: that row
is computed for its logits only, and written to the null page.
"""

import dataclasses
import functools

import numpy as np

from host_allocator import errors
from host_allocator import sequences as sequences_lib
from host_allocator import tables


@dataclasses.dataclass(eq=False, slots=True)
class GroupPlan:
  """What one cache group contributes to a step.

  `members`, `columns` and `pages` are the table entries that commit will write:
  first the copies' destinations, then the fresh pages.
  """

  members: np.ndarray  # intp [m], indices into the batch
  columns: np.ndarray  # [m]
  pages: np.ndarray  # intp [m], reserved
  copy_sources: np.ndarray  # int32 [c]
  copy_rows: np.ndarray  # int32 [c]

  @property
  def num_copies(self) -> int:
    """Pages copied."""
    return len(self.copy_sources)

  @property
  def num_copied_rows(self) -> int:
    """Rows copied."""
    return int(self.copy_rows.sum()) if len(self.copy_rows) else 0


@dataclasses.dataclass(eq=False, slots=True)
class StepPlan:
  """A reserved step: hand it to `pack`, then to `commit` or `abort`.

  Attributes:
    sequences: The members.
    rows: intp `[n]`, their rows.
    starts: int32 `[n]`, first row each computes.
    counts: int32 `[n]`, rows each computes.
    ends: int32 `[n]`, `starts + counts`.
    writes: int32 `[n]`, first row each writes to a page.
    num_tokens: Rows computed in all.
    groups: Per cache group.
    has_hidden: Whether a row is computed that is not written: see above.
    has_shared: Whether a member's last page may be somebody else's too.
    cancelled: Members to be closed when the step ends.
  """

  sequences: tuple[sequences_lib.Sequence, ...]
  rows: np.ndarray
  starts: np.ndarray
  counts: np.ndarray
  ends: np.ndarray
  writes: np.ndarray
  num_tokens: int
  groups: list[GroupPlan] = dataclasses.field(default_factory=list)
  has_hidden: bool = False
  has_shared: bool = False
  cancelled: list[sequences_lib.Sequence] = dataclasses.field(
    default_factory=list
  )

  @property
  def is_decode(self) -> bool:
    """Whether every member computes exactly one row."""
    return self.num_tokens == len(self.rows)

  @property
  def copies(self) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]:
    """Per group (source pages, destination pages, row counts), int32.

    Before the step's writes, rows `0 .. count - 1` of each source are copied. A
    destination is never a source.
    """
    return tuple(
      (
        group.copy_sources,
        group.pages[: group.num_copies].astype(np.int32),
        group.copy_rows,
      )
      for group in self.groups
    )


def shared_tails(
  plan: StepPlan, rows: sequences_lib.SequenceRows, group: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Members that write on in a page not known to be theirs alone.

  Returns:
    The members, their rows, and those pages.
  """
  size = rows.page_sizes[group]
  inside = (plan.writes % size != 0) & (plan.ends > plan.writes)
  members = (inside & ~rows.private[plan.rows]).nonzero()[0]
  at = plan.rows[members]
  return members, at, rows.pages_at(group, at, plan.writes[members] // size)


def pack(
  plan: StepPlan, rows: sequences_lib.SequenceRows, packing: tables.Packing
) -> np.ndarray:
  """Fills a fresh buffer with a step, as `tables.Packing` describes it.

  Args:
    plan: An open plan.
    rows: The arrays its rows index.
    packing: A shape that holds the step, and the cache's table widths.

  Returns:
    int32 `[packing.size]`; never reused, for `device_put` may alias it.

  Raises:
    ShapeOverflow: Where the step does not fit the shape.
    LayoutError: Where the widths are not the cache's.
  """
  _check_fits(plan, rows, packing)
  buffer = np.empty(packing.size, np.int32)
  num_sequences, slices = len(plan.rows), packing.slices
  if plan.is_decode:
    member, positions = np.arange(num_sequences), plan.starts
    head = _decode_head(packing, num_sequences)
    buffer[: len(head)] = head
  else:
    member, positions = _members(plan)
    _fill_ragged(packing, buffer, plan, member)
  count = len(member)
  buffer[slices["tokens", None]][:count] = rows.tokens_at(
    plan.rows if plan.is_decode else plan.rows[member], positions
  )
  buffer[slices["positions", None]][:count] = positions
  buffer[slices["context_lens", None]][:num_sequences] = plan.ends
  for index, group in enumerate(plan.groups):
    table = packing.field(buffer, "page_table", index)
    _fill_table(table, rows.tables[index], plan, group)
    page_size = rows.page_sizes[index]
    # Rows of a C-ordered table, by one flat index.
    pages = table.reshape(-1)[member * table.shape[1] + positions // page_size]
    slots = buffer[slices["slots", index]]
    slots[count:] = 0
    np.add(pages * page_size, positions % page_size, out=slots[:count])
    if plan.has_hidden:
      slots[:count][positions < plan.writes[member]] = 0
  return buffer


@functools.lru_cache(maxsize=256)
def _decode_head(packing: tables.Packing, num_sequences: int) -> np.ndarray:
  """What every decode step of so many sequences says before its tables.

  All that is left to fill in are tokens, positions and context lengths.
  """
  first_table = packing.offsets["slots", 0]
  head = np.zeros(first_table, np.int32)
  order = np.arange(num_sequences, dtype=np.int32)
  _fill(packing, head, "sequence_rows", order, packing.shape.num_sequences)
  _fill(packing, head, "query_starts", order, num_sequences)
  _fill(packing, head, "logit_rows", order, 0)
  head.flags.writeable = False
  return head


def _fill_ragged(
  packing: tables.Packing,
  buffer: np.ndarray,
  plan: StepPlan,
  member: np.ndarray,
) -> None:
  """Fills what depends on how many rows each sequence computes."""
  buffer[: packing.offsets["slots", 0]] = 0
  starts = np.concatenate([[0], plan.counts.cumsum()])
  _fill(packing, buffer, "sequence_rows", member, packing.shape.num_sequences)
  _fill(packing, buffer, "query_starts", starts, plan.num_tokens)
  _fill(packing, buffer, "logit_rows", starts[1:] - 1, 0)


def _fill(
  packing: tables.Packing,
  buffer: np.ndarray,
  name: str,
  values: np.ndarray,
  padding: int,
) -> None:
  field = buffer[packing.slices[name, None]]
  field[: len(values)] = values
  field[len(values) :] = padding


def _members(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
  """Of each token row, its sequence's place in the batch and its position."""
  member = np.arange(len(plan.rows)).repeat(plan.counts)
  first = plan.counts.cumsum() - plan.counts
  return member, np.arange(plan.num_tokens) + (plan.starts - first)[member]


def _fill_table(
  table: np.ndarray, rows: np.ndarray, plan: StepPlan, group: GroupPlan
) -> None:
  """Gathers the members' rows and puts in what the step has reserved."""
  count = len(plan.rows)
  np.take(rows, plan.rows, axis=0, out=table[:count], mode="clip")
  table[count:] = 0
  if len(group.pages):
    table[group.members, group.columns] = group.pages


def _check_fits(
  plan: StepPlan, rows: sequences_lib.SequenceRows, packing: tables.Packing
) -> None:
  shape = packing.shape
  num_sequences = len(plan.rows)
  if num_sequences > shape.num_sequences or plan.num_tokens > shape.num_tokens:
    raise errors.ShapeOverflow(
      f"{plan.num_tokens} tokens of {num_sequences} sequences do not fit"
      f" {shape}"
    )
  if shape.is_decode and plan.num_tokens != num_sequences:
    raise errors.ShapeOverflow(
      f"{plan.num_tokens} tokens of {num_sequences} sequences do not fit the"
      f" decode shape {shape}"
    )
  if packing.table_widths != rows.table_widths:
    raise errors.LayoutError(
      f"table widths {packing.table_widths} are not the cache's"
      f" {rows.table_widths}"
    )
