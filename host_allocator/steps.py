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

from host_allocator import buffers
from host_allocator import errors
from host_allocator import sequence_rows
from host_allocator import sequences as sequences_lib
from host_allocator import strides
from host_allocator import tables


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
    stride: Of the batch, where it was in stride when this was planned.
    has_hidden: Whether a row is computed that is not written: see above.
    has_shared: Whether a member's last page may be somebody else's too.
    groups: Per cache group.
    cancelled: Members to be closed when the step ends.
  """

  sequences: tuple[sequences_lib.Sequence, ...]
  rows: np.ndarray
  starts: np.ndarray
  counts: np.ndarray
  ends: np.ndarray
  writes: np.ndarray
  num_tokens: int
  stride: strides.Stride | None = None
  has_hidden: bool = False
  has_shared: bool = False
  groups: list[tables.GroupPlan] = dataclasses.field(default_factory=list)
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


def has_tails(plan: StepPlan, bundle: int) -> bool:
  """Whether a member may write on in a page that is partly filled.

  One that is full is written by nobody, whoever shares it.
  """
  return bool(np.count_nonzero(plan.writes % bundle))


def shared_tails(
  plan: StepPlan, rows: sequence_rows.SequenceRows, group: int
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
  plan: StepPlan, rows: sequence_rows.SequenceRows, packing: tables.Packing
) -> np.ndarray:
  """Fills a buffer with a step, as `tables.Packing` describes it.

  Args:
    plan: An open plan.
    rows: The arrays its rows index.
    packing: A shape that holds the step, and the cache's table widths.

  Returns:
    int32 `[packing.size]`; not written to again while anybody holds it, or a
    view of it, for `device_put` may alias it.

  Raises:
    ShapeOverflow: Where the step does not fit the shape.
    LayoutError: Where it is none, or its widths are not the cache's.
  """
  _check_fits(plan, rows, packing)
  stride = plan.stride if plan.stride is rows.stride else None
  if plan.is_decode:
    buffer = _decode_buffer(plan, rows, packing, stride)
    member, positions = np.arange(len(plan.rows)), plan.starts
    if stride is not None:
      tokens = rows.tokens_in(stride.token_places)
    else:
      tokens = rows.tokens_at(plan.rows, positions)
  else:
    buffer = np.empty(packing.size, np.int32)
    member, positions = _members(plan)
    _fill_ragged(packing, buffer, plan, member)
    _fill_tables(packing, buffer, plan, rows)
    tokens = rows.tokens_at(plan.rows[member], positions)
  count, slices = len(member), packing.slices
  buffer[slices["tokens", None]][:count] = tokens
  buffer[slices["positions", None]][:count] = positions
  buffer[slices["context_lens", None]][: len(plan.rows)] = plan.ends
  for group, size in enumerate(rows.page_sizes):
    slots = buffer[slices["slots", group]]
    slots[count:] = 0
    known = None
    if stride is not None:
      known = stride.next_slots(group, size, plan.groups[group])
    if known is None:
      table = packing.field(buffer, "page_table", group)
      known = _slots(table, member, positions, size)
      if plan.has_hidden:
        known[positions < plan.writes[member]] = 0
      if stride is not None:
        stride.keep_slots(group, known)
    slots[:count] = known
  return buffer


def _slots(
  table: np.ndarray, member: np.ndarray, positions: np.ndarray, page_size: int
) -> np.ndarray:
  """Where the row at each position of each member goes, int32."""
  columns, offsets = np.divmod(positions, page_size)
  # Rows of a C-ordered table, by one flat index.
  pages = table.reshape(-1)[member * table.shape[1] + columns]
  return pages * page_size + offsets


def _decode_buffer(
  plan: StepPlan,
  rows: sequence_rows.SequenceRows,
  packing: tables.Packing,
  stride: strides.Stride | None,
) -> np.ndarray:
  """A buffer with the step's page tables, and what no decode step changes."""
  if stride is not None and stride.buffers is not None:
    lent = stride.buffers.lend(packing)
    if lent is not None:
      return lent
  buffer = np.empty(packing.size, np.int32)
  head = _decode_head(packing, len(plan.rows))
  buffer[: len(head)] = head
  _fill_tables(packing, buffer, plan, rows)
  if stride is not None:
    if stride.buffers is None:
      stride.buffers = buffers.Buffers()
    stride.buffers.keep(packing, buffer)
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


def _fill_tables(
  packing: tables.Packing,
  buffer: np.ndarray,
  plan: StepPlan,
  rows: sequence_rows.SequenceRows,
) -> None:
  """Gathers the members' tables and puts in what the step has reserved."""
  count = len(plan.rows)
  for group, part in enumerate(plan.groups):
    table = packing.field(buffer, "page_table", group)
    np.take(
      rows.tables[group], plan.rows, axis=0, out=table[:count], mode="clip"
    )
    table[count:] = 0
    packing.enter(buffer, group, part)


def _check_fits(
  plan: StepPlan, rows: sequence_rows.SequenceRows, packing: tables.Packing
) -> None:
  if not isinstance(packing, tables.Packing):
    raise errors.LayoutError(f"{packing!r} is not a Packing")
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
