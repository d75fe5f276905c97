"""What an engine counts while it runs."""

import collections
import dataclasses

_HISTORY = 1 << 16  # entries kept of anything that grows with time


@dataclasses.dataclass(frozen=True, slots=True)
class PoolUse:
  """The pool after one step.

  Attributes:
    seconds: since the engine was made.
    live: pages that some sequence references, over all cache groups.
    evictable: pages that only the prefix index remembers.
    free: pages that nobody remembers.
    running: sequences that were open.
    waiting: samples that held nothing.
  """

  seconds: float
  live: int
  evictable: int
  free: int
  running: int
  waiting: int


@dataclasses.dataclass(frozen=True, slots=True)
class RequestTimes:
  """When things happened to one finished request, in seconds from submit.

  Attributes:
    id: the request's.
    prompt_tokens: tokens of its prompt.
    matched_tokens: of these, found in the cache.
    generated_tokens: over all its samples.
    first_token_seconds: NaN where it ended without a token.
    finish_seconds: the end of its last sample.
  """

  id: int
  prompt_tokens: int
  matched_tokens: int
  generated_tokens: int
  first_token_seconds: float
  finish_seconds: float


@dataclasses.dataclass
class EngineStats:
  """Counters of an engine's whole life; every token row is counted once.

  A row comes into a sequence by a match (it was in the cache), by a fork (a
  sibling has it too) or by computing it. Rows that a pre-empted sample gets
  for the second time are `recomputed_tokens` or `rematched_tokens`.

  Attributes:
    requests: accepted by `submit`.
    prompt_tokens: of these requests, each prompt once.
    matched_tokens: rows found in the cache.
    forked_tokens: rows shared with another sample of the same request.
    computed_tokens: rows computed for the first time.
    generated_tokens: tokens drawn.
    rematched_tokens: rows found again after a pre-emption.
    recomputed_tokens: rows computed again after a pre-emption.
    preemptions: sequences taken away because pages ran out.
    steps: steps committed.
    failed_steps: steps that an exception ended.
    peak_pages: most pages live after any step.
    compilations: step functions compiled.
    pool: use of the pool after each step, the latest 65,536.
    finished: the requests that ended, the latest 65,536.
  """

  requests: int = 0
  prompt_tokens: int = 0
  matched_tokens: int = 0
  forked_tokens: int = 0
  computed_tokens: int = 0
  generated_tokens: int = 0
  rematched_tokens: int = 0
  recomputed_tokens: int = 0
  preemptions: int = 0
  steps: int = 0
  failed_steps: int = 0
  peak_pages: int = 0
  compilations: int = 0
  pool: collections.deque[PoolUse] = dataclasses.field(
    default_factory=lambda: collections.deque(maxlen=_HISTORY)
  )
  finished: collections.deque[RequestTimes] = dataclasses.field(
    default_factory=lambda: collections.deque(maxlen=_HISTORY)
  )
