"""Decides which sample computes how many rows in the next step.

    waiting ──open──> running ──last token──> finished
       ^  |              |
       |  └─ parked      └── pre-empted: pages ran out, latest arrived first
       └──────────────────────────┘

Decodes come first, then prefill chunks in the order of arrival, as far as the
token budget goes. A sample that waits holds nothing. It is admitted in order
of arrival, when its whole prompt would fit beside everybody else's; samples
parked behind a leader (see `prefixes`) are passed over meanwhile. The oldest
sample is never pre-empted for a younger one, so each becomes the oldest and
ends.
"""

import bisect
import heapq

from host_allocator import errors
from kvjax import cache as caches
from kvjax import prefixes
from kvjax import request as requests
from kvjax import stats as stats_lib

Batch = list[tuple[requests.Sample, int]]

_LEAST_SHARED = 16  # tokens worth waiting for
_HEADROOM = 16  # tokens of room asked for after a first pre-emption
_MOST_STUCK = 3  # times in a row that a lone sample may not fit


class Scheduler:
  """The waiting and the running samples of one engine.

  Args:
    cache: where their sequences live.
    token_budget: most token rows of one step.
    max_sequences: most samples running.
    shares_prefixes: whether the cache has a prefix index.
    stats: counts matches, forks and pre-emptions.
  """

  def __init__(
    self,
    cache: caches.KVCache,
    *,
    token_budget: int,
    max_sequences: int,
    shares_prefixes: bool,
    stats: stats_lib.EngineStats,
  ):
    self._cache = cache
    self._token_budget = token_budget
    self._max_sequences = max_sequences
    self._shares_prefixes = shares_prefixes
    self._stats = stats
    page_size = min(group.page_size for group in cache.layout.groups)
    self._registry = prefixes.PrefixRegistry(
      min(page_size, _LEAST_SHARED) if shares_prefixes else None
    )
    self._last_served = (-1, -1)
    self._waiting: list[requests.Sample] = []  # a heap
    self.running: list[requests.Sample] = []  # in order of arrival
    self.refused: list[tuple[requests.Sample, errors.KVError]] = []

  @property
  def num_waiting(self) -> int:
    """Samples that hold nothing, ended ones not yet swept out included."""
    return len(self._waiting) + len(self._registry)

  def add(self, sample: requests.Sample) -> None:
    """Lets a sample wait for its turn."""
    heapq.heappush(self._waiting, sample)

  def schedule(self) -> Batch:
    """Plans the next step: admits samples and shares out the budget.

    Returns:
      `(sample, rows)` pairs; empty only when nothing can run.
    """
    batch = self._decodes()
    budget = self._token_budget - len(batch)
    budget = self._continue_prefills(batch, budget)
    self._admit(batch, budget)
    return batch

  def _decodes(self) -> Batch:
    ready = [sample for sample in self.running if sample.remaining == 1]
    if len(ready) > self._token_budget:
      # Go round: on from the one that was served last.
      start = bisect.bisect(ready, self._last_served, key=_order)
      ready = (ready[start:] + ready[:start])[: self._token_budget]
      self._last_served = ready[-1].order
    return [(sample, 1) for sample in ready]

  def _continue_prefills(self, batch: Batch, budget: int) -> int:
    for sample in self.running:
      if budget <= 0:
        break
      if sample.remaining == 1:
        continue
      if self._shares_prefixes:
        self._rematch(sample)
      budget = _take(batch, sample, budget)
    return budget

  def _admit(self, batch: Batch, budget: int) -> None:
    while (
      budget > 0 and self._waiting and len(self.running) < self._max_sequences
    ):
      sample = heapq.heappop(self._waiting)
      if sample.finish_reason is not None:
        continue  # it ended while it waited
      if self._registry.park(sample, self.running):
        continue
      try:
        admitted = self._open(sample)
      except errors.KVError as error:
        self.refused.append((sample, error))
        continue
      if not admitted:
        heapq.heappush(self._waiting, sample)
        return
      budget = _take(batch, sample, budget)
      self._park_siblings(sample)

  def _park_siblings(self, sample: requests.Sample) -> None:
    """Lets a request's other samples, which come next, wait to be forked.

    It may be its only step: once it has ended there is nothing to fork.
    """
    awake = []
    while self._waiting and self._waiting[0].request_id == sample.request_id:
      sibling = heapq.heappop(self._waiting)
      if not self._registry.park(sibling, self.running):
        awake.append(sibling)
    for sibling in awake:
      self.add(sibling)

  # Into the cache, and out of it.

  def _open(self, sample: requests.Sample) -> bool:
    """Gives a sample its sequence, unless its rows would not fit now."""
    donor = self._donor(sample)
    if donor is not None:
      self._fork(donor, sample)
      return True
    sample.sequence = self._cache.open(
      sample.known, namespace=sample.request.namespace
    )
    sample.computed = sample.sequence.length
    if self.running and not self._has_room(sample):
      self._cache.close(sample.sequence)
      sample.sequence = None
      sample.computed = 0
      return False
    self._count_gain(sample, 0)
    bisect.insort(self.running, sample)
    return True

  def _donor(self, sample: requests.Sample) -> requests.Sample | None:
    """A running sample of the same request whose prompt can be forked."""
    if sample.params.n == 1 or sample.num_generated:
      return None
    for other in self.running:
      if (
        other.request_id == sample.request_id
        and other.computed >= len(sample.tokens) - 1
      ):
        return other
    return None

  def _fork(self, donor: requests.Sample, sample: requests.Sample) -> None:
    """Shares the donor's prompt rows, but for the last, whose logits we need."""
    prompt = sample.tokens
    sequence = self._cache.fork(donor.held)
    if sequence.num_tokens > len(prompt) or sequence.length == len(prompt):
      self._cache.truncate(sequence, len(prompt) - 1)
      self._cache.append([sequence], [prompt[-1]])
    sample.sequence = sequence
    sample.computed = len(prompt) - 1
    self._stats.forked_tokens += sample.computed
    sample.frontier = sample.computed
    bisect.insort(self.running, sample)

  def _has_room(self, sample: requests.Sample) -> bool:
    """Whether all rows of the prompts admitted so far would fit together."""
    headroom = sum(1 for other in self.running if other.remaining == 1) + 1
    extra = 0
    if sample.preemptions:
      extra = _HEADROOM << min(sample.preemptions, 16)
    target = min(len(sample.tokens) + extra, sample.max_length)
    for group, use in zip(
      self._cache.layout.groups, self._cache.usage(), strict=True
    ):
      needed = headroom + group.pages_for(target)
      needed -= sample.computed // group.page_size
      for other in self.running:
        if other.remaining > 1:
          needed += group.pages_for(len(other.tokens))
          needed -= other.computed // group.page_size
      if needed > use.free + use.evictable:
        return False
    return True

  def _rematch(self, sample: requests.Sample) -> None:
    gained = self._cache.rematch(sample.held)
    if gained:
      before = sample.computed
      sample.computed += gained
      self._count_gain(sample, before)

  def _count_gain(self, sample: requests.Sample, before: int) -> None:
    new = max(0, sample.computed - max(before, sample.frontier))
    self._stats.matched_tokens += new
    self._stats.rematched_tokens += sample.computed - before - new
    sample.frontier = max(sample.frontier, sample.computed)
    if sample.index == 0 and not sample.preemptions:
      sample.request.matched_tokens += new

  # After the step.

  def commit(self, batch: Batch) -> None:
    """Notes that a step's rows are there; wakes those who waited for them."""
    computed = new = 0
    for sample, count in batch:
      before = max(sample.computed, sample.frontier)
      sample.computed += count
      sample.stuck = 0
      computed += count
      if sample.computed > before:
        new += sample.computed - before
        sample.frontier = sample.computed
    self._stats.computed_tokens += new
    self._stats.recomputed_tokens += computed - new
    if not self._registry.is_empty:
      for leader, _ in batch:
        for follower in self._registry.wake(leader):
          self._welcome(follower, leader)

  def _welcome(
    self, follower: requests.Sample, leader: requests.Sample
  ) -> None:
    """Forks at once what it can: its leader may end with this very step."""
    if follower.finish_reason is not None:
      return
    if (
      follower.request_id == leader.request_id
      and len(self.running) < self._max_sequences
    ):
      self._fork(leader, follower)
    else:
      self.add(follower)

  def leave(self, sample: requests.Sample) -> None:
    """Closes the sequence of a sample that ended, if it has one."""
    if sample.sequence is not None:
      self._drop(sample)
    # One that waits is swept out when its turn comes.

  def preempt(self, sample: requests.Sample) -> None:
    """Takes a running sample's sequence; it waits in its old place."""
    sample.preemptions += 1
    self._stats.preemptions += 1
    self.requeue(sample)

  def requeue(self, sample: requests.Sample) -> None:
    """Lets a running sample wait again, without its sequence."""
    self._drop(sample)
    sample.wait_again()
    self.add(sample)

  def requeue_lost(self) -> None:
    """Lets all samples wait again whose sequences a lost device took."""
    for sample in list(self.running):
      if not sample.held.is_open:
        self.requeue(sample)

  def _drop(self, sample: requests.Sample) -> None:
    self.running.remove(sample)
    if sample.held.is_open:  # a lost device closes sequences by itself
      self._cache.close(sample.held)
    sample.sequence = None
    sample.computed = 0
    for follower in self._registry.release(sample):
      self.add(follower)

  def make_room(self, batch: Batch, error: errors.OutOfPages) -> Batch:
    """Shrinks a step that did not fit, at the cost of the latest arrival.

    Its prefill chunk is put off first; if that is not enough its pages are
    taken.

    Returns:
      The step to try next; empty where the caller should schedule anew.
    """
    victim = self.running[-1]
    rest = [entry for entry in batch if entry[0] is not victim]
    put_off = len(rest) < len(batch) and victim.remaining > 1
    if len(self.running) == 1:
      self._make_room_alone(victim, error)
    elif not (put_off and rest):
      self.preempt(victim)
    return rest

  def _make_room_alone(
    self, sample: requests.Sample, error: errors.OutOfPages
  ) -> None:
    """Tries anew with a pool that nobody else uses, and gives up at last."""
    sample.stuck += 1
    if sample.stuck <= _MOST_STUCK:
      self.preempt(sample)
    else:
      self._drop(sample)
      self.refused.append((sample, error))


def _take(batch: Batch, sample: requests.Sample, budget: int) -> int:
  """Gives a sample what it can use of the budget; returns what is left."""
  count = min(sample.remaining, budget)
  batch.append((sample, count))
  return budget - count


def _order(sample: requests.Sample) -> tuple[int, int]:
  return sample.order
