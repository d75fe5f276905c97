"""Batches that decode step after step, beside ones looked up every time."""

import random

import numpy as np
import pytest

from host_allocator import errors
from host_allocator import tables

SIZES = ((4,), (4, 8), (2,))


class Twins:
  """Two equal allocators: one keeps a batch, the other is handed lists."""

  def __init__(self, bench, page_sizes, **options):
    self.caches = [
      bench(page_sizes, num_pages=128, **options).cache for _ in range(2)
    ]
    self.members = [[], []]
    self.packing = tables.Packing(
      tables.StepShape(4, 4), self.caches[0].table_widths
    )

  def open(self, tokens):
    for cache, members in zip(self.caches, self.members, strict=True):
      sequence = cache.open(tokens)
      rows = sequence.num_tokens - sequence.length
      cache.commit(cache.plan([(sequence, rows)]))
      members.append(sequence)
    self.batch = self.caches[0].batch(self.members[0])

  def append(self, token):
    tokens = [token + i for i in range(len(self.members[0]))]
    self.caches[0].append(self.batch, tokens)
    self.caches[1].append(self.members[1], tokens)

  def step(self, end="commit"):
    """A step of both, equal in every array and in what it leaves."""
    steps = self.batch, [(member, 1) for member in self.members[1]]
    plans = [c.plan(s) for c, s in zip(self.caches, steps, strict=True)]
    one, other = [
      c.pack(p, self.packing) for c, p in zip(self.caches, plans, strict=True)
    ]
    np.testing.assert_array_equal(one, other)
    for cache, plan in zip(self.caches, plans, strict=True):
      getattr(cache, end)(plan)
    self.compare()
    return one

  def compare(self):
    one, other = self.caches
    assert one.state_digest() == other.state_digest()
    assert one.audit() == other.audit() == ()

  def both(self, change):
    """The same change of each."""
    for cache, members in zip(self.caches, self.members, strict=True):
      change(cache, members)
    self.compare()


def fork_and_close(cache, members):
  cache.close(cache.fork(members[0]))


def fork_and_write(cache, members):
  child = cache.fork(members[1])
  cache.append([child], [99])
  cache.commit(cache.plan([(child, child.num_tokens - child.length)]))
  cache.close(child)


def lease_and_release(cache, members):
  cache.release(cache.lease(members[1]))


def cut_back(cache, members):
  for member in members:
    if member.length > 8:
      cache.truncate(member, member.length - 3)


def open_beside(cache, members):
  tokens = members[0].tokens[:7].tolist()
  sequence = cache.open([*tokens, 90, 91])
  rows = sequence.num_tokens - sequence.length
  cache.commit(cache.plan([(sequence, rows)]))
  cache.close(sequence)


def open_the_same(cache, members):
  sequence = cache.open(members[1].tokens.tolist())
  cache.close(sequence)


def step_alone(cache, members):
  cache.append([members[0]], [77])
  cache.commit(cache.plan([(members[0], 1)]))


def forget(cache, members):
  cache.drop_index()


CHANGES = (
  fork_and_close,
  fork_and_write,
  lease_and_release,
  cut_back,
  open_beside,
  open_the_same,
  step_alone,
  forget,
)


@pytest.mark.parametrize("page_sizes", SIZES)
@pytest.mark.parametrize("index", ["radix", "hash_chain", None])
def test_a_kept_batch_does_what_lists_do_whatever_comes_between(
  bench, page_sizes, index
):
  draw = random.Random(str((page_sizes, index)))
  for _ in range(3):
    twins = Twins(bench, page_sizes, prefix_index=index)
    for first in (1, 1, 30):
      twins.open([first, *range(draw.randrange(1, 12))])
    for token in range(100, 135):
      if draw.random() < 0.2:
        twins.both(draw.choice(CHANGES))
      twins.append(token)
      if draw.random() < 0.1:
        twins.both(draw.choice(CHANGES[2:3] + CHANGES[5:6]))
      while draw.random() < 0.2:
        twins.step("abort")
      twins.step()


def test_two_tokens_ahead_and_a_full_sequence_are_as_without_a_stride(bench):
  cache = bench(max_length=8).cache
  sequence = cache.open([1, 2])
  cache.commit(cache.plan([(sequence, 2)]))
  batch = cache.batch([sequence])
  for token in (3, 4, 5):
    cache.append(batch, [token])
    cache.commit(cache.plan(batch))
  cache.append(batch, [6])
  cache.append(batch, [7])
  cache.commit(cache.plan(batch))
  cache.commit(cache.plan(batch))
  cache.append(batch, [8])
  with pytest.raises(errors.PromptTooLong, match="max_length=8"):
    cache.append(batch, [9])
  cache.commit(cache.plan(batch))
  with pytest.raises(errors.PromptTooLong, match="max_length=8"):
    cache.append(batch, [9])
  with pytest.raises(errors.BadStep, match=r"rows 8\.\.8 asked"):
    cache.plan(batch)
  assert sequence.tokens.tolist() == list(range(1, 9))
  assert cache.audit() == ()


def address(buffer):
  return buffer.__array_interface__["data"][0]


def decoding(bench):
  twins = Twins(bench, (4,))
  for first in (1, 30):
    twins.open([first, 2, 3])
  for token in range(100, 104):
    twins.append(token)
    twins.step()
  return twins


def test_a_buffer_is_lent_again_once_nobody_holds_it(bench):
  twins = decoding(bench)
  seen = []
  for token in range(110, 120):
    twins.append(token)
    seen.append(address(twins.step()))
  assert len(set(seen)) < len(seen)


@pytest.mark.parametrize(
  "hold",
  [
    lambda buffer: buffer,
    lambda buffer: buffer[3:7],
    lambda buffer: buffer.reshape(1, -1).T,
    memoryview,
    lambda buffer: np.frombuffer(buffer, np.uint8),
  ],
)
def test_a_buffer_that_is_held_is_never_written_to_again(bench, hold):
  twins = decoding(bench)
  held = []
  for token in range(110, 122):
    twins.append(token)
    view = hold(twins.step())
    held.append((view, np.array(view)))
  for view, copy in held:
    np.testing.assert_array_equal(np.asarray(view), copy)
