"""What both prefix indexes give up, in which order, and what they keep."""

import numpy as np
import pytest

from host_allocator.prefix import eviction

A = list(range(100, 120))


def node_count(cache):
  return sum(len(list(cache.index.nodes(root))) for root in cache.index.roots())


def evicted_first(b, *, evict=1):
  """Which of four stored prompts lose their page when one must go."""
  b.cache.index.evict([evict])
  assert b.cache.audit() == ()
  return [i for i in range(4) if not b.matched([i] * 4 + [99])]


@pytest.mark.parametrize(
  ("policy", "victim"),
  [
    ("lru", 1),
    ("lfu", 3),
    ("fifo", 0),
    ("mru", 2),
    ("filo", 3),
    ("priority", 1),
    ("segmented_lru", 3),
  ],
)
def test_each_policy_picks_its_own_victim(indexed, policy, victim):
  b = indexed(eviction=policy, num_pages=16)
  for i in range(4):
    b.store([i] * 4, priority=1 if i == 1 else 2)
  for i in (0, 1, 1, 3, 0, 2):
    if policy in ("lfu", "segmented_lru") and i == 3:
      continue  # Never found again.
    b.matched([i] * 4 + [98])
  if policy == "lru":
    for i in (0, 2, 3):
      b.matched([i] * 4 + [97])
  assert evicted_first(b) == [victim]


def test_every_policy_has_a_rank():
  assert set(eviction.POLICIES) == {
    "lru",
    "lfu",
    "fifo",
    "mru",
    "filo",
    "priority",
    "segmented_lru",
  }


def test_trimming_takes_the_tail_and_whole_edges_the_edge(bench):
  for whole, left in ((False, 16), (True, 0)):
    b = bench(evict_whole_edges=whole)
    b.store(A)
    assert b.cache.index.evict([1]) == [5 if whole else 1]
    assert b.matched([*A, 1]) == left


def test_parents_go_after_their_last_child(indexed):
  b = indexed()
  b.store(A[:8])
  b.store([*A[:8], 1, 1, 1, 1])
  b.store([*A[:8], 2, 2, 2, 2])
  assert b.cache.index.evict([2]) == [2]
  assert b.matched([*A[:8], 1]) == 8
  assert b.cache.index.evict([9]) == [2]
  assert node_count(b.cache) == 0
  assert list(b.cache.index.roots()) == []


def test_nothing_that_a_sequence_holds_is_evicted(indexed):
  b = indexed()
  holder = b.open(A)
  b.store([*A, 1, 2, 3, 4])
  assert b.cache.index.evict([32]) == [1]
  b.decode(holder, 5)
  assert b.matched([*A, 1]) == 20


def test_a_page_recycled_for_other_tokens_is_not_found_under_the_old_key(
  indexed,
):
  b = indexed(num_pages=5)
  b.store(A)
  b.store([7] * 20)
  assert b.matched(A) == 0
  assert b.matched([7] * 20) == 19


def test_a_split_moves_no_page_and_changes_no_reference(bench):
  b = bench()
  holder = b.open(A)
  pages = holder.pages()
  counts = b.cache.pools[0].references.copy()
  other = b.cache.open([*A[:12], 5, 5])
  assert node_count(b.cache) == 2
  assert holder.pages().tolist() == pages.tolist()
  counts[pages[:3]] += 1
  np.testing.assert_array_equal(b.cache.pools[0].references, counts)
  b.cache.close(other)
  b.decode(holder, 1, 2, 3, 4, 5)


def test_a_growing_sequence_is_one_edge(bench):
  b = bench()
  sequence = b.cache.open([*A, *A])
  for _ in range(8):
    b.run((sequence, 5))
  b.decode(sequence, *range(9))
  assert node_count(b.cache) == 1
  b.cache.close(sequence)
  assert node_count(b.cache) == 1
  assert b.matched([*A, *A, *range(9), 1]) == 49


def test_unequal_groups_give_up_exactly_what_is_short(indexed):
  b = indexed((2, 4), num_pages=(10, 5))
  b.store(A)
  late = b.cache.open([3] * 6)
  b.run(late)
  # Three and two pages are short; a bundle has two and one.
  assert [pool.free for pool in b.cache.usage()] == [1, 0]
