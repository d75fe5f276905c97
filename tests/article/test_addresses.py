"""§0x03: from a token to a byte, with two groups of unlike strides."""

import dataclasses
import math

import numpy as np
import pytest

from host_allocator import address
from host_allocator import errors
from host_allocator import layout

KIB = 1024
MIB = 1024 * KIB
G1_K_BASE = 4_311_744_512


def two_groups(**changes):
  """24 layers head-major and 8 layers token-major, 4 heads of 128, fp16."""
  common = {
    "num_kv_heads": 4,
    "head_dim": 128,
    "page_size": 16,
    "dtype": "float16",
  }
  common.update(changes)
  lower = layout.CacheGroup("g0", num_layers=24, **common)
  upper = layout.CacheGroup(
    "g1",
    num_layers=8,
    axis_order=("layer", "page", "row", "head", "lane"),
    **common,
  )
  return layout.CacheLayout((lower, upper))


def pages(generation, **slots_and_rows):
  return {
    int(name[1:]): address.PageRecord(generation, slot, rows)
    for name, (slot, rows) in slots_and_rows.items()
  }


def entries(generation, *names):
  return tuple(address.TableEntry(name, generation) for name in names)


@pytest.fixture
def snapshot():
  """A has 33 tokens, B its first 25, C 16 of its own."""
  lower = address.PoolSnapshot(
    num_slots=8,
    bases={"k": 2**32, "v": 2**32 + 4 * MIB},
    pages=pages(
      4, p1000=(1, 16), p1001=(5, 16), p1002=(2, 1), p1004=(3, 16), p1003=(0, 0)
    ),
  )
  upper = address.PoolSnapshot(
    num_slots=8,
    bases={"k": G1_K_BASE, "v": G1_K_BASE + 2 * MIB},
    pages=pages(
      7, p2000=(3, 16), p2001=(6, 16), p2002=(1, 1), p2004=(2, 16), p2003=(4, 0)
    ),
  )
  requests = {
    "A": address.RequestSnapshot(
      33,
      (entries(4, 1000, 1001, 1002), entries(7, 2000, 2001, 2002)),
      table_version=5,
    ),
    "B": address.RequestSnapshot(
      25, (entries(4, 1000, 1001), entries(7, 2000, 2001)), table_version=3
    ),
    "C": address.RequestSnapshot(
      16, (entries(4, 1004), entries(7, 2004)), table_version=2
    ),
  }
  return address.AddressSnapshot(two_groups(), (lower, upper), requests)


def find(snapshot, request="A", **changes):
  coordinate = {"token": 16, "layer": 24, "kind": "k", "head": 1, "lane": 5}
  return address.translate(snapshot, request, **{**coordinate, **changes})


def test_row_and_bundle_bytes_add_up_over_the_groups():
  groups = two_groups()
  assert [group.row_bytes for group in groups.groups] == [48 * KIB, 16 * KIB]
  assert [group.page_bytes for group in groups.groups] == [768 * KIB, 256 * KIB]
  assert groups.row_bytes == 64 * KIB
  assert groups.bundle_bytes == MIB


def test_the_checked_address(snapshot):
  assert not address.verify(snapshot)
  found = find(snapshot)
  assert (found.group, found.layer) == (1, 0)
  assert (found.logical_page, found.row) == (1, 0)
  assert (found.page, found.generation, found.slot) == (2001, 7, 6)
  assert found.slot_id == 96
  assert found.element == 49_285
  assert found.byte == 98_570
  assert found.address == 4_311_843_082


def test_the_strides_of_the_token_major_group():
  group = two_groups().groups[1]
  assert group.shape(8) == (8, 8, 16, 4, 128)
  assert group.strides(8) == (65536, 8192, 512, 128, 1)


def test_every_step_agrees_with_numpy_on_random_coordinates(snapshot):
  rng = np.random.default_rng(3)
  for _ in range(200):
    token, layer = int(rng.integers(33)), int(rng.integers(32))
    head, lane = int(rng.integers(4)), int(rng.integers(128))
    kind = "kv"[int(rng.integers(2))]
    found = find(
      snapshot, token=token, layer=layer, kind=kind, head=head, lane=lane
    )
    if layer < 24:
      slot = (1, 5, 2)[token // 16]
      shape, where = (24, 8, 4, 16, 128), (layer, slot, head, token % 16, lane)
      base = 2**32 + 4 * MIB * (kind == "v")
    else:
      slot = (3, 6, 1)[token // 16]
      shape = (8, 8, 16, 4, 128)
      where = (layer - 24, slot, token % 16, head, lane)
      base = G1_K_BASE + 2 * MIB * (kind == "v")
    flat = int(np.ravel_multi_index(where, shape))
    assert found.address == base + 2 * flat


def test_a_shorter_request_does_not_see_rows_its_page_has(snapshot):
  assert find(snapshot, "B", token=24).row == 8
  assert snapshot.pools[1].pages[2001].valid_rows == 16
  with pytest.raises(errors.AddressError, match="25 tokens") as caught:
    find(snapshot, "B", token=25)
  assert caught.value.reason == "token_not_visible"


def test_a_row_in_sight_but_not_written_is_refused(snapshot):
  longer = dataclasses.replace(snapshot.requests["A"], context_length=34)
  torn = dataclasses.replace(snapshot, requests={"A": longer})
  with pytest.raises(errors.AddressError, match="1 valid rows") as caught:
    find(torn, token=33)
  assert caught.value.reason == "row_not_written"


def successor(snapshot):
  """C after a seventeenth token: a new page in both groups at once."""
  grown = address.RequestSnapshot(
    17, (entries(4, 1004, 1003), entries(7, 2004, 2003)), table_version=3
  )
  pools = tuple(
    dataclasses.replace(
      pool, pages={**pool.pages, page: address.PageRecord(generation, slot, 1)}
    )
    for pool, page, generation, slot in zip(
      snapshot.pools, (1003, 2003), (4, 7), (0, 4), strict=True
    )
  )
  return dataclasses.replace(
    snapshot, pools=pools, requests={**snapshot.requests, "C": grown}
  )


def test_crossing_a_page_boundary_reads_the_published_successor(snapshot):
  after = successor(snapshot)
  assert not address.verify_successor(snapshot, after)
  lower = find(after, "C", layer=0)
  upper = find(after, "C", layer=24)
  assert (lower.page, lower.slot, lower.slot_id) == (1003, 0, 0)
  assert (upper.page, upper.slot, upper.slot_id) == (2003, 4, 64)
  with pytest.raises(errors.AddressError) as caught:
    find(snapshot, "C")
  assert caught.value.reason == "token_not_visible"


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    ({"token": -1}, "token_not_visible"),
    ({"token": 33}, "token_not_visible"),
    ({"layer": 32}, "unknown_layer"),
    ({"layer": -1}, "unknown_layer"),
    ({"kind": "q"}, "unknown_kind"),
    ({"head": 4}, "head_out_of_range"),
    ({"head": -1}, "head_out_of_range"),
    ({"lane": 128}, "lane_out_of_range"),
    ({"lane": -1}, "lane_out_of_range"),
    ({"request": "Z"}, "unknown_request"),
  ],
)
def test_a_coordinate_out_of_range_is_refused(snapshot, changes, reason):
  with pytest.raises(errors.AddressError) as caught:
    find(snapshot, **changes)
  assert caught.value.reason == reason


def broken(snapshot, *, request=None, page=None, pool=None):
  """The snapshot with fields of A, of g1's page 2001 or of g1 replaced."""
  requests, pools = dict(snapshot.requests), list(snapshot.pools)
  if request is not None:
    requests["A"] = dataclasses.replace(requests["A"], **request)
  if page is not None:
    record = dataclasses.replace(pools[1].pages[2001], **page)
    pools[1] = dataclasses.replace(
      pools[1], pages={**pools[1].pages, 2001: record}
    )
  if pool is not None:
    pools[1] = dataclasses.replace(pools[1], **pool)
  return dataclasses.replace(snapshot, requests=requests, pools=tuple(pools))


G0_TABLE = entries(4, 1000, 1001, 1002)


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    ({"request": {"context_length": 49}}, "table_length"),
    ({"request": {"context_length": 16}}, "table_length"),
    ({"request": {"context_length": 34}}, "row_not_written"),
    ({"request": {"tables": (G0_TABLE,)}}, "table_count"),
    (
      {"request": {"tables": (G0_TABLE, entries(7, 2000, 2001))}},
      "table_length",
    ),
    (
      {"request": {"tables": (G0_TABLE, entries(7, 2000, 2009, 2002))}},
      "stale_handle",
    ),
    (
      {"request": {"tables": (G0_TABLE, entries(6, 2000, 2001, 2002))}},
      "stale_handle",
    ),
    ({"page": {"generation": 8}}, "stale_handle"),
    ({"page": {"slot": 3}}, "slot_used_twice"),
    ({"page": {"slot": 8}}, "slot_out_of_range"),
    ({"page": {"valid_rows": 17}}, "invalid_tail"),
    ({"page": {"valid_rows": -1}}, "invalid_tail"),
    ({"page": {"valid_rows": 15}}, "row_not_written"),
    ({"pool": {"bases": {"k": G1_K_BASE}}}, "missing_base"),
    (
      {"pool": {"bases": {"k": G1_K_BASE, "v": G1_K_BASE + MIB - 2}}},
      "overlapping_arrays",
    ),
    (
      {"pool": {"bases": {"k": 2**32 + 7 * MIB - 2, "v": G1_K_BASE}}},
      "overlapping_arrays",
    ),
  ],
)
def test_a_malformed_snapshot_is_named(snapshot, change, reason):
  findings = address.verify(broken(snapshot, **change))
  assert reason in [finding.reason for finding in findings]


def test_a_change_without_a_new_table_version_is_named(snapshot):
  after = successor(snapshot)
  stale = dataclasses.replace(after.requests["C"], table_version=2)
  requests = {**after.requests, "C": stale}
  after = dataclasses.replace(after, requests=requests)
  (finding,) = address.verify_successor(snapshot, after)
  assert finding.reason == "stale_table_version"


def test_a_generation_that_falls_is_named(snapshot):
  after = broken(snapshot, page={"generation": 6})
  reasons = [f.reason for f in address.verify_successor(snapshot, after)]
  assert "generation_went_back" in reasons


def test_the_arrays_are_as_long_as_their_rows(snapshot):
  spans = address.extents(snapshot)
  assert [name for _, _, name in spans] == ["g0.k", "g0.v", "g1.k", "g1.v"]
  total = sum(end - start for start, end, _ in spans)
  assert total == 8 * 16 * 64 * KIB == math.prod((8, MIB))


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"axis_order": ("layer", "page", "row", "row", "lane")}, "axis_order"),
    ({"axis_order": ("layer", "page", "row", "head")}, "axis_order"),
    ({"layers": (0, 0)}, "different"),
    ({"layers": (0, -1)}, "whole numbers"),
    ({"layers": (0,)}, "not 2"),
    ({"layers": (1, 2)}, "not every one"),
    ({"num_kv_heads": 0}, "num_kv_heads"),
    ({"page_size": True}, "page_size"),
    ({"dtype": "float31"}, "dtype"),
    ({"quantization": "int4"}, "quantization"),
    ({"name": ""}, "name"),
    (
      {
        "axis_order": ("layer", "page", "kv", "head", "row", "lane"),
        "v_head_dim": 64,
      },
      "interleaves",
    ),
  ],
)
def test_a_malformed_group_is_refused(changes, match):
  fields = {
    "name": "kv",
    "num_layers": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "page_size": 4,
  }
  with pytest.raises(errors.LayoutError, match=match):
    layout.CacheLayout((layout.CacheGroup(**{**fields, **changes}),))
