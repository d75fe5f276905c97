"""One pool: its partition, its generations, and what it refuses."""

import numpy as np
import pytest

from host_allocator import errors
from host_allocator import pages


def states(pool):
  return [pool.state(page).value for page in range(1, pool.num_pages + 1)]


def test_a_page_walks_through_its_four_states():
  pool = pages.PagePool(page_size=4, num_pages=3)
  assert states(pool) == ["free"] * 3
  taken = pool.take(2)
  assert taken.tolist() == [1, 2]
  assert states(pool) == ["reserved", "reserved", "free"]
  pool.commit(taken)
  pool.publish(taken[:1])
  assert states(pool) == ["live", "live", "free"]
  pool.drop(taken)
  assert states(pool) == ["evictable", "free", "free"]
  assert pool.withdraw(taken[:1]) == 1
  assert states(pool) == ["free"] * 3
  assert pool.usage() == pages.PoolUsage(3, 3, 0, 0, 0)


def test_reserved_pages_come_back_free_under_a_new_generation():
  pool = pages.PagePool(4, 2)
  first = pool.take(1)
  before = pool.generations[first].copy()
  pool.give_back(first)
  again = pool.take(1)
  assert again == first
  assert pool.generations[again] == before + 1


def test_the_null_page_is_never_given_out():
  pool = pages.PagePool(4, 5)
  assert sorted(pool.take(5).tolist()) == [1, 2, 3, 4, 5]
  with pytest.raises(errors.OutOfPages, match="needed=1"):
    pool.take(1)


@pytest.mark.parametrize("release", ["drop", "unlease"])
def test_letting_go_once_too_often_is_refused_and_changes_nothing(release):
  pool = pages.PagePool(4, 3)
  held = pool.take(2)
  pool.commit(held)
  pool.lease(held)
  getattr(pool, release)(held[:1])
  before = [pool.references.copy(), pool.leases.copy(), pool.usage()]
  with pytest.raises(errors.DoubleFree, match=r"pages \[1\] have no"):
    getattr(pool, release)(held)
  np.testing.assert_array_equal(pool.references, before[0])
  np.testing.assert_array_equal(pool.leases, before[1])
  assert pool.usage() == before[2]


def test_a_leased_page_is_live_without_any_table():
  pool = pages.PagePool(4, 2)
  page = pool.take(1)
  pool.commit(page)
  pool.lease(page)
  pool.drop(page)
  assert pool.state(1) is pages.PageState.LIVE
  pool.unlease(page)
  assert pool.state(1) is pages.PageState.FREE


def test_a_page_under_two_entries_counts_once_as_evictable():
  pool = pages.PagePool(4, 2)
  page = pool.take(1)
  pool.commit(page)
  pool.publish(page)
  pool.publish(page)
  pool.drop(page)
  assert pool.usage().evictable == 1
  assert pool.withdraw(page) == 0
  assert pool.usage().evictable == 1
  assert pool.withdraw(page) == 1
  assert pool.usage() == pages.PoolUsage(2, 2, 0, 0, 0)


def test_matching_revives_an_evictable_page():
  pool = pages.PagePool(4, 2)
  page = pool.take(1)
  pool.commit(page)
  pool.publish(page)
  pool.drop(page)
  pool.hold(page)
  assert pool.usage() == pages.PoolUsage(2, 1, 0, 1, 0)
