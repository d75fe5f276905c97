"""What every `write_kv` and `copy_rows` gets right."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import page_shape
from tests.pallas_kernels import batches
from tests.pallas_kernels import harness

PAGES, HEADS, SIZE, DIM = 7, 3, 16, 64
NARROW = ["int8", "float8_e4m3fn"]


def _logical(dtype="float32", head_dim=DIM, size=SIZE, seed=0):
  rng = np.random.default_rng(seed)
  shape = (PAGES, HEADS, size, head_dim)
  if dtype == "int8":
    return rng.integers(-99, 99, shape).astype(np.int8)
  return rng.standard_normal(shape).astype(jnp.dtype(dtype))


def _rows(tokens, head_dim=DIM, dtype="float32", seed=1):
  rng = np.random.default_rng(seed)
  draw = lambda: rng.standard_normal((tokens, HEADS, head_dim))
  return draw().astype(jnp.dtype(dtype)), draw().astype(jnp.dtype(dtype))


def _bits(x):
  """Comparable with NaNs and across narrow dtypes."""
  return np.ascontiguousarray(x).view(np.uint8)


class UpdateConformance:
  """Subclasses set `implementation`."""

  implementation: harness.Implementation

  def _physical(self, logical):
    wide = logical.astype(np.float32)
    found = batches.physical(wide, self.implementation.platform)
    return found.astype(logical.dtype)

  def _written(self, k, v, k_pages, v_pages, slots):
    """Runs `write_kv`; returns logical pages."""
    got = self.implementation.write(
      {
        "k": k,
        "v": v,
        "k_pages": self._physical(k_pages),
        "v_pages": self._physical(v_pages),
        "slots": np.asarray(slots, np.int32),
      }
    )
    size, dim = k_pages.shape[2:]
    return [
      batches.logical(pages, self.implementation.platform, size, dim)
      for pages in got
    ]

  @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
  @pytest.mark.parametrize(("head_dim", "size"), [(64, 16), (128, 8), (80, 32)])
  def test_rows_land_in_their_slots_and_nothing_else_moves(
    self, head_dim, size, dtype
  ):
    k_pages = _logical(dtype, head_dim, size)
    v_pages = _logical(dtype, head_dim, size, seed=5)
    k_pages[3] = np.nan
    # Single rows, neighbours in one tile, a page's last row, a whole page.
    slots = [size + 3, size + 4, size * 2 - 1, size * 5]
    slots += range(size * 6, size * 7)
    k, v = _rows(len(slots), head_dim, dtype)
    got = self._written(k, v, k_pages, v_pages, slots)
    for pages, x, found in ((k_pages, k, got[0]), (v_pages, v, got[1])):
      for row, slot in zip(x, slots, strict=True):
        pages[slot // size, :, slot % size] = row
      np.testing.assert_array_equal(_bits(found), _bits(pages))

  def test_rows_may_come_in_any_order(self):
    pages = _logical()
    slots = np.random.default_rng(3).permutation(np.arange(16, PAGES * 16))
    slots = slots[:40]
    k, v = _rows(40)
    got, _ = self._written(k, v, pages, pages, slots)
    for row, slot in zip(k, slots, strict=True):
      pages[slot // SIZE, :, slot % SIZE] = row
    np.testing.assert_array_equal(got, pages)

  def test_padded_rows_go_to_the_null_page_only(self):
    pages = _logical()
    k, v = _rows(8)
    k[4:] = np.nan
    got, _ = self._written(k, v, pages, pages, [17, 18, 40, 41, 0, 0, 0, 0])
    want = pages.copy()
    for row, slot in zip(k[:4], [17, 18, 40, 41], strict=True):
      want[slot // SIZE, :, slot % SIZE] = row
    np.testing.assert_array_equal(got[1:], want[1:])

  @pytest.mark.parametrize("kv_dtype", NARROW)
  @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
  def test_quantised_rows_come_with_a_scale_per_row_and_head(
    self, dtype, kv_dtype
  ):
    k_pages, v_pages = _logical(kv_dtype), _logical(kv_dtype, seed=5)
    slots = [17, 18, 31, 80, 81, 82]
    k, v = _rows(6, dtype=dtype)
    k[2, 1] = 0
    v[3] *= 1e4
    factors = np.random.default_rng(2).random((PAGES, HEADS, SIZE))
    factors = factors.astype(np.float32)
    scales = batches.physical_scales(factors)
    got = self.implementation.write(
      {
        "k": k,
        "v": v,
        "k_pages": self._physical(k_pages),
        "v_pages": self._physical(v_pages),
        "slots": np.asarray(slots, np.int32),
        "k_scales": scales,
        "v_scales": scales,
      }
    )
    sides = ((k, k_pages, got[0], got[2]), (v, v_pages, got[1], got[3]))
    for x, before, pages, found in sides:
      pages = batches.logical(pages, self.implementation.platform, SIZE, DIM)
      found = batches.logical_scales(found, HEADS, SIZE)
      untouched = np.ones((PAGES, SIZE), bool)
      for row, slot in zip(x.astype(np.float32), slots, strict=True):
        at = (slot // SIZE, slice(None), slot % SIZE)
        untouched[slot // SIZE, slot % SIZE] = False
        _, want_scale = batches.quantized(row, kv_dtype)
        np.testing.assert_allclose(found[at], want_scale, rtol=1e-6)
        back = pages[at].astype(np.float32) * found[at][:, None]
        peak = np.abs(row).max(-1, keepdims=True)
        step = 1 / 254 if kv_dtype == "int8" else 1 / 28
        assert (np.abs(back - row) <= peak * step * 1.01).all()
      keep = np.broadcast_to(untouched[:, None], (PAGES, HEADS, SIZE))
      np.testing.assert_array_equal(_bits(pages[keep]), _bits(before[keep]))
      np.testing.assert_array_equal(found[keep], factors[keep])

  @pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
  def test_rows_of_the_smallest_floats_are_quantised_to_numbers(self, kv_dtype):
    # Their scales would be below the normal floats, which devices flush to 0.
    k = _rows(3)[0] * np.float32([1e-37, 1e-38, 1e-44])[:, None, None]
    pages = self._physical(_logical(kv_dtype))
    scales = batches.physical_scales(np.ones((PAGES, HEADS, SIZE), np.float32))
    got = self.implementation.write(
      {
        "k": k,
        "v": k,
        "k_pages": pages,
        "v_pages": pages,
        "slots": np.asarray([16, 17, 18], np.int32),
        "k_scales": scales,
        "v_scales": scales,
      }
    )
    for pages, scales in (got[::2], got[1::2]):
      platform = self.implementation.platform
      found = batches.logical(pages, platform, SIZE, DIM)[1, :, :3]
      factors = batches.logical_scales(scales, HEADS, SIZE)[1, :, :3]
      assert (factors > 0).all()
      back = found.astype(np.float64) * factors[..., None]
      assert (np.abs(back - k.swapaxes(0, 1)) <= 1e-36).all()

  @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
  @pytest.mark.parametrize("head_dim", [64, 128, 80])
  def test_copies_take_the_first_rows_of_a_page(self, head_dim, dtype):
    pages = _logical(dtype, head_dim)
    if dtype != "int8":
      pages[5, :, 9:] = np.nan
    sources = [1, 1, 4, 6, 0]
    targets = [2, 3, 5, 0, 0]
    counts = [SIZE, 1, 9, 0, 0]
    got = self.implementation.copy(
      {
        "pages": self._physical(pages),
        "source_pages": np.asarray(sources, np.int32),
        "destination_pages": np.asarray(targets, np.int32),
        "row_counts": np.asarray(counts, np.int32),
      },
      head_dim,
    )
    for source, target, count in zip(sources, targets, counts, strict=True):
      pages[target, :, :count] = pages[source, :, :count]
    found = batches.logical(got, self.implementation.platform, SIZE, head_dim)
    np.testing.assert_array_equal(_bits(found), _bits(pages))

  def test_no_copies_change_nothing(self):
    pages = self._physical(_logical())
    none = np.zeros(4, np.int32)
    got = self.implementation.copy(
      {
        "pages": pages,
        "source_pages": none,
        "destination_pages": none,
        "row_counts": none,
      },
      DIM,
    )
    np.testing.assert_array_equal(got, pages)
    assert (
      page_shape.page_shape(
        HEADS, SIZE, DIM, platform=self.implementation.platform
      )
      == pages.shape[1:]
    )
