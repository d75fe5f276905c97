"""A batch that decodes step after step: what repeats is not looked up again.

While nobody else changes its sequences, each step of a batch adds one row to
every member.  So lengths and places in the token rows only rise by one, and the
members that begin a page come round again every `page_size` steps.  Such a
batch is *in stride*; whatever else changes any sequence breaks the stride, and
the next append looks everything up and begins a new one.
"""

import numpy as np

from host_allocator import buffers
from host_allocator import tables


class Stride:
  """Where the members of a batch stand: lengths, known tokens, full pages.

  Every member's last page is its own, it shows the rows that were computed and
  no others, and knows as many tokens, or one more where `is_ahead`.

  Attributes:
    rows: intp `[n]`, the members' rows.
    lengths: int32 `[n]`, rows computed; replaced by each step, not written to.
    next_lengths: int32 `[n]`, one more of each.
    is_ahead: Whether each knows a token more than it has rows.
    token_places: intp `[n]`, where that token is in the flat token rows.
    spare: How many tokens more the longest member has room for.
    buffers: Packed buffers of the last steps, if they are packed.
  """

  __slots__ = (
    "_full",
    "_num_steps",
    "_ones",
    "_slots",
    "buffers",
    "is_ahead",
    "lengths",
    "next_lengths",
    "rows",
    "spare",
    "token_places",
  )

  def __init__(
    self,
    rows: np.ndarray,
    lengths: np.ndarray,
    ones: np.ndarray,
    token_places: np.ndarray,
    spare: int,
  ) -> None:
    """Begins a stride in which every member is one token ahead."""
    self.rows = rows
    self.lengths = lengths
    self.next_lengths = lengths + ones
    self.is_ahead = True
    self.token_places = token_places
    self.spare = spare
    self.buffers: buffers.Buffers | None = None
    self._ones = ones
    self._num_steps = 0
    self._full: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
    self._slots: dict[int, tuple[int, np.ndarray]] = {}

  def append(self) -> bool:
    """Makes each member know one token more, which goes to `token_places`.

    Returns:
      False where a member knows one more already or has no room for it.
    """
    if self.is_ahead or not self.spare:
      return False
    self.spare -= 1
    self.is_ahead = True
    return True

  def step(self) -> None:
    """Counts a step that has been committed."""
    self.lengths = self.next_lengths
    self.next_lengths = self.lengths + self._ones
    self.is_ahead = False
    self._num_steps += 1
    self.token_places += self._ones

  def full(self, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Members whose length is a multiple of `size`, and their rows; intp."""
    key = size, self._num_steps % size
    found = self._full.get(key)
    if found is None:
      members = (self.lengths % size == 0).nonzero()[0]
      found = self._full[key] = members, self.rows[members]
    return found

  def next_slots(
    self, group: int, page_size: int, part: tables.GroupPlan
  ) -> np.ndarray | None:
    """The slots of the next rows, from those of the rows before.

    Returns:
      int32 `[n]`, not to be written to; None where those were not kept.
    """
    step, slots = self._slots.get(group, (-1, self._ones))
    if step != self._num_steps - 1 or step < 0:
      return None
    slots = slots + self._ones
    if len(part.pages):
      slots[part.members] = part.pages * page_size
    self._slots[group] = self._num_steps, slots
    return slots

  def keep_slots(self, group: int, slots: np.ndarray) -> None:
    """Takes the slots of the next rows, for the rows after them."""
    self._slots[group] = self._num_steps, slots
