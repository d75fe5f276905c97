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

import numpy as np

from host_allocator import errors
from host_allocator import sequences as sequences_lib
from host_allocator import tables


@dataclasses.dataclass(frozen=True, slots=True)
class GroupPlan:
  """What one cache group contributes to a step.

  `members`, `columns` and `pages` are the table entries that commit will write:
  first the copies' destinations, then the fresh pages.
  """

  members: np.ndarray  # int32 [m], indices into the batch
  columns: np.ndarray  # int32 [m]
  pages: np.ndarray  # int32 [m], reserved
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
    rows: int32 `[n]`, their rows.
    starts: int32 `[n]`, first row each computes.
    counts: int32 `[n]`, rows each computes.
    ends: int32 `[n]`, `starts + counts`.
    writes: int32 `[n]`, first row each writes to a page.
    groups: Per cache group.
    num_tokens: Rows computed in all.
    has_hidden: Whether a row is computed that is not written: see above.
    cancelled: Members to be closed when the step ends.
  """

  sequences: tuple[sequences_lib.Sequence, ...]
  rows: np.ndarray
  starts: np.ndarray
  counts: np.ndarray
  ends: np.ndarray
  writes: np.ndarray
  groups: tuple[GroupPlan, ...]
  num_tokens: int
  has_hidden: bool
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
      (group.copy_sources, group.pages[: group.num_copies], group.copy_rows)
      for group in self.groups
    )


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
  num_sequences, num_tokens = len(plan.rows), plan.num_tokens
  _check_fits(plan, rows, packing)
  buffer = np.empty(packing.size, np.int32)
  if num_tokens == num_sequences:
    member, positions = slice(None), plan.starts
  else:
    member = np.repeat(np.arange(num_sequences, dtype=np.int32), plan.counts)
    first = np.cumsum(plan.counts, dtype=np.int32) - plan.counts
    positions = np.arange(num_tokens, dtype=np.int32)
    positions += (plan.starts - first)[member]
  token_rows = plan.rows[member]
  _fill(packing, buffer, "tokens", rows.tokens[token_rows, positions])
  _fill(packing, buffer, "positions", positions)
  sequence_rows = packing.field(buffer, "sequence_rows")
  sequence_rows[num_tokens:] = packing.shape.num_sequences
  if num_tokens == num_sequences:
    sequence_rows[:num_tokens] = np.arange(num_tokens)
  else:
    sequence_rows[:num_tokens] = member
  _fill(packing, buffer, "context_lens", plan.ends)
  query_starts = packing.field(buffer, "query_starts")
  query_starts[0] = 0
  np.cumsum(plan.counts, out=query_starts[1 : num_sequences + 1])
  query_starts[num_sequences + 1 :] = num_tokens
  _fill(packing, buffer, "logit_rows", query_starts[1 : num_sequences + 1] - 1)
  hidden = None
  if plan.has_hidden:
    hidden = positions < plan.writes[member]
  for index, group in enumerate(plan.groups):
    table = packing.field(buffer, "page_table", index)
    np.take(
      rows.tables[index],
      plan.rows,
      axis=0,
      out=table[:num_sequences],
      mode="clip",
    )
    table[num_sequences:] = 0
    table[group.members, group.columns] = group.pages
    page_size = rows.page_sizes[index]
    columns = positions // page_size
    if num_tokens == num_sequences:
      pages = table[np.arange(num_sequences), columns]
    else:
      pages = table[member, columns]
    slots = pages * page_size + (positions - columns * page_size)
    if hidden is not None:
      slots[hidden] = 0
    _fill(packing, buffer, "slots", slots, index)
  return buffer


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
  widths = tuple(table.shape[1] for table in rows.tables)
  if packing.table_widths != widths:
    raise errors.LayoutError(
      f"table widths {packing.table_widths} are not the cache's {widths}"
    )


def _fill(
  packing: tables.Packing,
  buffer: np.ndarray,
  name: str,
  values: np.ndarray,
  group: int | None = None,
) -> None:
  field = packing.field(buffer, name, group)
  field[: len(values)] = values
  field[len(values) :] = 0
