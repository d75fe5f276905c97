"""The packed buffer, its buckets and kernel-page expansion."""

import numpy as np
import pytest

from host_allocator import errors
from host_allocator import tables


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 16, 256, 512, 8192])
@pytest.mark.parametrize("max_sequences", [1, 2, 3, 5, 8, 64, 256])
def test_every_step_within_the_bounds_has_a_shape(max_tokens, max_sequences):
  shapes = tables.step_shapes(max_tokens, max_sequences)
  assert len(shapes) <= tables.MAX_STEP_SHAPES
  for num_sequences in {1, 2, max_sequences // 2, max_sequences} - {0}:
    for num_tokens in {num_sequences, num_sequences + 1, max_tokens}:
      if num_sequences > num_tokens or num_tokens > max_tokens:
        continue
      if num_sequences > max_sequences:
        continue
      shape = tables.smallest_shape(shapes, num_tokens, num_sequences)
      assert shape.num_tokens >= num_tokens
      assert shape.num_sequences >= num_sequences
      assert shape.is_decode == (num_tokens == num_sequences)


def test_a_step_beyond_every_shape_is_refused():
  shapes = tables.step_shapes(16, 4)
  with pytest.raises(errors.ShapeOverflow, match="num_tokens=17"):
    tables.smallest_shape(shapes, 17, 4)


def test_shapes_need_positive_bounds():
  with pytest.raises(errors.LayoutError, match="max_tokens=0"):
    tables.step_shapes(0, 4)


def test_fields_tile_the_buffer_in_the_documented_order():
  packing = tables.Packing(tables.StepShape(6, 3), (5, 2))
  buffer = np.arange(packing.size, dtype=np.int32)
  order = [
    ("tokens", None, (6,)),
    ("positions", None, (6,)),
    ("sequence_rows", None, (6,)),
    ("context_lens", None, (3,)),
    ("query_starts", None, (4,)),
    ("logit_rows", None, (3,)),
    ("slots", 0, (6,)),
    ("page_table", 0, (3, 5)),
    ("slots", 1, (6,)),
    ("page_table", 1, (3, 2)),
  ]
  parts = [packing.field(buffer, name, group) for name, group, _ in order]
  assert [part.shape for part in parts] == [shape for _, _, shape in order]
  np.testing.assert_array_equal(
    np.concatenate([part.reshape(-1) for part in parts]), buffer
  )
  assert np.shares_memory(parts[0], buffer)


def test_packings_of_equal_shape_are_one_cache_key():
  one = tables.Packing(tables.StepShape(6, 3), (5,))
  two = tables.Packing(tables.StepShape(6, 3), (5,))
  assert one.size == two.size
  assert one == two
  assert hash(one) == hash(two)


def test_kernel_pages_address_the_same_rows_as_allocator_pages():
  table = np.array([[3, 1, 0], [2, 0, 0]], np.int32)
  split = tables.expand_to_kernel_pages(table, 12, 4)
  assert split.shape == (2, 9)
  assert split.dtype == np.int32
  for row in range(3 * 12):
    big = table[:, row // 12] * 12 + row % 12
    small = split[:, row // 4] * 4 + row % 4
    np.testing.assert_array_equal(big, small)


@pytest.mark.parametrize("kernel_page_size", [0, 5, 8, 24])
def test_kernel_pages_that_do_not_divide_are_refused(kernel_page_size):
  with pytest.raises(errors.LayoutError, match="does not divide"):
    tables.expand_to_kernel_pages(
      np.zeros((1, 1), np.int32), 12, kernel_page_size
    )


@pytest.mark.parametrize("page", [-1, 8, 2**20])
def test_a_page_that_the_pool_lacks_is_refused_and_never_clipped(page):
  table = np.array([[1, 7], [0, 0]], np.int32)
  tables.check_page_ids(table, 7)
  table[1, 1] = page
  with pytest.raises(errors.BadHandle, match=rf"entry \(1, 1\).*page {page}"):
    tables.check_page_ids(table, 7)
