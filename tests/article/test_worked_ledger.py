"""§0x0D: the worked ledger, measured on a running allocator."""

import pytest

from host_allocator import ledger
from host_allocator import metadata
from host_allocator import snapshots
from tests.article import driver

KIB, MIB = driver.KIB, driver.MIB
LENGTHS = {"A": 33, "B": 25, "C": 16}
RESERVED = {"A": 64, "B": 48, "C": 32}
TOKENS = list(range(33))


@pytest.fixture(params=["radix", "hash_chain"])
def family(request):
  """A computes 33 rows; B and C are exact prefixes that share its pages."""
  allocator = driver.make(driver.one_group(), 8, prefix_index=request.param)
  opened = {"A": driver.prefilled(allocator, TOKENS)}
  for name in "BC":
    opened[name] = allocator.fork(opened["A"])
    allocator.truncate(opened[name], LENGTHS[name])
  return allocator, opened


@pytest.fixture
def total(family):
  allocator, opened = family
  reserved = {opened[name]: rows for name, rows in RESERVED.items()}
  found = snapshots.ledger_of(allocator, reserved)
  assert ledger.verify(found) == ()
  return found.total


def test_row_and_page_bytes_of_one_rank():
  group = driver.one_group().groups[0]
  assert group.row_bytes == 65_536 == 64 * KIB
  assert group.page_bytes == MIB


def test_rectangular_reservations(total):
  assert total.logical_bytes == 74 * 64 * KIB == int(4.625 * MIB)
  assert total.reserved_bytes == 144 * 64 * KIB == 9 * MIB
  assert total.slack_bytes == 70 * 64 * KIB == int(4.375 * MIB)


def test_page_references(total):
  assert total.page_references == 6
  assert total.reference_capacity_bytes == 6 * MIB
  assert total.reference_tail_bytes == 22 * 64 * KIB == int(1.375 * MIB)


def test_unique_pages(total):
  assert total.unique_pages == 3
  assert total.materialized_bytes == 33 * 64 * KIB == int(2.0625 * MIB)
  assert total.capacity_bytes == 3 * MIB
  assert total.tail_bytes == 15 * 64 * KIB == int(0.9375 * MIB)


def test_what_sharing_saves(total):
  assert total.deduplicated_bytes == int(2.5625 * MIB)
  assert total.avoided_capacity_bytes == 3 * MIB


def test_the_pool(total):
  assert total.pool_bytes == 8 * MIB
  assert total.live_bytes == 3 * MIB
  assert total.idle_bytes == 5 * MIB


def test_metadata(family):
  allocator, _ = family
  sizes = metadata.RecordBytes(
    map_entry=4,
    page_descriptor=32,
    hash_entry=24,
    request_tail=2,
    free_entry=4,
    fixed=128,
  )
  parts = metadata.metadata_bytes(sizes, snapshots.record_counts(allocator))
  assert parts == {
    "map_entries": 24,
    "page_descriptors": 256,
    "hash_entries": 48,
    "request_tails": 6,
    "free_entries": 20,
    "fixed": 128,
    "total": 482,
  }


@pytest.mark.parametrize("page_size", [4, 8, 16, 32, 64])
def test_smaller_pages_trade_tails_for_records(page_size):
  """§0x09B: a pool of 128 rows, cut into pages of several sizes."""
  # Entries of all tables, descriptors, whole pages, free pages, and bytes of
  # them all at 4, 32, 24 and 4 a piece, 2 for each request and 128 for all.
  references, descriptors, whole, free, metadata_total = {
    4: (20, 32, 8, 23, 80 + 1024 + 192 + 92 + 6 + 128),
    8: (11, 16, 4, 11, 44 + 512 + 96 + 44 + 6 + 128),
    16: (6, 8, 2, 5, 482),
    32: (4, 4, 1, 2, 16 + 128 + 24 + 8 + 6 + 128),
    64: (3, 2, 0, 1, 12 + 64 + 0 + 4 + 6 + 128),
  }[page_size]
  allocator = driver.make(driver.one_group(page_size), 128 // page_size)
  longest = driver.prefilled(allocator, TOKENS)
  for name in "BC":
    allocator.truncate(allocator.fork(longest), LENGTHS[name])
  counts = snapshots.record_counts(allocator)
  assert counts.map_entries == references
  assert counts.page_descriptors == descriptors
  assert counts.requests == 3
  assert (counts.hash_entries, counts.free_entries) == (whole, free)
  sizes = metadata.RecordBytes(4, 32, 24, 2, 4, fixed=128)
  assert metadata.metadata_bytes(sizes, counts)["total"] == metadata_total
  total = snapshots.ledger_of(allocator).total
  row = 64 * KIB
  unique_tail = {4: 3, 8: 7, 16: 15, 32: 31, 64: 31}[page_size]
  assert total.tail_bytes == unique_tail * row
  # Each table's own last page, shared or not: 33, 25 and 16 rows.
  views = {4: 6, 8: 14, 16: 22, 32: 54, 64: 118}[page_size]
  assert total.reference_tail_bytes == views * row
  assert total.logical_bytes == 74 * row


def test_a_ledger_follows_the_pool_to_its_end(family):
  allocator, opened = family
  for sequence in opened.values():
    allocator.close(sequence)
  total = snapshots.ledger_of(allocator).total
  assert total.logical_bytes == total.capacity_bytes == 0
  assert total.evictable_bytes == 3 * MIB
  assert total.idle_bytes == 8 * MIB


def model_wide():
  """32 layers with all 8 K/V heads in two bytes, unsharded."""
  return driver.layout.CacheLayout.uniform(
    num_layers=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16"
  )


def test_a_long_prompt_and_the_growth_of_its_answer():
  group = model_wide().groups[0]
  assert group.row_bytes == 131_072 == 128 * KIB
  assert group.page_bytes == 2 * MIB
  assert group.pages_for(4096) == 256
  assert group.pages_for(4096) * group.page_bytes == 512 * MIB
  assert 1024 * group.row_bytes == 128 * MIB
  assert 1023 * group.row_bytes == int(127.875 * MIB)


@pytest.mark.parametrize("index", ["radix", "hash_chain"])
def test_a_long_hit_skips_its_prefill(index):
  allocator = driver.make(
    model_wide(), 600, max_length=5200, prefix_index=index
  )
  prompt = list(range(4096))
  driver.prefilled(allocator, prompt)
  other = allocator.open([*prompt[:3072], *range(9000, 10024)])
  assert other.matched_tokens == 3072
  assert len(other.receipt.group_pages[0]) == 192
  assert other.num_tokens - other.matched_tokens == 1024
  plan = allocator.plan([(other, 1024)])
  assert allocator.usage()[0].reserved == 64
  allocator.commit(plan)
  for token in range(1024):
    allocator.append([other], [token])
    if token < 1023:  # The last token drawn is never a row.
      driver.compute(allocator, other)
  assert other.length == 4096 + 1023
  grown = other.length - 4096
  assert grown * allocator.layout.row_bytes == int(127.875 * MIB)
