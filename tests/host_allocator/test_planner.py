"""Pools that fit a memory, and requests that fit the pools."""

import pytest

from host_allocator import errors
from host_allocator import layout
from host_allocator import planner

MIB = 1 << 20
KV = layout.CacheLayout.uniform(
  num_layers=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16"
)


def plan(layout_=KV, **changes):
  bounds = {"budget_bytes": 514 * MIB, "max_sequences": 8, "max_length": 4096}
  return planner.plan_capacity(layout_, **{**bounds, **changes})


def test_the_null_page_and_the_tables_come_out_of_the_budget():
  found = plan()
  assert found.table_bytes == 4 * 8 * 256
  assert found.num_pages == (255,)
  assert found.pages_bytes == 256 * 2 * MIB
  assert found.spare_bytes == 2 * MIB - found.table_bytes


def test_one_byte_less_is_one_page_less():
  exact = 3 * 2 * MIB + 4 * 8 * 256
  assert plan(budget_bytes=exact).num_pages == (2,)
  assert plan(budget_bytes=exact - 1).num_pages == (1,)


def test_groups_of_unequal_pages_hold_the_same_tokens():
  both = layout.CacheLayout(
    (
      layout.CacheGroup("a", 3, 2, 64, 16, "bfloat16"),
      layout.CacheGroup("b", 1, 2, 64, 48, "bfloat16"),
    )
  )
  for budget in range(1 * MIB, 2 * MIB, 12_345):
    found = plan(both, budget_bytes=budget, max_length=480)
    rows = [
      pages * group.page_size
      for pages, group in zip(found.num_pages, both.groups, strict=True)
    ]
    assert max(rows) - min(rows) < both.bundle_tokens
    assert 0 <= found.spare_bytes < planner.pages_bytes(both, (2, 0))


def test_stored_bytes_count_padding_of_lanes_and_scales():
  group = layout.CacheGroup(
    "kv", 2, 3, 80, 16, "bfloat16", quantization="int8", lane_multiple=128
  )
  stored = planner.stored_page_bytes(group)
  assert stored == 2 * (3 * 16 * 256 + 2 * 128 * 4)
  assert stored > group.page_bytes


def test_shared_pages_are_held_once():
  found = plan()
  assert found.num_tokens == 255 * 16
  assert found.sequences_of(1024) == 3
  assert found.sequences_of(1024, shared_tokens=768) == 8
  assert found.sequences_of(1024, shared_tokens=767) == 8
  assert found.sequences_of(4080) == 1
  assert found.sequences_of(4096) == 0
  alone = plan(max_sequences=1000)
  assert alone.sequences_of(1024, shared_tokens=768) == (255 - 48) // 16
  assert alone.sequences_of(1024, shared_tokens=767) == (255 - 47) // 17
  assert alone.sequences_of(1024, shared_tokens=1024) == 1000


@pytest.mark.parametrize(
  "changes",
  [
    {"budget_bytes": 0},
    {"budget_bytes": -1},
    {"budget_bytes": 4 * MIB},
    {"max_sequences": 0},
    {"max_length": 0},
  ],
)
def test_a_memory_that_holds_nothing_is_refused(changes):
  with pytest.raises(errors.LedgerError):
    plan(**changes)


@pytest.mark.parametrize(
  ("num_tokens", "shared"), [(0, 0), (4097, 0), (10, 11), (10, -1)]
)
def test_sequences_that_cannot_be_are_refused(num_tokens, shared):
  with pytest.raises(errors.LedgerError):
    plan().sequences_of(num_tokens, shared_tokens=shared)
