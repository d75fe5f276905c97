"""What every paged attention masks: causality, windows, caps, positions."""

import dataclasses

import numpy as np
import pytest

from tests.pallas_kernels import batches
from tests.pallas_kernels import harness

RAGGED = [None, [1, 13, 2]]


class MaskConformance:
  """Subclasses set `implementation`."""

  implementation: harness.Implementation

  @pytest.mark.parametrize("counts", RAGGED)
  @pytest.mark.parametrize("window", [1, 8, 23, 5000])
  def test_windows(self, counts, window):
    batch = batches.make([5, self.implementation.long, 60], counts)
    out, _ = harness.check(self.implementation, batch, window=window)
    if window == 1:
      # The last row of each sequence sees itself only.
      for end, values in zip(batch.starts[1:], batch.values, strict=True):
        seen = np.repeat(values[-1], 2, axis=0)
        np.testing.assert_allclose(out[end - 1], seen, rtol=1e-6)

  @pytest.mark.parametrize("counts", RAGGED)
  def test_a_static_window_equals_a_traced_one(self, counts):
    batch = batches.make([5, self.implementation.long, 60], counts)
    want = harness.check(self.implementation, batch, window=23)
    arrays = batches.paged(batch, self.implementation.platform)
    got = self.implementation.attend(arrays, window=23)
    harness.assert_close(got, want)

  @pytest.mark.parametrize("counts", RAGGED)
  def test_pages_behind_the_window_may_be_recycled(self, counts):
    batch = batches.make([40, 90, 60], counts)
    want = harness.check(self.implementation, batch, window=8)
    recycled = dataclasses.replace(batch, keys=[], values=[])
    for keys, values, count in zip(
      batch.keys, batch.values, batch.counts, strict=True
    ):
      behind = max(0, len(keys) - count - 8) // 8 * 8
      keys, values = keys.copy(), values.copy()
      keys[:behind] = values[:behind] = np.nan
      recycled.keys.append(keys)
      recycled.values.append(values)
    got = harness.check(self.implementation, recycled, window=8)
    harness.assert_same_bits(got, want)

  @pytest.mark.parametrize("counts", RAGGED)
  @pytest.mark.parametrize(("soft_cap", "window"), [(1.0, None), (30.0, 3)])
  def test_soft_cap_comes_after_scale_and_before_the_mask(
    self, counts, soft_cap, window
  ):
    batch = batches.make([5, 41, 60], counts)
    # Where the cap came after the mask, a masked logit would count again.
    first_seen = [keys[:-1] for keys in batch.keys]
    for keys, values in zip(first_seen, batch.values, strict=True):
      values[len(keys) // 2 + 1 :] *= 1e4
    harness.check(
      self.implementation, batch, soft_cap=soft_cap, scale=0.7, window=window
    )

  @pytest.mark.parametrize("counts", RAGGED)
  def test_without_causality_every_valid_row_is_seen(self, counts):
    batch = batches.make([5, 41, 60], counts)
    harness.check(self.implementation, batch, causal=False)
    harness.check(self.implementation, batch, causal=False, window=9)

  @pytest.mark.parametrize("counts", RAGGED)
  def test_queries_of_zero_see_the_mean_of_valid_values(self, counts):
    batch = batches.make([5, 41, 60], counts)
    batch.q[:] = 0
    out, lse = harness.check(self.implementation, batch, causal=False)
    for sequence, values in enumerate(batch.values):
      rows = slice(*batch.starts[sequence : sequence + 2])
      mean = np.repeat(values.mean(0, dtype=np.float64), 2, axis=0)
      for row in out[rows]:
        np.testing.assert_allclose(row, mean, atol=1e-6)
      np.testing.assert_allclose(lse[rows], np.log(len(values)), rtol=1e-6)

  @pytest.mark.parametrize("counts", RAGGED)
  def test_logits_far_below_any_finite_mask_value(self, counts):
    batch = batches.make([5, 41, 60], counts)
    for keys in batch.keys:
      keys[:] = -(2.0**113)  # Sums of it are exact in any order.
    batch.q[:] = 1
    _, lse = harness.check(self.implementation, batch)
    assert (lse < -1e33).all()

  @pytest.mark.parametrize("counts", RAGGED)
  def test_sinks_alone_are_the_state_of_a_query_that_sees_nothing(self, counts):
    counts = counts and [0, 13, 2]
    batch = batches.make([0, 41, 60], counts, padding=0 if not counts else 2)
    sinks = np.asarray([0.5, -1.0, 30.0, 0.0], np.float32)
    harness.check(self.implementation, batch, sinks=sinks)

  def test_positions_decide_what_a_chunk_of_keys_shows(self):
    # Chunks that begin anywhere, queries before, inside and behind them.
    batch = batches.make([16, 40, 21], [3, 12, 1])
    batch.key_starts = np.asarray([100, 7, 0], np.int32)
    batch.positions = np.asarray(
      [99, 100, 300, *range(20, 44, 2), 13], np.int32
    )
    harness.check(self.implementation, batch)
    harness.check(self.implementation, batch, window=10)
    harness.check(self.implementation, batch, causal=False)
    # Of a query far before the keys, a window as large as int32 must not wrap.
    batch.positions[0] = 90
    harness.check(self.implementation, batch, causal=False, window=2**31 - 1)

  def test_key_starts_move_the_default_positions_along(self):
    batch = batches.make([16, 40, 21], [3, 12, 1])
    batch.key_starts = np.asarray([100, 7, 0], np.int32)
    harness.check(self.implementation, batch, window=10)
    decode = batches.make([16, 40, 21])
    decode.key_starts = np.asarray([100, 7, 0], np.int32)
    harness.check(self.implementation, decode, window=10)

  @pytest.mark.parametrize("seed", range(4))
  def test_everything_at_once(self, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 90, 5)
    counts = [int(rng.integers(0, length + 1)) for length in lengths]
    batch = batches.make(lengths, counts, padding=3, seed=seed)
    harness.check(
      self.implementation,
      batch,
      paging={"own_v_table": True, "tail": "largest"},
      sinks=rng.standard_normal(4).astype(np.float32),
      window=17,
      soft_cap=5.0,
      scale=0.3,
      causal=bool(seed % 2),
    )
