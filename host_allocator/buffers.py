"""Packed buffers of a batch in stride, brought up to date and lent again.

Nearly all of a decode step's buffer is page tables, and of these only the
entries of pages just begun are new.  So a buffer that nobody holds any more is
brought up to date, instead of gathering every table once more.

What was handed out never changes while it can be seen: who still has it, or a
view of it, or a device array that aliases it or is being copied from it, holds
a reference to the array.  Such a buffer is left alone.
"""

import collections
import sys

import numpy as np

from host_allocator import tables

_MOST_BUFFERS = 3  # One to fill, one to upload, one that a step reads.
_Step = list[tables.GroupPlan]


class _Lent:
  """A buffer and the number of the last step whose pages are in it."""

  __slots__ = ("array", "packing", "step")

  def __init__(self, array: np.ndarray, packing: tables.Packing, step: int):
    self.array = array
    self.packing = packing
    self.step = step

  def num_holders(self) -> int:
    """References to the array, this one and the count itself included."""
    return sys.getrefcount(self.array)


_NO_HOLDERS = _Lent(
  np.zeros(0, np.int32), tables.Packing(tables.StepShape(1, 1), ()), 0
).num_holders()


class Buffers:
  """The last few buffers of one stride, and the pages of its last steps."""

  def __init__(self) -> None:
    self._lent: collections.deque[_Lent] = collections.deque(
      maxlen=_MOST_BUFFERS
    )
    self._steps: collections.deque[_Step] = collections.deque(
      maxlen=_MOST_BUFFERS
    )
    self._num_steps = 0

  def note(self, step: _Step) -> None:
    """Remembers the table entries of a step that has been planned.

    One that is aborted needs no undo: the next one writes the same entries.
    """
    self._steps.append(step)
    self._num_steps += 1

  def lend(self, packing: tables.Packing) -> np.ndarray | None:
    """A buffer whose page tables are those of the last step noted.

    Returns:
      int32 `[packing.size]`, with the tokens and positions of an older step;
      None where every buffer is held, or too old.
    """
    for lent in self._lent:
      missed = self._num_steps - lent.step
      if (
        lent.packing is packing
        and missed <= len(self._steps)
        and lent.num_holders() == _NO_HOLDERS
      ):
        for i in range(len(self._steps) - missed, len(self._steps)):
          for group, part in enumerate(self._steps[i]):
            packing.enter(lent.array, group, part)
        lent.step = self._num_steps
        return lent.array
    return None

  def keep(self, packing: tables.Packing, array: np.ndarray) -> None:
    """Takes in a buffer that has just been filled for the last step noted."""
    self._lent.append(_Lent(array, packing, self._num_steps))
