"""§0x02: counts that contradict each other are named, and waste is counted."""

import dataclasses
import fractions

import pytest

from host_allocator import errors
from host_allocator import fragmentation
from host_allocator import layout
from host_allocator import ledger
from host_allocator import metadata

KIB = 1024
MIB = 1024 * KIB
LAYOUT = layout.CacheLayout.uniform(
  num_layers=32, num_kv_heads=4, head_dim=128, page_size=16, dtype="float16"
)
REQUESTS = (
  (
    ledger.RequestPages(33, (1, 2, 3), reserved_tokens=64),
    ledger.RequestPages(25, (1, 2), reserved_tokens=48),
    ledger.RequestPages(16, (1,), reserved_tokens=32),
  ),
)
POOL = ledger.PoolPages(
  total=8,
  live=3,
  evictable=0,
  reserved=0,
  free=5,
  valid_rows={1: 16, 2: 16, 3: 1},
)


def with_request(index, **changes):
  views = list(REQUESTS[0])
  views[index] = dataclasses.replace(views[index], **changes)
  return {"requests": (tuple(views),)}


def with_pool(**changes):
  return {"pools": (dataclasses.replace(POOL, **changes),)}


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    (with_request(0, num_tokens=-1), "negative_count"),
    (with_request(0, num_tokens=49), "table_length"),
    (with_request(1, pages=(1,)), "table_length"),
    (with_request(1, pages=(1, 2, 3)), "table_length"),
    (with_request(0, num_tokens=34), "row_not_written"),
    (with_request(1, pages=(1, 1)), "page_named_twice"),
    (with_request(1, pages=(1, 4)), "unknown_page"),
    (with_request(2, reserved_tokens=15), "reservation_below_rows"),
    (with_pool(free=4), "pool_not_partitioned"),
    (with_pool(live=6), "pool_not_partitioned"),
    (with_pool(live=2, free=6), "live_below_unique"),
    (with_pool(live=9, free=-1), "negative_count"),
    (with_pool(valid_rows={1: 16, 2: 16, 3: 17}), "valid_rows_out_of_range"),
    (with_pool(valid_rows={1: 16, 2: 16, 3: 0}), "row_not_written"),
    (with_pool(valid_rows={1: 16, 2: -1, 3: 1}), "valid_rows_out_of_range"),
    (with_pool(valid_rows={1: 16, 2: 16, 3: 1, 9: 1}), "page_out_of_range"),
    (with_pool(valid_rows={0: 1, 1: 16, 2: 16, 3: 1}), "page_out_of_range"),
    ({"pools": (POOL, POOL)}, "group_count"),
    ({"requests": ()}, "group_count"),
  ],
)
def test_a_malformed_snapshot_is_refused_by_name(change, reason):
  snapshot = {"requests": REQUESTS, "pools": (POOL,), **change}
  with pytest.raises(errors.Unreconciled) as caught:
    ledger.measure(LAYOUT, **snapshot)
  assert caught.value.reason == reason
  assert isinstance(caught.value, errors.LedgerError)


@pytest.mark.parametrize(
  "change",
  [
    {"num_tokens": 24},
    None,
  ],
)
def test_half_of_a_request_is_no_request(change):
  groups = tuple(
    dataclasses.replace(LAYOUT.groups[0], name=name, num_layers=16)
    for name in "ab"
  )
  other = REQUESTS[0][:2]
  if change is not None:
    other = (*REQUESTS[0][:1], dataclasses.replace(other[1], **change))
    other = (*other, REQUESTS[0][2])
  with pytest.raises(errors.Unreconciled) as caught:
    ledger.measure(
      layout.CacheLayout(groups), (REQUESTS[0], other), (POOL, POOL)
    )
  assert caught.value.reason == "half_bundle"


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    ({"logical_bytes": 5 * MIB}, "reference_tail_unreconciled"),
    ({"reserved_bytes": 4 * MIB}, "reservation_below_rows"),
    ({"page_references": 7}, "reference_capacity_unreconciled"),
    ({"reference_capacity_bytes": MIB}, "reference_capacity_unreconciled"),
    ({"reference_tail_bytes": MIB}, "reference_tail_unreconciled"),
    ({"unique_pages": 6}, "unique_capacity_unreconciled"),
    ({"unique_pages": 7}, "unique_above_references"),
    ({"materialized_bytes": 2 * MIB}, "unique_tail_unreconciled"),
    ({"materialized_bytes": 33 * 64 * KIB - 1}, "not_whole_rows"),
    ({"capacity_bytes": 6 * MIB}, "unique_capacity_unreconciled"),
    ({"tail_bytes": 22 * 64 * KIB}, "unique_tail_unreconciled"),
    ({"pool_bytes": 9 * MIB}, "pool_unreconciled"),
    ({"live_bytes": 6 * MIB}, "pool_unreconciled"),
    ({"live_bytes": 2 * MIB, "free_bytes": 6 * MIB}, "live_below_unique"),
    ({"evictable_bytes": MIB}, "pool_unreconciled"),
    ({"step_bytes": MIB}, "pool_unreconciled"),
    ({"free_bytes": 0}, "pool_unreconciled"),
    ({"tail_bytes": -1}, "negative_count"),
  ],
)
def test_one_wrong_field_of_a_ledger_is_named(changes, reason):
  sound = ledger.measure(LAYOUT, REQUESTS, (POOL,))
  assert ledger.verify(sound) == ()
  wrong = dataclasses.replace(sound.groups[0], **changes)
  findings = ledger.verify(dataclasses.replace(sound, groups=(wrong,)))
  assert reason in [finding.reason for finding in findings]


def test_a_ledger_without_its_groups_is_named():
  sound = ledger.measure(LAYOUT, REQUESTS, (POOL,))
  (finding,) = ledger.verify(dataclasses.replace(sound, groups=()))
  assert finding.reason == "group_count"


def test_no_reservations_no_slack():
  views = tuple(
    dataclasses.replace(view, reserved_tokens=None) for view in REQUESTS[0]
  )
  found = ledger.measure(LAYOUT, (views,), (POOL,)).total
  assert found.reserved_bytes is None
  assert found.slack_bytes is None


SIZES = metadata.RecordBytes(
  map_entry=4,
  page_descriptor=32,
  hash_entry=24,
  request_tail=2,
  free_entry=4,
  fixed=128,
)
COUNTS = metadata.RecordCounts(
  map_entries=6, page_descriptors=8, hash_entries=2, requests=3, free_entries=5
)


@pytest.mark.parametrize(
  "name", [field.name for field in dataclasses.fields(metadata.RecordBytes)]
)
def test_a_negative_record_size_is_refused(name):
  with pytest.raises(errors.Unreconciled, match=name) as caught:
    dataclasses.replace(SIZES, **{name: -1})
  assert caught.value.reason == "record_size"


@pytest.mark.parametrize(
  "name", [field.name for field in dataclasses.fields(metadata.RecordCounts)]
)
def test_a_negative_record_count_is_refused(name):
  with pytest.raises(errors.Unreconciled, match=name) as caught:
    dataclasses.replace(COUNTS, **{name: -1})
  assert caught.value.reason == "record_count"


def test_more_free_entries_than_pages_are_refused():
  with pytest.raises(errors.Unreconciled) as caught:
    dataclasses.replace(COUNTS, free_entries=9)
  assert caught.value.reason == "free_above_pool"


def test_holes_of_a_contiguous_arena_refuse_what_pages_hold():
  arena = fragmentation.Arena(12 * MIB, (1 * MIB, 2 * MIB))
  assert arena.free_bytes == 3 * MIB
  assert arena.largest_free_bytes == 2 * MIB
  assert arena.external_fragmentation == fractions.Fraction(1, 3)
  candidate = 5 * MIB // 2
  assert not arena.fits(candidate)
  assert arena.fits(2 * MIB)
  assert fragmentation.pages_for_bytes(candidate, MIB) == 3


def test_a_full_arena_has_no_fragmentation_ratio():
  full = fragmentation.Arena(12 * MIB, ())
  assert full.external_fragmentation == fragmentation.NOT_APPLICABLE
  assert not full.fits(1)


def test_one_hole_is_not_fragmented():
  assert fragmentation.Arena(MIB, (MIB,)).external_fragmentation == 0


@pytest.mark.parametrize(
  ("total", "extents"), [(MIB, (MIB, 1)), (MIB, (0,)), (MIB, (-1,))]
)
def test_holes_larger_than_the_arena_are_refused(total, extents):
  with pytest.raises(errors.LedgerError):
    fragmentation.Arena(total, extents)


def test_the_expected_tail_of_a_uniform_last_page():
  rows = fragmentation.expected_tail_rows(16)
  assert rows == fractions.Fraction(15, 2)
  assert rows * LAYOUT.row_bytes == 480 * KIB
  every_fill = range(1, 17)
  assert fragmentation.mean_tail_rows(every_fill, 16) == rows


def test_known_lengths_replace_the_expectation():
  assert fragmentation.mean_tail_rows([33], 16) == 15
  assert fragmentation.mean_tail_rows(
    [33, 25, 16, 0], 16
  ) == fractions.Fraction(22, 3)
  assert fragmentation.mean_tail_rows([0], 16) == fragmentation.NOT_APPLICABLE


@pytest.mark.parametrize(
  "call",
  [
    lambda: fragmentation.expected_tail_rows(0),
    lambda: fragmentation.mean_tail_rows([1], 0),
    lambda: fragmentation.pages_for_bytes(1, 0),
    lambda: fragmentation.pages_for_bytes(-1, 1),
  ],
)
def test_pages_of_nothing_are_refused(call):
  with pytest.raises(errors.LedgerError):
    call()
