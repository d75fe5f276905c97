"""The queue of victims, against a list that is sorted anew each time."""

import random

import pytest

from host_allocator.prefix import base
from host_allocator.prefix import eviction


def make_node(clock):
  return base.Node(base.Root(("root",)), None, 0, clock)


@pytest.mark.parametrize("policy", eviction.POLICIES)
def test_the_queue_agrees_with_sorting(policy):
  draw = random.Random(policy)
  queue, waiting = eviction.EvictionQueue(policy), []
  rank = eviction.POLICIES[policy]
  for clock in range(3000):
    action = draw.random()
    if action < 0.5 or not waiting:
      node = make_node(clock)
      node.priority = draw.randrange(3)
      waiting.append(node)
      queue.push(node)
    elif action < 0.7:  # Used while it waits, and filed again by its release.
      node = draw.choice(waiting)
      node.last_used, node.hits = clock, node.hits + 1
      queue.push(node)
    elif action < 0.8:
      node = waiting.pop(draw.randrange(len(waiting)))
      queue.forget(node)
    else:
      node = queue.first()
      assert rank(node) == min(map(rank, waiting))
      queue.pop()
      waiting.remove(node)
    assert len(queue) < 2 * len(waiting) + 140
  found = []
  while (node := queue.first()) is not None:
    found.append(rank(node))
    queue.pop()
  assert found == sorted(map(rank, waiting))


def test_a_rank_that_rose_unseen_is_noticed_when_it_is_met():
  queue = eviction.EvictionQueue("lru")
  first, second = make_node(1), make_node(2)
  queue.push(first)
  queue.push(second)
  first.last_used = 3
  assert queue.first() is second
  queue.pop()
  assert queue.first() is first


def test_an_empty_queue_has_no_victim():
  assert eviction.EvictionQueue("lru").first() is None
