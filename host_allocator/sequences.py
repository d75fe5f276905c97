"""What a caller holds: a sequence, and a batch of them.

Their data lies in the arrays of `sequence_rows.SequenceRows`.
"""

from typing import Any
from typing import TYPE_CHECKING

import numpy as np

from host_allocator import arguments
from host_allocator import errors
from host_allocator import receipts
from host_allocator import strides

if TYPE_CHECKING:
  from host_allocator import sequence_rows


class Sequence:
  """An open sequence: what its caller holds.

  A handle stays bound to its allocator and its (row, generation).  Every other
  allocator refuses it; once closed it is refused everywhere, also after its row
  has been given to another sequence.  What it is asked for it answers under the
  allocator's lock, and by copies.

  Attributes:
    generation: Of the row; raised when a sequence is opened in it and when it
      is closed, so that it is the row's own only while the sequence is open.
    matched_tokens: Rows that were there when it was opened.
    receipt: What the prefix match at opening proved.
    priority: Larger is kept longer by the "priority" eviction policy.
  """

  __slots__ = (
    "_rows",
    "generation",
    "lease_node",
    "lost",
    "matched_tokens",
    "node",
    "priority",
    "receipt",
    "root",
    "row_or_closed",
    "want_logits",
  )

  def __init__(
    self, rows: "sequence_rows.SequenceRows", row: int, generation: int
  ):
    self._rows = rows
    self.row_or_closed = row
    self.generation = generation
    self.matched_tokens = 0
    self.receipt: receipts.PrefixMatchReceipt | None = None
    self.priority = 0
    self.want_logits = True
    self.lost = False
    # Where its published rows end in the index, and what it leases there.
    self.root: Any = None
    self.node: Any = None
    self.lease_node: Any = None

  def __repr__(self) -> str:
    with self._rows.lock:
      if not self.is_open:
        return f"Sequence(closed, generation={self.generation})"
      return (
        f"Sequence(row={self.row}, generation={self.generation},"
        f" length={self.length}, num_tokens={self.num_tokens})"
      )

  @property
  def is_open(self) -> bool:
    """Whether it still holds its row."""
    return self.row_or_closed >= 0

  @property
  def row(self) -> int:
    """Its row in the tables, 0..max_sequences-1."""
    row = self.row_or_closed  # Read once: it may be closed meanwhile.
    if row < 0:
      if self.lost:
        raise errors.DeviceLost(
          f"the device pages of sequence generation {self.generation} are gone"
        )
      raise errors.SequenceClosed(
        f"sequence generation {self.generation} is closed"
      )
    return row

  @property
  def num_tokens(self) -> int:
    """Tokens known."""
    with self._rows.lock:
      return int(self._rows.num_tokens[self.row])

  @property
  def length(self) -> int:
    """Rows computed and committed."""
    with self._rows.lock:
      return int(self._rows.length[self.row])

  @property
  def tokens(self) -> np.ndarray:
    """The known tokens, int32, a read-only copy."""
    with self._rows.lock:
      row = self.row
      tokens = self._rows.tokens[row, : self._rows.num_tokens[row]].copy()
    tokens.flags.writeable = False
    return tokens

  @property
  def table_version(self) -> int:
    """Raised whenever its page table changes other than by growth."""
    with self._rows.lock:
      return int(self._rows.versions[self.row])

  def pages(self, group: int = 0) -> np.ndarray:
    """A copy of its page table in one group, without padding.

    Raises:
      BadHandle: No such group.
      SequenceClosed, DeviceLost.
    """
    last = len(self._rows.tables) - 1
    group = arguments.whole("group", group, 0, last, errors.BadHandle)
    with self._rows.lock:
      return self._rows.pages(self.row, group).copy()


class Batch:
  """Open, distinct sequences, checked once and used for many steps.

  `KVAllocator.batch` makes one; it is refused once a member has been closed.

  Attributes:
    owner: The arrays that its rows index.
    sequences: The members.
    rows: intp `[n]`, their rows.
    generations: int64 `[n]`, their generations.
    ones: int32 `[n]`, a row each: what a decode step computes.
    checked_at: `num_closed` when they were last seen to be open.
    stride: Of its decode steps; counts only while it is the rows' stride.
  """

  __slots__ = (
    "checked_at",
    "generations",
    "ones",
    "owner",
    "rows",
    "sequences",
    "stride",
  )

  def __init__(
    self,
    owner: "sequence_rows.SequenceRows",
    sequences: tuple[Sequence, ...],
    rows: np.ndarray,
    ones: np.ndarray,
  ):
    self.owner = owner
    self.sequences = sequences
    self.rows = rows
    self.generations = owner.generations[rows]
    self.ones = ones
    self.checked_at = owner.num_closed
    self.stride: strides.Stride | None = None
