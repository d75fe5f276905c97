"""What every paged attention gets right: numbers, pages, neighbours, splits."""

import dataclasses

import numpy as np
import pytest

from tests.pallas_kernels import batches
from tests.pallas_kernels import harness

PAGE = 8
# Empty, one row, and the four lengths around a page's end.
EDGES = [0, 1, PAGE - 1, PAGE, PAGE + 1]


class AttentionConformance:
  """Subclasses set `implementation`."""

  implementation: harness.Implementation

  @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
  @pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"),
    [(9, 3, 64), (2, 2, 128), (8, 1, 256), (4, 2, 80)],
  )
  def test_decode_of_every_length(self, q_heads, kv_heads, head_dim, dtype):
    batch = batches.make(
      [*EDGES, self.implementation.long],
      q_heads=q_heads,
      kv_heads=kv_heads,
      head_dim=head_dim,
      dtype=dtype,
    )
    harness.check(self.implementation, batch)

  @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
  @pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 128)]
  )
  def test_ragged_prefill_and_decode_together(
    self, q_heads, kv_heads, head_dim, dtype
  ):
    # A chunk behind cached rows, whole prompts, decode rows, a row that
    # computes nothing, an empty sequence, and padding.
    long = self.implementation.long
    batch = batches.make(
      [0, 1, 9, 40, long, 70, 23],
      [0, 1, 9, 1, 37, 66, 0],
      padding=6,
      q_heads=q_heads,
      kv_heads=kv_heads,
      head_dim=head_dim,
      dtype=dtype,
    )
    out, lse = harness.check(self.implementation, batch)
    assert (out[-6:] == 0).all()
    assert (lse[-6:] == -np.inf).all()

  @pytest.mark.parametrize("counts", [None, [1, 13, 2]])
  def test_answers_do_not_depend_on_page_size(self, counts):
    found = []
    for page_size in (8, 16, 32, 128):
      batch = batches.make([5, 131, 256], counts, page_size=page_size)
      found.append(harness.check(self.implementation, batch))
    for other in found[1:]:
      harness.assert_close(other, found[0])

  @pytest.mark.parametrize("counts", [None, [1, 13, 2]])
  def test_answers_do_not_depend_on_tiles(self, counts):
    lengths = [5, 131, self.implementation.long]
    batch = batches.make(lengths, counts)
    want = harness.check(self.implementation, batch)
    arrays = batches.paged(batch, self.implementation.platform)
    for tiling in self.implementation.tilings:
      with tiling():
        got = self.implementation.attend(arrays, fresh=True)
      harness.assert_close(got, want)

  @pytest.mark.parametrize("counts", [None, [1, 13, 2, 0]])
  def test_answers_do_not_depend_on_batch_order(self, counts):
    batch = batches.make([5, 131, 60, 17], counts)
    order = [2, 3, 0, 1]
    want = harness.check(self.implementation, batch)
    got = harness.check(self.implementation, batch.take(order))
    starts = batch.starts
    rows = [np.arange(starts[s], starts[s + 1]) for s in order]
    rows = np.concatenate(rows)
    harness.assert_same_bits(got, (want[0][rows], want[1][rows]))

  @pytest.mark.parametrize("counts", [None, [3, 1, 20]])
  @pytest.mark.parametrize("length", [40, 61])
  def test_neighbours_keep_their_bits_when_one_sequence_changes(
    self, counts, length
  ):
    batch = batches.make([50, 40, 61], counts)
    other = batches.make([50, length, 61], counts, seed=9)
    changed = dataclasses.replace(
      batch,
      keys=[batch.keys[0], other.keys[1], batch.keys[2]],
      values=[batch.values[0], other.values[1], batch.values[2]],
    )
    paging = {"width": 9}
    want = harness.check(self.implementation, batch, paging=paging)
    got = harness.check(self.implementation, changed, paging=paging)
    first, last = batch.starts[1:3]
    rows = np.r_[0:first, last : len(batch.q)]
    harness.assert_same_bits(
      (got[0][rows], got[1][rows]), (want[0][rows], want[1][rows])
    )

  def test_an_empty_sequence_leaves_its_neighbours_alone(self):
    batch = batches.make([61, 0, 50])
    out, lse = harness.check(self.implementation, batch)
    assert (out[1] == 0).all()
    assert (lse[1] == -np.inf).all()
    without = harness.check(self.implementation, batch.take([0, 2]))
    harness.assert_same_bits((out[[0, 2]], lse[[0, 2]]), without)

  def test_lengths_short_of_a_page_equal_each_alone(self):
    batch = batches.make([5, 9, 16])
    out, lse = harness.check(self.implementation, batch)
    for row in range(3):
      alone = harness.check(self.implementation, batch.take([row]))
      harness.assert_close((out[[row]], lse[[row]]), alone)

  @pytest.mark.parametrize("counts", [None, [1, 13, 2]])
  def test_stale_table_tails_are_not_seen(self, counts):
    batch = batches.make([5, 60, 17], counts)
    found = [
      harness.check(self.implementation, batch, paging={"tail": tail})
      for tail in ("null", "largest", "other")
    ]
    harness.assert_same_bits(found[1], found[0])
    harness.assert_same_bits(found[2], found[0])

  @pytest.mark.parametrize("counts", [None, [1, 13, 2]])
  def test_poison_in_unowned_rows_changes_no_bit(self, counts):
    batch = batches.make([5, 60, 17], counts)
    want = harness.check(self.implementation, batch, paging={"poison": 0.0})
    for poison in (np.nan, np.inf):
      paging = {"poison": poison}
      got = harness.check(self.implementation, batch, paging=paging)
      harness.assert_same_bits(got, want)

  @pytest.mark.parametrize("counts", [None, [1, 13, 2]])
  def test_keys_and_values_may_have_tables_of_their_own(self, counts):
    batch = batches.make([5, 60, 17], counts)
    paging = {"own_v_table": True}
    harness.check(self.implementation, batch, paging=paging)

  @pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
  @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
  @pytest.mark.parametrize("counts", [None, [1, 0, 13, 2]])
  def test_quantised_pages(self, counts, dtype, kv_dtype):
    lengths = [5, 0, self.implementation.long, 17]
    batch = batches.make(
      lengths, counts, page_size=16, dtype=dtype, kv_dtype=kv_dtype
    )
    paging = {"own_v_table": True}
    harness.check(self.implementation, batch, paging=paging)

  @pytest.mark.parametrize("counts", [None, [4, 1, 6]])
  @pytest.mark.parametrize("split", [0, 16, 24])
  def test_a_split_at_any_page_merges_to_the_whole(self, counts, split):
    batch = batches.make([50, 30, 44], counts)
    self._check_split(batch, split)

  @pytest.mark.parametrize("window", [4, 20, 30])
  def test_windows_that_end_inside_and_across_a_shared_prefix(self, window):
    batch = batches.make([50, 30, 44], [4, 1, 6])
    self._check_split(batch, 24, window=window)

  @pytest.mark.parametrize("split", [0, 24])
  def test_sinks_count_once_whether_split_or_not(self, split):
    batch = batches.make([50, 30, 44])
    sinks = np.asarray([0.5, -1.0, 3.0, 0.0], np.float32)
    harness.check(self.implementation, batch, sinks=sinks)
    self._check_split(batch, split, sinks=sinks)

  def _check_split(self, batch, split, sinks=None, **options):
    """Rows before `split` without causality, the rest with, then a merge."""
    positions = [
      np.arange(length - count, length)
      for length, count in zip(batch.lengths, batch.counts, strict=True)
    ]
    positions = np.concatenate(positions).astype(np.int32)
    starts = np.full(len(batch.keys), split, np.int32)
    parts = (
      (slice(0, split), None, False, sinks),
      (slice(split, None), starts, True, None),
    )
    states = []
    for rows, key_starts, causal, part_sinks in parts:
      part = dataclasses.replace(
        batch,
        keys=[keys[rows] for keys in batch.keys],
        values=[values[rows] for values in batch.values],
        key_starts=key_starts,
        positions=positions,
      )
      states.append(
        harness.check(
          self.implementation, part, causal=causal, sinks=part_sinks, **options
        )
      )
    outs = np.stack([out for out, _ in states])
    lses = np.stack([lse for _, lse in states])
    got = self.implementation.merge(outs, lses)
    want = harness.check(self.implementation, batch, sinks=sinks, **options)
    harness.assert_close(got, want)


class FewerCases(AttentionConformance):
  """The same with pairs of cases in place of all their products, for CI."""

  @pytest.mark.parametrize(
    "case", [(9, 3, 64, "float32"), (4, 1, 128, "bfloat16")]
  )
  def test_ragged_prefill_and_decode_together(self, case):
    super().test_ragged_prefill_and_decode_together(*case)

  @pytest.mark.parametrize(
    "case",
    [
      (None, "bfloat16", "int8"),
      (None, "float32", "float8_e4m3fn"),
      ([1, 0, 13, 2], "float32", "int8"),
      ([1, 0, 13, 2], "bfloat16", "float8_e4m3fn"),
    ],
  )
  def test_quantised_pages(self, case):
    super().test_quantised_pages(*case)
