"""How many pages a memory holds, and how many requests those pages hold."""

import dataclasses

from host_allocator import arguments
from host_allocator import errors
from host_allocator import layout as layout_lib

INDEX_BYTES = 4
# Scales of one page are stored in whole vectors of this many float32.
SCALE_LANES = 128


@dataclasses.dataclass(frozen=True)
class CapacityPlan:
  """Pools that fit a memory.

  Attributes:
    layout: the cache groups.
    num_pages: allocatable pages of each group.
    max_sequences: rows of the page tables.
    max_length: most tokens of one sequence.
    budget_bytes: the memory asked for.
    pages_bytes: page arrays on the device, null pages included.
    table_bytes: page tables of a full step on the device.
  """

  layout: layout_lib.CacheLayout
  num_pages: tuple[int, ...]
  max_sequences: int
  max_length: int
  budget_bytes: int
  pages_bytes: int
  table_bytes: int

  @property
  def spare_bytes(self) -> int:
    """Memory left over."""
    return self.budget_bytes - self.pages_bytes - self.table_bytes

  @property
  def num_tokens(self) -> int:
    """Rows that every group can hold: the least over the groups."""
    return min(
      pages * group.page_size
      for pages, group in zip(self.num_pages, self.layout.groups, strict=True)
    )

  def sequences_of(self, num_tokens: int, *, shared_tokens: int = 0) -> int:
    """Returns how many sequences of num_tokens can be live at once.

    Args:
      num_tokens: rows of each sequence.
      shared_tokens: rows from the first that all of them share; whole pages
        of these are held once.

    Raises:
      LedgerError: shared_tokens is not within 0..num_tokens, or num_tokens
        is not within 1..max_length.
    """
    whole = arguments.whole
    num_tokens = whole(
      "num_tokens", num_tokens, 1, self.max_length, errors.LedgerError
    )
    shared_tokens = whole(
      "shared_tokens", shared_tokens, 0, num_tokens, errors.LedgerError
    )
    most = self.max_sequences
    for pages, group in zip(self.num_pages, self.layout.groups, strict=True):
      shared = shared_tokens // group.page_size
      private = group.pages_for(num_tokens) - shared
      if shared + min(private, 1) > pages:
        return 0
      if private:
        most = min(most, (pages - shared) // private)
    return most


def stored_page_bytes(group: layout_lib.CacheGroup) -> int:
  """Returns a page's bytes on the device, lane and scale padding included."""
  width = group.stored_head_dim("k") + group.stored_head_dim("v")
  rows = group.num_kv_heads * group.page_size
  stored = rows * width * group.scalar_bytes
  if group.quantization is not None:
    vectors = -(-rows // SCALE_LANES)
    stored += 2 * vectors * SCALE_LANES * layout_lib.SCALE_BYTES
  return group.num_layers * stored


def pages_bytes(
  layout: layout_lib.CacheLayout, num_pages: tuple[int, ...]
) -> int:
  """Returns the bytes of all page arrays; each holds a null page more."""
  return sum(
    (pages + 1) * stored_page_bytes(group)
    for pages, group in zip(num_pages, layout.groups, strict=True)
  )


def plan_capacity(
  layout: layout_lib.CacheLayout,
  *,
  budget_bytes: int,
  max_sequences: int,
  max_length: int,
) -> CapacityPlan:
  """Returns the largest pools that fit, the same tokens in every group.

  Whole bundles first; a group whose pages are smaller than a bundle then
  gets what is left, as long as no group gains on another by a whole bundle.

  Args:
    layout: the cache groups.
    budget_bytes: device memory for pages and page tables.
    max_sequences: sequences of one step.
    max_length: most tokens of one sequence.

  Raises:
    LedgerError: the budget does not hold one sequence of one token, or a
      bound is not a whole number from 1.
  """
  whole, refusal = arguments.whole, errors.LedgerError
  budget_bytes = whole("budget_bytes", budget_bytes, 0, None, refusal)
  max_sequences = whole("max_sequences", max_sequences, 1, None, refusal)
  max_length = whole("max_length", max_length, 1, None, refusal)
  table_bytes = INDEX_BYTES * max_sequences * sum(layout.pages_for(max_length))
  null_bytes = pages_bytes(layout, (0,) * len(layout.groups))
  page_bytes = [stored_page_bytes(group) for group in layout.groups]
  bundle_bytes = sum(
    size * count
    for size, count in zip(page_bytes, layout.bundle_pages, strict=True)
  )
  spare = budget_bytes - table_bytes - null_bytes
  bundles = max(spare, 0) // bundle_bytes
  num_pages = [bundles * count for count in layout.bundle_pages]
  spare -= bundles * bundle_bytes
  for index in sorted(range(len(page_bytes)), key=lambda i: page_bytes[i]):
    extra = min(spare // page_bytes[index], layout.bundle_pages[index] - 1)
    if extra > 0:
      num_pages[index] += extra
      spare -= extra * page_bytes[index]
  if min(num_pages) < 1:
    raise errors.LedgerError(
      f"{budget_bytes=} holds no page of every group; {table_bytes} go to"
      f" page tables, {null_bytes} to null pages, {sum(page_bytes)} to one"
      " page of each"
    )
  return CapacityPlan(
    layout=layout,
    num_pages=tuple(num_pages),
    max_sequences=max_sequences,
    max_length=max_length,
    budget_bytes=budget_bytes,
    pages_bytes=pages_bytes(layout, tuple(num_pages)),
    table_bytes=table_bytes,
  )
