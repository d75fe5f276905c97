"""§0x0A: what a decode kernel has to walk, from the tables we pack."""

import numpy as np
import pytest

from host_allocator import errors
from host_allocator import tables
from tests.article import driver


def packed(allocator, sequences):
  """One decode step of the sequences, packed without padding rows."""
  plan = allocator.plan([(sequence, 1) for sequence in sequences])
  shape = tables.StepShape(len(sequences), len(sequences))
  packing = tables.Packing(shape, allocator.table_widths)
  buffer = allocator.pack(plan, packing)
  allocator.commit(plan)
  return packing, buffer


def ready_to_decode(allocator, lengths):
  """Sequences that have these lengths after one step more."""
  sequences = []
  for index, length in enumerate(lengths):
    tokens = [1000 * index + i for i in range(length)]
    sequence = allocator.open(tokens)
    if length > 1:
      allocator.commit(allocator.plan([(sequence, length - 1)]))
    sequences.append(sequence)
  return sequences


@pytest.mark.parametrize(
  ("page_size", "pages", "per_partition"),
  [(8, 257, 64), (16, 129, 32), (32, 65, 16), (64, 33, 8), (128, 17, 4)],
)
def test_a_long_row_visits_every_page_once(page_size, pages, per_partition):
  allocator = driver.make(
    driver.one_group(page_size), pages, max_length=2049, max_sequences=1
  )
  packing, buffer = packed(allocator, ready_to_decode(allocator, [2049]))
  table = packing.field(buffer, "page_table", 0)
  assert int(np.count_nonzero(table)) == pages
  partitions = [
    table[0, first : first + per_partition]
    for first in range(0, pages, per_partition)
  ]
  assert len(partitions) == 5
  assert per_partition * page_size == 512
  (length,) = packing.field(buffer, "context_lens").tolist()
  assert length - (pages - 1) * page_size == 1


@pytest.mark.parametrize("page_size", [8, 16, 32])
def test_ragged_lengths_leave_padded_cells(page_size):
  lengths = [64, 63, 17, 1]
  allocator = driver.make(driver.one_group(page_size), 40, max_length=64)
  packing, buffer = packed(allocator, ready_to_decode(allocator, lengths))
  table = packing.field(buffer, "page_table", 0)
  used, dense = int(np.count_nonzero(table)), table.size
  expected = {8: (20, 32), 16: (11, 16), 32: (6, 8)}[page_size]
  assert (used, dense) == expected
  assert packing.field(buffer, "context_lens").tolist() == lengths
  per_row = np.count_nonzero(table, axis=1).tolist()
  assert per_row == [len(set(row) - {0}) for row in table.tolist()]
  # Padding is at the end of a row and names the null page only.
  for row, count in zip(table.tolist(), per_row, strict=True):
    assert 0 not in row[:count]
    assert not any(row[count:])


def test_allocator_pages_are_split_for_a_smaller_kernel_page():
  table = np.array([3, 7], np.int32)
  halves = tables.expand_to_kernel_pages(table, 32, 16)
  assert halves.tolist() == [6, 7, 14, 15]
  quarters = tables.expand_to_kernel_pages(np.array([3], np.int32), 64, 16)
  assert quarters.tolist() == [12, 13, 14, 15]
  same = tables.expand_to_kernel_pages(table, 16, 16)
  assert same.tolist() == [3, 7]


@pytest.mark.parametrize(
  ("page_size", "kernel"), [(16, 32), (32, 24), (16, 0), (16, -8), (16, 5)]
)
def test_a_kernel_page_that_does_not_divide_is_refused(page_size, kernel):
  with pytest.raises(errors.LayoutError, match="does not divide"):
    tables.expand_to_kernel_pages(np.array([1], np.int32), page_size, kernel)


def test_expanded_pages_name_the_same_rows():
  """Row r of a table's column is the same row through either page size."""
  allocator = driver.make(driver.one_group(32), 8, max_length=128)
  packing, buffer = packed(allocator, ready_to_decode(allocator, [100, 70]))
  table = packing.field(buffer, "page_table", 0)
  fine = tables.expand_to_kernel_pages(table, 32, 8)
  for row, length in enumerate([100, 70]):
    for position in range(length):
      coarse = table[row, position // 32] * 32 + position % 32
      assert fine[row, position // 8] * 8 + position % 8 == coarse


def test_two_prompts_that_part_inside_a_page_copy_before_they_write():
  """Both share 20 rows; token 20 may not land in the shared page."""
  allocator = driver.make(driver.one_group(), 8)
  first = driver.prefilled(allocator, range(20))
  second = allocator.fork(first)
  allocator.append([first, second], [70, 71])
  plan = allocator.plan([(first, 1), (second, 1)])
  packing = tables.Packing(tables.StepShape(2, 2), allocator.table_widths)
  buffer = allocator.pack(plan, packing)
  source, destination, rows = plan.copies[0]
  allocator.commit(plan)
  slots = packing.field(buffer, "slots", 0).tolist()
  assert len(set(slots)) == 2
  assert [slot % 16 for slot in slots] == [4, 4]
  shared = int(source[0])
  assert set(rows.tolist()) == {4}
  assert shared not in destination.tolist()
  assert first.pages()[0] == second.pages()[0]
  assert first.pages()[1] != second.pages()[1]
