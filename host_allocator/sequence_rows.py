"""One row of arrays for each open sequence.

Everything a step needs lies in them, so that planning, packing and committing a
batch are gathers and scatters, and Python touches single sequences only where
something other than growth happens.
"""

import threading
from collections.abc import Iterable

import numpy as np

from host_allocator import errors
from host_allocator import layout as layout_lib
from host_allocator import sequences as sequences_lib
from host_allocator import strides


class SequenceRows:
  """The arrays behind the open sequences, indexed by row.

  Attributes:
    lock: The allocator's, which whoever reads or changes them holds.
    tokens: int32 `[rows, max_length]`, the known tokens.
    tables: int32 `[rows, W]` per group, page ids in token order, then zeros.
    num_tokens: int32, tokens known.
    length: int32, rows computed and committed.
    present: int32, rows whose K/V the table shows: `length`, or one more where
      a prompt was found whole and its last row is computed for its logits only.
    published: int32, rows that this sequence has in the prefix index.
    growing: bool, the sequence owns the leaf at its published end, so that
      publishing more is only raising `published`.
    private: bool, the last page is held by nobody else and by no index further
      than `present`: the next row may be written in place. False says nothing.
    leased: int32 per group, the page it reads rows of by lease, or 0; that page
      is in its table too, and is copied before the next write.
    generations: int64, odd while the row is open.
    num_closed: sequences closed so far.
    stride: of the batch that changed lengths last, if nothing else has changed
      any row since; set it to None when changing anything.
    versions: int64, see `Sequence.table_version`.
    keys: per row, the int32 index keys of its tokens: the row of `tokens`, or a
      copy with side inputs put in.
    has_own_keys: bool, which rows' keys are such a copy.
    table_rows: per group and row, a view of the table's row.
  """

  def __init__(
    self, layout: layout_lib.CacheLayout, max_sequences: int, max_length: int
  ):
    self.lock = threading.RLock()
    self.max_sequences = max_sequences
    self.max_length = max_length
    self.page_sizes = tuple(group.page_size for group in layout.groups)
    self.tokens = np.zeros((max_sequences, max_length), np.int32)
    self.tables = tuple(
      np.zeros((max_sequences, width), np.int32)
      for width in layout.pages_for(max_length)
    )
    self.table_widths = layout.pages_for(max_length)
    self.num_tokens = np.zeros(max_sequences, np.int32)
    self.length = np.zeros(max_sequences, np.int32)
    self.present = np.zeros(max_sequences, np.int32)
    self.published = np.zeros(max_sequences, np.int32)
    self.growing = np.zeros(max_sequences, np.bool_)
    self.private = np.zeros(max_sequences, np.bool_)
    self.leased = tuple(
      np.zeros(max_sequences, np.int32) for _ in layout.groups
    )
    self.generations = np.zeros(max_sequences, np.int64)
    self.versions = np.zeros(max_sequences, np.int64)
    self.has_own_keys = np.zeros(max_sequences, np.bool_)
    self._num_own_keys = 0
    self._ones = np.ones(max_sequences, np.int32)
    self.num_closed = 0
    self.stride: strides.Stride | None = None
    self._flat_tokens = self.tokens.reshape(-1)
    self._flat_tables = tuple(table.reshape(-1) for table in self.tables)
    self.keys = list(self.tokens)
    self.table_rows = tuple(list(table) for table in self.tables)
    self.sequences: list[sequences_lib.Sequence | None] = [None] * max_sequences
    self._free = list(range(max_sequences))[::-1]

  @property
  def num_open(self) -> int:
    """Open sequences."""
    return self.max_sequences - len(self._free)

  def open_sequences(self) -> list[sequences_lib.Sequence]:
    """The open sequences by row."""
    return [sequence for sequence in self.sequences if sequence is not None]

  def row_of(self, sequence: sequences_lib.Sequence) -> int:
    """The row of an open sequence of this allocator.

    Raises:
      BadHandle: It is another allocator's, or none.
      SequenceClosed, DeviceLost.
    """
    if type(sequence) is not sequences_lib.Sequence:
      raise errors.BadHandle(f"{sequence!r} is not a sequence")
    if sequence._rows is not self:
      raise errors.BadHandle(  # Not its repr, for which its lock is needed.
        f"sequence generation {sequence.generation} is another allocator's"
      )
    return sequence.row

  def batch(
    self, members: Iterable[sequences_lib.Sequence]
  ) -> sequences_lib.Batch:
    """Checks that sequences are open, distinct and this allocator's.

    Raises:
      BadHandle, SequenceClosed, DeviceLost, BadStep.
    """
    try:
      sequences = tuple(members)
    except TypeError as error:
      raise errors.BadHandle(f"{members!r} is not a batch") from error
    try:
      numbers = [
        each.row_or_closed if each._rows is self else -1 for each in sequences
      ]
    except AttributeError:
      numbers = [-1]
    if -1 in numbers:
      _ = [self.row_of(each) for each in sequences]  # Raises for the bad one.
    if len(set(numbers)) < len(numbers):
      raise errors.BadStep("a sequence is named twice in one batch")
    ones = self._ones[: len(numbers)]
    return sequences_lib.Batch(
      self, sequences, np.array(numbers, np.intp), ones
    )

  def as_batch(
    self, members: Iterable[sequences_lib.Sequence] | sequences_lib.Batch
  ) -> sequences_lib.Batch:
    """A batch of sequences, or the one given, checked.

    Raises:
      BadHandle, SequenceClosed, DeviceLost, BadStep.
    """
    if isinstance(members, sequences_lib.Batch):
      self.check_batch(members)
      return members
    return self.batch(members)

  def check_batch(self, batch: sequences_lib.Batch) -> None:
    """Refuses a stranger's batch, and one with a member closed since.

    Raises:
      BadHandle, SequenceClosed, DeviceLost.
    """
    if batch.owner is not self:
      raise errors.BadHandle("the batch is another allocator's")
    if batch.checked_at == self.num_closed:
      return
    if np.count_nonzero(self.generations[batch.rows] != batch.generations):
      _ = [each.row for each in batch.sequences]  # Raises for the closed one.
    batch.checked_at = self.num_closed

  def take(self) -> sequences_lib.Sequence:
    """A new sequence in a free row.

    Raises:
      TooManySequences: Where there is none.
    """
    if not self._free:
      raise errors.TooManySequences(
        f"all max_sequences={self.max_sequences} rows are open"
      )
    row = self._free.pop()
    self.generations[row] += 1
    sequence = sequences_lib.Sequence(self, row, int(self.generations[row]))
    self.sequences[row] = sequence
    return sequence

  def give_back(self, sequence: sequences_lib.Sequence) -> None:
    """Closes a sequence's row; its pages have been dropped already."""
    row = sequence.row
    self.stride = None
    for group, table_rows in enumerate(self.table_rows):
      table_rows[row][: self.num_pages(row, group)] = 0
      self.leased[group][row] = 0
    self.num_tokens[row] = self.length[row] = 0
    self.present[row] = self.published[row] = 0
    self.growing[row] = self.private[row] = False
    self.generations[row] += 1
    self.num_closed += 1
    self.versions[row] = 0
    if self.has_own_keys[row]:
      self.keys[row] = self.tokens[row]
      self.has_own_keys[row] = False
      self._num_own_keys -= 1
    self.sequences[row] = None
    sequence.row_or_closed = -1
    sequence.root = sequence.node = sequence.lease_node = None
    self._free.append(row)

  def set_tokens(self, row: int, tokens: np.ndarray, keys: np.ndarray) -> None:
    """Makes a fresh row know its prompt."""
    self.tokens[row, : len(tokens)] = tokens
    self.num_tokens[row] = len(tokens)
    if keys is not tokens:
      self.give_own_keys(row, keys)

  def give_own_keys(self, row: int, keys: np.ndarray) -> None:
    """Sets index keys that are not the row's tokens."""
    self.keys[row] = np.empty(self.max_length, np.int32)
    self.keys[row][: len(keys)] = keys
    self.has_own_keys[row] = True
    self._num_own_keys += 1

  def append(
    self, rows: np.ndarray, tokens: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Makes each row know one token more than it knew.

    Returns:
      How many each knew, int32; and where the new ones are in all rows laid end
      to end, intp.

    Raises:
      PromptTooLong: Where a row is full; nothing was added.
    """
    known = self.num_tokens[rows]
    if len(known) and known[known.argmax()] >= self.max_length:
      raise errors.PromptTooLong(
        f"a sequence has max_length={self.max_length} tokens already"
      )
    self.stride = None
    # One flat index costs a quarter of a pair of indices.
    places = rows * self.max_length + known
    self._flat_tokens[places] = tokens
    self.num_tokens[rows] = known + 1
    if self._num_own_keys:
      self._append_keys(rows, known, tokens)
    return known, places

  def append_to_batch(
    self, batch: sequences_lib.Batch, tokens: np.ndarray
  ) -> None:
    """The same for a batch that is kept, and may come to be in stride."""
    rows, stride = batch.rows, batch.stride
    if stride is None or stride is not self.stride:
      known, places = self.append(rows, tokens)
      # Each must have computed all that it knew, in pages of its own.
      is_even = self.length[rows].tobytes() == known.tobytes()
      if len(rows) and is_even and self.are_private(rows):
        spare = self.max_length - int(known[known.argmax()]) - 1
        stride = strides.Stride(rows, known, batch.ones, places, spare)
        self.stride = batch.stride = stride
    elif stride.append():
      self._flat_tokens[stride.token_places] = tokens
      self.num_tokens[rows] = stride.next_lengths
      if self._num_own_keys:
        self._append_keys(rows, stride.lengths, tokens)
    else:
      self.append(rows, tokens)

  def are_private(self, rows: np.ndarray) -> bool:
    """Whether all of the rows are `private`."""
    return b"\0" not in self.private[rows].tobytes()

  def _append_keys(
    self, rows: np.ndarray, known: np.ndarray, tokens: np.ndarray
  ) -> None:
    """Appends to the keys that are not the rows' tokens themselves."""
    for i in np.flatnonzero(self.has_own_keys[rows]).tolist():
      self.keys[rows[i]][known[i]] = tokens[i]

  def tokens_at(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`tokens[rows, positions]`."""
    return self._flat_tokens[rows * self.max_length + positions]

  def tokens_in(self, places: np.ndarray) -> np.ndarray:
    """Tokens by their places in all rows laid end to end."""
    return self._flat_tokens[places]

  def pages_at(
    self, group: int, rows: np.ndarray, columns: np.ndarray
  ) -> np.ndarray:
    """`tables[group][rows, columns]`."""
    width = self.tables[group].shape[1]
    return self._flat_tables[group][rows * width + columns]

  def set_pages_at(
    self, group: int, rows: np.ndarray, columns: np.ndarray, pages: np.ndarray
  ) -> None:
    """`tables[group][rows, columns] = pages`."""
    width = self.tables[group].shape[1]
    self._flat_tables[group][rows * width + columns] = pages

  def num_pages(self, row: int, group: int) -> int:
    """Pages in a row's table of one group."""
    return -(-int(self.present[row]) // self.page_sizes[group])

  def pages(self, row: int, group: int) -> np.ndarray:
    """A row's page table in one group, without padding; a view."""
    return self.table_rows[group][row][: self.num_pages(row, group)]
