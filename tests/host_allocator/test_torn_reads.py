"""Readers beside a writer see complete states only, and faults leave them so."""

import sys
import threading
import time

import numpy as np
import pytest

from host_allocator import errors

PROMPT = list(range(10))


# Threads ---------------------------------------------------------------------


READS = {
  "length": lambda cache, sequence, held: sequence.length,
  "num_tokens": lambda cache, sequence, held: sequence.num_tokens,
  "tokens": lambda cache, sequence, held: sequence.tokens,
  "table_version": lambda cache, sequence, held: sequence.table_version,
  "pages": lambda cache, sequence, held: sequence.pages(),
  "repr": lambda cache, sequence, held: repr(sequence),
  "usage": lambda cache, sequence, held: cache.usage(),
  "audit": lambda cache, sequence, held: cache.audit(),
  "state_digest": lambda cache, sequence, held: cache.state_digest(),
  "drain_events": lambda cache, sequence, held: cache.drain_events(),
  "handles": lambda cache, sequence, held: cache.handles(sequence),
  "check_handle": lambda cache, sequence, held: cache.check_handle(held),
  "check_receipt": lambda cache, sequence, held: cache.check_receipt(
    sequence.receipt
  ),
}


@pytest.mark.parametrize("name", READS)
def test_a_reader_waits_for_the_transaction_under_way(bench, name):
  b = bench()
  sequence = b.open(PROMPT)
  ((held, *_),) = b.cache.handles(sequence)
  answers = []

  def read():
    answers.append(READS[name](b.cache, sequence, held))

  with b.cache.lock:
    reader = threading.Thread(target=read)
    reader.start()
    reader.join(0.02)
    assert not answers, f"{name} was answered in the midst of a transaction"
  reader.join(5)
  assert len(answers) == 1


@pytest.fixture
def hasty():
  """Threads that take turns as often as they can."""
  before = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  yield
  sys.setswitchinterval(before)


def run_beside(write, read, *, seconds=0.7):
  """Repeats `write` beside three threads of `read`; raises what they raise."""
  failures, stop = [], threading.Event()

  def work():
    try:
      while not stop.is_set():
        read()
    except BaseException as error:
      failures.append(error)

  readers = [threading.Thread(target=work) for _ in range(3)]
  for reader in readers:
    reader.start()
  deadline = time.monotonic() + seconds
  while time.monotonic() < deadline and not failures:
    write()
  stop.set()
  for reader in readers:
    reader.join()
  if failures:
    raise failures[0]


def test_readers_never_see_a_table_half_cut(bench, hasty):
  cache = bench(num_pages=64).cache
  shown = [cache.open(list(range(40)))]
  cache.commit(cache.plan([(shown[0], 40)]))

  def write():
    child = cache.fork(shown[0])
    cache.truncate(shown[0], 3)
    old, shown[0] = shown[0], child
    cache.close(old)

  def read():
    try:
      pages = shown[0].pages()
    except errors.SequenceClosed:
      return
    assert len(pages) in (1, 10), pages
    assert np.all(pages > 0), pages

  run_beside(write, read)
  assert cache.audit() == ()


def test_readers_never_see_the_tokens_of_another_sequence(bench, hasty):
  cache = bench(num_pages=64, max_sequences=1).cache
  shown = [(cache.open([0] * 30), 0)]

  def write():
    old, number = shown[0]
    cache.close(old)
    number += 1
    shown[0] = cache.open([number % 2] * (30 + number % 2)), number

  def read():
    sequence, number = shown[0]
    try:
      tokens, known = sequence.tokens, sequence.num_tokens
    except errors.SequenceClosed:
      return
    assert tokens.tolist() == [number % 2] * (30 + number % 2)
    assert known == 30 + number % 2

  run_beside(write, read)


def test_tokens_that_were_read_stay_as_they_were(bench):
  """A view of them would show the next tenant's prompt."""
  cache = bench(max_sequences=1).cache
  sequence = cache.open(PROMPT, namespace="one")
  tokens = sequence.tokens
  cache.close(sequence)
  cache.open([9] * 10, namespace="another")
  assert tokens.tolist() == PROMPT
  with pytest.raises(ValueError, match="read-only"):
    tokens[0] = 1


# Faults ----------------------------------------------------------------------


class InjectedError(Exception):
  """Raised in a phase by the test."""


def strike(cache, phase, *, after=0):
  """Makes one phase fail, the one after so many of its kind."""
  left = [after]

  def on_phase(name):
    if name == phase:
      if not left[0]:
        cache.on_phase = None
        raise InjectedError(name)
      left[0] -= 1

  cache.on_phase = on_phase


PLACES = ("match.pinned", "match.settled")
# Whole pages, a partly matching page, and a whole prompt.
FOUND = {"pages": [*range(8), 90, 91], "tail": [*range(9), 90], "all": PROMPT}


@pytest.mark.parametrize("policy", ["copy_rows", "full_pages"])
@pytest.mark.parametrize("found", FOUND)
@pytest.mark.parametrize("phase", PLACES)
def test_a_fault_after_pinning_gives_back_what_was_pinned(
  indexed, phase, found, policy
):
  b = indexed((2, 4), tail_policy=policy)
  holder = b.open(PROMPT)
  b.store([*range(8), 70, 71, 72])
  before = b.cache.state_digest()
  strike(b.cache, phase)
  with pytest.raises(InjectedError, match=phase):
    b.cache.open(FOUND[found])
  assert b.cache.state_digest() == before
  assert b.cache.audit() == ()
  b.cache.close(holder)
  b.cache.drop_index()
  assert [pool.live for pool in b.cache.usage()] == [0, 0]
  assert [pool.free for pool in b.cache.usage()] == [32, 32]


@pytest.mark.parametrize("phase", PLACES)
@pytest.mark.parametrize("computed", [2, 5])
def test_a_fault_when_looking_again_leaves_the_sequence_as_it_was(
  indexed, phase, computed
):
  b = indexed()
  follower = b.cache.open([*PROMPT, 7])
  b.run((follower, computed))
  b.open(PROMPT)
  before = b.cache.state_digest()
  strike(b.cache, phase)
  with pytest.raises(InjectedError, match=phase):
    b.cache.rematch(follower)
  assert b.cache.state_digest() == before
  assert b.cache.audit() == ()
  assert b.cache.rematch(follower) == 10 - computed
  b.run(follower)


def test_a_priority_that_cannot_be_compared_leaves_no_reference(indexed):
  b = indexed(eviction="priority")
  holder = b.open(PROMPT)
  before = b.cache.state_digest()
  for priority in ("hi", None, float("nan")):
    with pytest.raises(errors.BadArgument, match="priority="):
      b.cache.open(PROMPT, priority=priority)
  assert b.cache.state_digest() == before
  b.cache.close(holder)  # Somebody else's close has nothing to compare.
  b.cache.drop_index()
  assert b.cache.usage()[0].free == 32


@pytest.mark.parametrize("group", [0, 1])
def test_a_fault_between_two_tables_of_a_commit_shows_half_of_no_step(
  indexed, group
):
  b = indexed((4, 8))
  old, new = b.open([5] * 9), b.cache.open(PROMPT)
  plan = b.cache.plan([(new, 10)])
  b.device.run(plan)
  strike(b.cache, "commit.entering", after=group)
  with pytest.raises(InjectedError):
    b.cache.commit(plan)
  assert b.cache.audit() == ()
  assert b.cache.open_plan is None
  for sequence in (old, new):
    with pytest.raises(errors.DeviceLost, match="are gone"):
      _ = sequence.length
  assert [pool.free for pool in b.cache.usage()] == [32, 32]
  assert b.matched(PROMPT) == 0
  b.store(PROMPT)
  assert b.matched(PROMPT) == 9


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("is_decode", [False, True])
def test_a_fault_in_the_index_costs_matches_and_no_rows(
  indexed, after, is_decode
):
  b = indexed(tail_policy="full_pages")
  members = [b.open([token] * 3) for token in (1, 2, 3)]
  for token in (4, 5, 6, 7, 8):
    b.cache.append(members, [token] * 3)
    if is_decode and token < 8:
      b.run(*members)
  cancelled = members[2]
  rows = members[0].num_tokens - members[0].length
  # Into the fourth page as a whole, where the index is told of it.
  plan = b.cache.plan([(member, rows) for member in members])
  b.cache.cancel(cancelled)
  b.device.run(plan)
  strike(b.cache, "commit.indexing", after=after)
  try:
    b.cache.commit(plan)
  except InjectedError:
    struck = True
  else:
    struck = False
    b.cache.on_phase = None
  # Growing a batch of leaves is one operation, in which nothing is struck.
  assert struck or is_decode
  assert b.cache.open_plan is None
  assert not cancelled.is_open
  for member in members[:2]:
    assert member.length == 8
  b.device.check_all()
  for member in members[:2]:
    b.decode(member, 9, 9, 9, 9)
    b.cache.close(member)
  b.device.check_all()
  assert b.cache.usage()[0].live == 0
