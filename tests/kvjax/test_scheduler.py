"""Who runs when: the scheduler over a real allocator, without any device."""

import math
import random

import numpy as np
import pytest

from host_allocator import allocator as allocators
from host_allocator import errors
from host_allocator import layout as layouts
from kvjax import prefixes
from kvjax import request as requests
from kvjax import scheduler as schedulers
from kvjax import stats as stats_lib

VOCAB = 50


def next_token(tokens):
  """A model whose next token depends on every token before it."""
  value = 7
  for token in tokens:
    value = (value * 31 + token + 1) % 1_000_003
  return value % VOCAB


def continuation(prompt, max_tokens):
  tokens = list(prompt)
  for _ in range(max_tokens):
    tokens.append(next_token(tokens))
  return tokens[len(prompt) :]


class World:
  """A scheduler, its allocator, and steps that compute nothing."""

  def __init__(
    self,
    *,
    num_pages=64,
    page_size=4,
    max_sequences=4,
    token_budget=16,
    prefix_index="radix",
  ):
    layout = layouts.CacheLayout.uniform(
      num_layers=1, num_kv_heads=1, head_dim=1, page_size=page_size
    )
    self.allocator = allocators.KVAllocator(
      layout,
      num_pages=num_pages,
      max_sequences=max_sequences,
      max_length=num_pages * page_size,
      prefix_index=prefix_index,
    )
    self.stats = stats_lib.EngineStats()
    self.token_budget = token_budget
    self.scheduler = schedulers.Scheduler(
      self.allocator,
      token_budget=token_budget,
      max_sequences=max_sequences,
      shares_prefixes=prefix_index is not None,
      stats=self.stats,
    )
    self.preempted = []
    preempt = self.scheduler.preempt
    self.scheduler.preempt = lambda sample: (
      self.preempted.append(sample),
      preempt(sample),
    )
    self.requests = []

  def submit(self, prompt, max_tokens=3, namespace="", n=1):
    params = requests.SamplingParams(max_tokens=max_tokens, n=n)
    request = requests.Request(
      len(self.requests),
      np.array(prompt, np.int32),
      params,
      seed=0,
      namespace=namespace,
    )
    request.samples = tuple(
      requests.Sample(
        request,
        index,
        max_length=len(prompt) + max_tokens,
        stop_tokens=frozenset(),
        text_stream=None,
      )
      for index in range(n)
    )
    for sample in request.samples:
      self.scheduler.add(sample)
    self.requests.append(request)
    return request

  def step(self):
    """One step; returns `{(request, sample): rows}` of what it computed."""
    batch = self.scheduler.schedule()
    plan = None
    while batch and plan is None:
      try:
        plan = self.allocator.plan([(s.sequence, n) for s, n in batch])
      except errors.OutOfPages as error:
        batch = self.scheduler.make_room(batch, error)
    if plan is None:
      return {}
    assert sum(count for _, count in batch) <= self.token_budget
    self.allocator.commit(plan)
    self.scheduler.commit(batch)
    self.stats.steps += 1
    for sample, _ in batch:
      assert sample.sequence.length == sample.computed
      if sample.remaining:
        continue
      event = sample.accept(next_token(sample.tokens))
      if event.finish_reason is None:
        self.allocator.append([sample.sequence], [event.token])
      else:
        self.scheduler.leave(sample)
    return {(s.request.id, s.index): count for s, count in batch}

  def cancel(self, request):
    for sample in request.samples:
      if sample.finish_reason is None:
        sample.end(requests.FinishReason.CANCELLED)
        self.scheduler.leave(sample)

  def finish(self, most_steps=2_000):
    steps = []
    while not all(request.is_finished for request in self.requests):
      steps.append(self.step())
      assert len(steps) < most_steps, "starved"
    return steps

  def check_whole(self):
    """Everything was given back, and nothing is out of order."""
    assert self.allocator.audit() == ()
    [use] = self.allocator.usage()
    assert (use.live, use.reserved) == (0, 0)


def prompt(length, seed):
  return random.Random(seed).choices(range(VOCAB), k=length)


def test_decodes_come_first_then_prefills_in_order_of_arrival():
  world = World(token_budget=10, max_sequences=3)
  world.submit(prompt(4, 1), max_tokens=9)
  world.submit(prompt(14, 2), max_tokens=9)
  world.submit(prompt(9, 3), max_tokens=9)
  assert world.step() == {(0, 0): 4, (1, 0): 6}
  assert world.step() == {(0, 0): 1, (1, 0): 8, (2, 0): 1}
  assert world.step() == {(0, 0): 1, (1, 0): 1, (2, 0): 8}
  assert world.step() == {(0, 0): 1, (1, 0): 1, (2, 0): 1}


def test_a_budget_below_the_number_of_decodes_goes_round():
  world = World(token_budget=3, max_sequences=4)
  world.submit(prompt(3, 0), max_tokens=30, n=4)
  world.step()
  turns = [world.step() for _ in range(8)]
  assert all(len(turn) == 3 for turn in turns)
  served = [sum((0, i) in turn for turn in turns) for i in range(4)]
  assert served == [6, 6, 6, 6]


def test_what_waits_holds_nothing():
  world = World(max_sequences=1)
  first, second = world.submit(prompt(4, 1)), world.submit(prompt(4, 2))
  world.step()
  assert first.samples[0].sequence is not None
  assert second.samples[0].sequence is None
  assert world.allocator.usage()[0].live == 1
  world.finish()
  world.check_whole()


def test_a_prefix_that_arrives_twice_is_computed_once():
  world = World(token_budget=8)
  shared = prompt(21, 0)
  for seed in range(3):
    world.submit([*shared, *prompt(5, 10 + seed)], max_tokens=2)
  world.finish()
  assert world.stats.computed_tokens == 21 + 3 * 5 + 3 * 1
  assert [r.matched_tokens for r in world.requests] == [0, 21, 21]
  for request in world.requests:
    given = request.prompt_tokens.tolist()
    assert request.samples[0].tokens[len(given) :] == continuation(given, 2)
  world.check_whole()


def test_the_very_same_prompt_is_computed_once():
  world = World(token_budget=64)
  for _ in range(4):
    world.submit(prompt(33, 0), max_tokens=1)
  world.finish()
  assert [r.matched_tokens for r in world.requests] == [0, 32, 32, 32]
  assert world.stats.computed_tokens == 33 + 3
  world.check_whole()


def test_followers_hold_nothing_until_the_leaders_rows_are_there():
  world = World(token_budget=8)
  shared = prompt(24, 0)
  leader = world.submit([*shared, 1, 2, 3], max_tokens=9)
  follower = world.submit([*shared, 4, 5, 6], max_tokens=9)
  while leader.samples[0].computed < 24:
    assert follower.samples[0].sequence is None
    world.step()
  world.step()
  assert follower.samples[0].computed > 24
  assert follower.matched_tokens == 24


def test_a_follower_lets_unrelated_requests_pass():
  world = World(token_budget=16)
  shared = prompt(40, 0)
  world.submit([*shared, 1])
  world.submit([*shared, 2])
  world.submit(prompt(3, 5))
  world.step()
  world.step()
  assert set(world.step()) == {(0, 0), (2, 0)}


@pytest.mark.parametrize("end", ["cancel", "preempt"])
def test_when_a_leader_dies_the_next_in_line_leads(end):
  world = World(token_budget=8)
  shared = prompt(30, 0)
  leader, heir, third = (
    world.submit([*shared, i, i, i], max_tokens=2) for i in range(3)
  )
  world.step()
  if end == "cancel":
    world.cancel(leader)
  else:
    world.scheduler.preempt(leader.samples[0])
  world.step()
  running = [s.request for s in world.scheduler.running]
  assert running == [heir if end == "cancel" else leader]
  assert third.samples[0].sequence is None
  world.finish()
  # What the dead leader had committed was found; nothing was computed twice.
  assert world.stats.computed_tokens <= 30 + 3 * 4 + 3
  assert world.stats.recomputed_tokens == 0
  world.check_whole()


def test_nobody_waits_for_another_namespace():
  world = World(token_budget=64)
  for namespace in ("a", "b"):
    world.submit(prompt(24, 0), max_tokens=1, namespace=namespace)
  assert world.step() == {(0, 0): 24, (1, 0): 24}


def test_without_an_index_nobody_waits_and_nothing_matches():
  world = World(token_budget=64, prefix_index=None)
  for _ in range(2):
    world.submit(prompt(24, 0), max_tokens=1)
  assert world.step() == {(0, 0): 24, (1, 0): 24}
  assert world.stats.matched_tokens == 0


@pytest.mark.parametrize("prefix_index", ["radix", None])
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_samples_of_a_request_share_its_prompt_by_forks(
  prefix_index, max_tokens
):
  world = World(prefix_index=prefix_index, token_budget=8)
  request = world.submit(prompt(19, 0), max_tokens=max_tokens, n=3)
  world.finish()
  assert world.stats.forked_tokens == 2 * 18
  assert world.stats.computed_tokens == 19 + 2 + 3 * (max_tokens - 1)
  expected = continuation(prompt(19, 0), max_tokens)
  assert [s.tokens[19:] for s in request.samples] == [expected] * 3
  world.check_whole()


def test_samples_beyond_the_slots_come_later():
  world = World(max_sequences=2)
  request = world.submit(prompt(10, 0), n=5)
  world.finish()
  assert [s.tokens[10:] for s in request.samples] == [
    continuation(prompt(10, 0), 3)
  ] * 5
  world.check_whole()


def test_the_latest_arrival_gives_way_when_pages_run_out():
  world = World(num_pages=6, page_size=4, token_budget=32)
  for seed in range(3):
    world.submit(prompt(7, seed), max_tokens=10)
  world.finish()
  assert world.preempted
  assert all(sample.request.id != 0 for sample in world.preempted)
  for seed, request in enumerate(world.requests):
    expected = continuation(prompt(7, seed), 10)
    assert request.samples[0].tokens[7:] == expected
  world.check_whole()


def test_no_more_give_way_than_must():
  # Four sequences of a page each and one page free. The first takes that, and
  # a step later the second needs one.
  world = World(num_pages=5, page_size=4, token_budget=12)
  for seed in range(4):
    world.submit(prompt(4 - seed, seed), max_tokens=6)
  while not world.preempted:
    world.step()
  assert [sample.request.id for sample in world.preempted] == [3]
  world.finish()
  world.check_whole()


def test_a_prompt_waits_until_all_of_it_has_room():
  world = World(num_pages=8, page_size=4, token_budget=8)
  world.submit(prompt(14, 0), max_tokens=4)
  late = world.submit(prompt(18, 1), max_tokens=2)
  while not world.requests[0].is_finished:
    assert late.samples[0].sequence is None
    world.step()
  world.finish()
  assert not world.preempted
  world.check_whole()


def test_an_older_request_is_not_overtaken_while_it_waits_for_pages():
  world = World(num_pages=8, page_size=4, token_budget=8)
  world.submit(prompt(14, 0), max_tokens=4)
  big, small = world.submit(prompt(18, 1)), world.submit(prompt(2, 2))
  while big.samples[0].sequence is None:
    assert small.samples[0].sequence is None
    world.step()
  world.finish()


def test_a_namespace_that_is_refused_ends_only_its_own_request():
  world = World()

  def refuse(tokens, *, namespace):
    if namespace == "closed":
      raise errors.NamespaceRevoked("namespace 'closed' is revoked")
    return open_sequence(tokens, namespace=namespace)

  open_sequence, world.allocator.open = world.allocator.open, refuse
  bad = world.submit(prompt(4, 0), namespace="closed")
  world.submit(prompt(4, 1))
  assert set(world.step()) == {(1, 0)}
  [(sample, error)] = world.scheduler.refused
  assert sample is bad.samples[0]
  assert error.reason == "namespace_revoked"


@pytest.mark.parametrize("prefix_index", ["radix", "hash_chain", None])
@pytest.mark.parametrize("seed", range(6))
def test_any_load_ends_with_the_same_tokens(prefix_index, seed):
  rng = random.Random(seed)
  page_size = rng.choice([1, 2, 4, 8])
  world = World(
    num_pages=math.ceil(rng.randint(30, 60) / page_size),
    page_size=page_size,
    max_sequences=rng.randint(1, 5),
    token_budget=rng.randint(1, 24),
    prefix_index=prefix_index,
  )
  stems = [prompt(rng.randint(1, 14), i) for i in range(3)]
  cancelled = set()
  for index in range(24):
    tokens = rng.choice(stems) + prompt(rng.randint(1, 8), 100 + index)
    world.submit(
      tokens, max_tokens=rng.randint(1, 7), n=rng.choice([1, 1, 1, 2, 3])
    )
    for _ in range(rng.randint(0, 3)):
      world.step()
    assert world.allocator.audit() == ()
    if rng.random() < 0.2:
      request = rng.choice(world.requests)
      if not request.is_finished:
        world.cancel(request)
        cancelled.add(request)
  world.finish()
  for request in world.requests:
    if request in cancelled:
      continue
    given = request.prompt_tokens.tolist()
    expected = continuation(given, request.params.max_tokens)
    assert [s.tokens[len(given) :] for s in request.samples] == (
      [expected] * request.params.n
    )
  world.check_whole()
  assert len(world.scheduler._registry) == 0
  assert not world.scheduler.running


def test_common_prefixes_of_every_kind():
  for first, second, length in [
    ([], [1], 0),
    ([1], [2], 0),
    ([1, 2], [1, 2], 2),
    ([1, 2], [1, 2, 3], 2),
    ([1, 2, 9, 4], [1, 2, 3, 4], 2),
  ]:
    arrays = (np.array(first, np.int32), np.array(second, np.int32))
    assert prefixes.common_prefix(*arrays) == length
