"""The packed buffer of a step: one description for both of its sides.

A step goes to the device as one flat int32 buffer.  `Packing` says where each
field lies in it, with slices and reshapes only, so that the host fills a NumPy
buffer and a jitted function reads a JAX one through the same object::

    tokens[T] positions[T] sequence_rows[T]
    context_lens[S] query_starts[S + 1] logit_rows[S]
    slots[T] page_table[S, W]                       (once per cache group)

T token rows and S sequences are bucketed together (`step_shapes`); a table's
width W is a constant of the cache.  Nothing else varies, so the number of
compilations is the number of shapes.
"""

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from host_allocator import arguments
from host_allocator import errors

MAX_STEP_SHAPES = 16
# A shape of its own for few sequences must save more than it costs to compile.
_FEW_SEQUENCES = 4


@dataclasses.dataclass(frozen=True)
class StepShape:
  """A bucket: token rows and sequences, padding included.

  Where both are equal the step is decode only: one token row a sequence.
  """

  num_tokens: int
  num_sequences: int

  @property
  def is_decode(self) -> bool:
    """Whether every sequence of such a step has exactly one token row."""
    return self.num_tokens == self.num_sequences


@dataclasses.dataclass(eq=False, slots=True)
class GroupPlan:
  """The pages that one cache group contributes to a step.

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


@dataclasses.dataclass(frozen=True)
class Packing:
  """Where the fields of one step lie in its flat int32 buffer.

  Args:
    shape: The bucket of the step.
    table_widths: Pages a sequence can have, per cache group.
  """

  shape: StepShape
  table_widths: tuple[int, ...]

  @functools.cached_property
  def _shapes(self) -> dict[tuple[str, int | None], tuple[int, ...]]:
    t, s = self.shape.num_tokens, self.shape.num_sequences
    shapes: dict[tuple[str, int | None], tuple[int, ...]] = {
      ("tokens", None): (t,),
      ("positions", None): (t,),
      ("sequence_rows", None): (t,),
      ("context_lens", None): (s,),
      ("query_starts", None): (s + 1,),
      ("logit_rows", None): (s,),
    }
    for group, width in enumerate(self.table_widths):
      shapes["slots", group] = (t,)
      shapes["page_table", group] = (s, width)
    return shapes

  @functools.cached_property
  def offsets(self) -> dict[tuple[str, int | None], int]:
    """First element of each field, keyed by `(name, group)`."""
    offsets, at = {}, 0
    for key, shape in self._shapes.items():
      offsets[key] = at
      at += math.prod(shape)
    return offsets

  @functools.cached_property
  def slices(self) -> dict[tuple[str, int | None], slice]:
    """Where each field lies, flat, keyed by `(name, group)`."""
    return {
      key: slice(start, start + math.prod(self._shapes[key]))
      for key, start in self.offsets.items()
    }

  @functools.cached_property
  def size(self) -> int:
    """Elements of the whole buffer."""
    return sum(math.prod(shape) for shape in self._shapes.values())

  def field(self, buffer: Any, name: str, group: int | None = None) -> Any:
    """The named field of a packed buffer, NumPy or JAX alike.

    Args:
      buffer: int32 `[size]`.
      name: One of the names in the module docstring.
      group: Index of the cache group for `slots` and `page_table`.

    Returns:
      The field, shaped; a view where `buffer` is a NumPy array.
    """
    key = name, group
    return buffer[self.slices[key]].reshape(self._shapes[key])

  def enter(self, buffer: np.ndarray, group: int, part: GroupPlan) -> None:
    """Writes the pages of a step into a group's page table."""
    if len(part.pages):
      table = self.field(buffer, "page_table", group)
      table[part.members, part.columns] = part.pages


def step_shapes(max_tokens: int, max_sequences: int) -> tuple[StepShape, ...]:
  """The buckets of a cache, at most 16, by ascending cost.

  Sizes are halvings of the largest.  Decode shapes `(S, S)` halve the
  sequences; prefill shapes `(T, S)` halve the token rows, at all sequences and,
  where these are many, once more at few (an almost idle cache).

  Args:
    max_tokens: Most token rows of one step.
    max_sequences: Most sequences of one step.

  Returns:
    Shapes such that every step within the bounds fits one of them.

  Raises:
    LayoutError: Where either bound is not a whole number from 1 within int32.
  """
  limits = 1, arguments.MOST_INT32, errors.LayoutError
  return _step_shapes(
    arguments.whole("max_tokens", max_tokens, *limits),
    arguments.whole("max_sequences", max_sequences, *limits),
  )


@functools.lru_cache(maxsize=64)
def _step_shapes(max_tokens: int, max_sequences: int) -> tuple[StepShape, ...]:
  decode = _halvings(min(max_tokens, max_sequences), 1, steps=6)
  shapes = {StepShape(size, size) for size in decode}
  # A step that is not decode has more token rows than sequences.
  most = min(max_sequences, max_tokens - 1)
  few = _FEW_SEQUENCES if most > 2 * _FEW_SEQUENCES else most
  for sequences in {few, most} - {0}:
    for tokens in _halvings(max_tokens, sequences + 1, steps=5):
      shapes.add(StepShape(tokens, sequences))
  return tuple(sorted(shapes, key=lambda x: (x.num_tokens, x.num_sequences)))


def _halvings(high: int, low: int, *, steps: int) -> list[int]:
  """At most `steps` sizes: `high`, its half (rounded up), ... not below low."""
  sizes = [high]
  while len(sizes) < steps and sizes[-1] > 1 and -(-sizes[-1] // 2) >= low:
    sizes.append(-(-sizes[-1] // 2))
  return sizes


def smallest_shape(
  shapes: tuple[StepShape, ...], num_tokens: int, num_sequences: int
) -> StepShape:
  """The cheapest shape that holds a step.

  A decode shape holds only steps of one token row a sequence.

  Raises:
    ShapeOverflow: Where no shape is large enough.
  """
  decode = num_tokens == num_sequences
  for shape in shapes:
    fits = (
      num_tokens <= shape.num_tokens and num_sequences <= shape.num_sequences
    )
    if fits and (decode or not shape.is_decode):
      return shape
  raise errors.ShapeOverflow(
    f"{num_tokens=} of {num_sequences=} exceed the largest of {shapes}"
  )


def expand_to_kernel_pages(
  page_table: np.ndarray, page_size: int, kernel_page_size: int
) -> np.ndarray:
  """Page table entries split for a kernel that reads smaller pages.

  Page p of `page_size` rows is the `page_size // kernel_page_size` kernel pages
  from `p * that` on; the null page expands to kernel pages of the null page.

  Args:
    page_table: int32 `[..., W]`.
    page_size: Rows of an allocator page.
    kernel_page_size: Rows of a kernel page.

  Returns:
    int32 `[..., W * page_size // kernel_page_size]`.

  Raises:
    LayoutError: Where the kernel's page does not divide the allocator's, or a
      kernel page's id would not fit int32.
    BadHandle: The table holds something other than page ids.
  """
  whole, refusal = arguments.whole, errors.LayoutError
  page_size = whole("page_size", page_size, 1, None, refusal)
  kernel_page_size = whole(
    "kernel_page_size", kernel_page_size, refusal=refusal
  )
  if kernel_page_size < 1 or page_size % kernel_page_size:
    raise errors.LayoutError(
      f"{kernel_page_size=} does not divide {page_size=}: a kernel page would "
      "straddle two allocator pages"
    )
  split = page_size // kernel_page_size
  check_page_ids(page_table, (arguments.MOST_INT32 + 1) // split - 1)
  wide = page_table[..., None] * split + np.arange(split, dtype=np.int32)
  return wide.reshape(*page_table.shape[:-1], -1).astype(np.int32)


def check_page_ids(page_table: np.ndarray, num_pages: int) -> None:
  """Refuses a table that names a page which the pool does not have.

  A device would clip or wrap such an index and read a stranger's rows.

  Args:
    page_table: Page ids, any shape; 0 is the null page.
    num_pages: Pages that can be allocated.

  Raises:
    BadHandle: Naming the first such entry and the limit, or that entries are
      not whole numbers.
  """
  if page_table.dtype.kind not in "iu":
    raise errors.BadHandle(
      f"page ids are {page_table.dtype}, not whole numbers"
    )
  bad = np.argwhere((page_table < 0) | (page_table > num_pages))
  if len(bad):
    at = tuple(bad[0].tolist())
    raise errors.BadHandle(
      f"entry {at} names page {page_table[at]}, not within 0..{num_pages}"
    )
