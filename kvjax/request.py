"""What is asked of the engine, and what comes back.

Request ── prompt, SamplingParams, namespace
  └─ Sample 0 .. n-1    one continuation each; at most one cache sequence
       └─ TokenEvent    one per generated token, in order
"""

import dataclasses
import enum
import math
import time
import weakref
from typing import NamedTuple

import numpy as np

from host_allocator import sequences
from kvjax import errors
from kvjax import text as text_lib

_MAX_SEED = 2**64 - 1
_MAX_TOP_K = 2**31 - 1


class FinishReason(enum.StrEnum):
  """Why a sample ended."""

  STOP_TOKEN = "stop_token"
  STOP_STRING = "stop_string"
  LENGTH = "length"  # max_tokens, or the end of the context
  CANCELLED = "cancelled"
  ERROR = "error"


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How a continuation is chosen, and where it ends.

  Token t of a sample is drawn with the key `fold_in(k, t)`, where t counts the
  prompt's tokens too and k comes from the seed and the sample's index alone.
  So what else is in a batch, and when, changes nothing.

  Attributes:
    max_tokens: most tokens generated; the context's end may come first.
    temperature: divides the logits; 0 takes the most likely token.
    top_k: keeps the k most likely tokens (and those that tie with the last
      of them); 0 keeps all.
    top_p: keeps the fewest most likely tokens with at least this mass (and
      those that tie with the last of them), after top_k.
    seed: of this request; None takes one from the engine's seed.
    stop: the text ends before the first of these strings.
    stop_token_ids: a sample ends with any of these tokens, or with the
      tokenizer's own end tokens.
    ignore_eos: carries on past the tokenizer's own end tokens.
    n: continuations of the one prompt, which is computed once.

  Raises:
    BadRequest: a value is out of its range.
  """

  max_tokens: int = 16
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int | None = None
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()
  ignore_eos: bool = False
  n: int = 1

  def __post_init__(self):
    stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
    object.__setattr__(self, "stop", stop)
    object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
    _check(self.max_tokens >= 1, f"max_tokens={self.max_tokens} is below 1")
    _check(
      math.isfinite(self.temperature) and self.temperature >= 0.0,
      f"temperature={self.temperature} is not a finite number from 0 on",
    )
    _check(
      0 <= self.top_k <= _MAX_TOP_K,
      f"top_k={self.top_k} is not in 0..{_MAX_TOP_K}",
    )
    _check(0.0 < self.top_p <= 1.0, f"top_p={self.top_p} is not in (0, 1]")
    _check(
      self.seed is None or 0 <= self.seed <= _MAX_SEED,
      f"seed={self.seed} is not in 0..2**64-1",
    )
    _check(
      all(isinstance(string, str) and string for string in stop),
      f"stop={stop} holds something that is not a string of characters",
    )
    _check(self.n >= 1, f"n={self.n} is below 1")


def _check(holds: bool, message: str) -> None:
  if not holds:
    raise errors.BadRequest(message)


class TokenEvent(NamedTuple):
  """One generated token, or the end of a sample without one.

  Attributes:
    request: whose it is.
    sample: index of the continuation, below `params.n`.
    token: the token id; None where the sample ended without a new token.
    text: characters that became certain with it. Text that could still turn
      out to be a stop string, or half a character, comes with a later event.
    finish_reason: set on the last event of a sample.
  """

  request: "Request"
  sample: int
  token: int | None
  text: str
  finish_reason: FinishReason | None = None


@dataclasses.dataclass(frozen=True)
class Output:
  """One continuation: its tokens, its text, and why it ended, if it has."""

  tokens: tuple[int, ...]
  text: str
  finish_reason: FinishReason | None


@dataclasses.dataclass(frozen=True)
class Completion:
  """A finished request.

  Attributes:
    prompt_tokens: the prompt's token ids.
    outputs: one per sample.
    matched_tokens: prompt rows that were already in the cache.
    time_to_first_token_seconds: from submit to the first token.
    seconds: from submit to the last token.
  """

  prompt_tokens: tuple[int, ...]
  outputs: tuple[Output, ...]
  matched_tokens: int
  time_to_first_token_seconds: float
  seconds: float

  @property
  def tokens(self) -> tuple[int, ...]:
    """The first sample's tokens."""
    return self.outputs[0].tokens

  @property
  def text(self) -> str:
    """The first sample's text."""
    return self.outputs[0].text

  @property
  def finish_reason(self) -> FinishReason | None:
    """The first sample's reason to end."""
    return self.outputs[0].finish_reason


class Sample:
  """One continuation of a request, from waiting to finished.

  A sample that waits holds no sequence. One that is pre-empted loses its own
  and waits again, with its generated tokens as part of what must be computed.
  `tokens[:computed]` are the rows that its sequence has in the cache.

  Attributes:
    request_id: of its request.
    index: among the samples of its request.
    order: sorts samples by arrival.
    params: how it is drawn.
    tokens: the prompt and what was generated so far.
    known: int32, `tokens` as they were when the sample began to wait.
    max_length: `len(tokens)` at which the sample ends.
    sequence: in the cache; None while waiting and once finished.
    computed: rows of the sequence that are in the cache.
    frontier: most rows that were ever computed, so that recomputed rows are
      not counted as new ones.
    preemptions: how often its sequence was taken away.
    stuck: how often in a row it did not fit though it ran alone.
    finish_reason: None until it is finished.
  """

  __slots__ = (
    "_request",
    "computed",
    "finish_reason",
    "frontier",
    "index",
    "known",
    "max_length",
    "order",
    "params",
    "preemptions",
    "request_id",
    "sequence",
    "stop_tokens",
    "stuck",
    "text_stream",
    "tokens",
  )

  def __init__(
    self,
    request: "Request",
    index: int,
    *,
    max_length: int,
    stop_tokens: frozenset[int],
    text_stream: text_lib.TextStream | None,
  ):
    # Weak: what is finished goes without the cyclic collector's help.
    self._request = weakref.ref(request)
    self.request_id = request.id
    self.index = index
    self.order = (request.id, index)
    self.params = request.params
    self.tokens: list[int] = request.prompt_tokens.tolist()
    self.known = request.prompt_tokens
    self.max_length = max_length
    self.stop_tokens = stop_tokens
    self.text_stream = text_stream
    self.sequence: sequences.Sequence | None = None
    self.computed = 0
    self.frontier = 0
    self.preemptions = 0
    self.stuck = 0
    self.finish_reason: FinishReason | None = None

  def __lt__(self, other: "Sample") -> bool:
    return self.order < other.order

  @property
  def request(self) -> "Request":
    """Its request, which the engine keeps until it is finished."""
    request = self._request()
    assert request is not None
    return request

  @property
  def held(self) -> sequences.Sequence:
    """The sequence of a sample that runs."""
    assert self.sequence is not None
    return self.sequence

  @property
  def remaining(self) -> int:
    """Rows to compute before the next token can be drawn."""
    return len(self.tokens) - self.computed

  @property
  def num_generated(self) -> int:
    return len(self.tokens) - len(self.request.prompt_tokens)

  def wait_again(self) -> None:
    """Makes what was generated part of what must be in the cache."""
    self.known = np.asarray(self.tokens, np.int32)

  def accept(self, token: int) -> TokenEvent:
    """Takes a drawn token: finds out its text and whether it is the last."""
    self.tokens.append(token)
    reason, piece = None, ""
    if token in self.stop_tokens:
      reason = FinishReason.STOP_TOKEN
    elif self.text_stream is not None:
      piece, stopped = self.text_stream.push(token)
      if stopped:
        reason = FinishReason.STOP_STRING
    if reason is None and len(self.tokens) >= self.max_length:
      reason = FinishReason.LENGTH
    if reason is not None:
      piece += self._finish(reason)
    return self.request.record(self.index, token, piece, reason)

  def end(self, reason: FinishReason) -> TokenEvent:
    """Finishes without a new token."""
    return self.request.record(self.index, None, self._finish(reason), reason)

  def _finish(self, reason: FinishReason) -> str:
    """Notes the end; returns the text that was held back until now."""
    self.finish_reason = reason
    return "" if self.text_stream is None else self.text_stream.flush()


class Request:
  """A prompt on its way through the engine; made by `Engine.submit`.

  Attributes:
    id: counts the engine's requests, in order of arrival.
    prompt_tokens: int32, the prompt's token ids.
    params: how its samples are drawn.
    seed: of its samples' keys.
    namespace: whose cached prefixes it may find.
    samples: its `params.n` continuations.
    matched_tokens: prompt rows that its first sample found in the cache.
    error: what failed it, or None.
    submit_time, first_token_time, finish_time: `time.perf_counter()` at these
      moments; NaN until they come.
  """

  def __init__(
    self,
    id: int,
    prompt_tokens: np.ndarray,
    params: SamplingParams,
    *,
    seed: int,
    namespace: str,
  ):
    self.id = id
    self.prompt_tokens = prompt_tokens
    self.params = params
    self.seed = seed
    self.namespace = namespace
    self.samples: tuple[Sample, ...] = ()
    self.matched_tokens = 0
    self.error: BaseException | None = None
    self.submit_time = time.perf_counter()
    self.first_token_time = math.nan
    self.finish_time = math.nan
    self._unfinished = params.n
    # Events without the request: nothing here refers back to it.
    self._log: list[tuple[int, int | None, str, FinishReason | None]] = []

  @property
  def is_finished(self) -> bool:
    """Whether every sample has ended."""
    return self._unfinished == 0

  @property
  def num_events(self) -> int:
    """Token events so far."""
    return len(self._log)

  def event(self, position: int) -> TokenEvent:
    """One of the token events so far, in the order in which they happened."""
    return TokenEvent(self, *self._log[position])

  @property
  def events(self) -> list[TokenEvent]:
    """All token events so far."""
    return [TokenEvent(self, *entry) for entry in self._log]

  def record(
    self,
    sample: int,
    token: int | None,
    text: str,
    reason: FinishReason | None,
  ) -> TokenEvent:
    """Keeps an event for whoever streams this request, and returns it."""
    if token is not None and math.isnan(self.first_token_time):
      self.first_token_time = time.perf_counter()
    self._log.append((sample, token, text, reason))
    if reason is not None:
      self._unfinished -= 1
      if self._unfinished == 0:
        self.finish_time = time.perf_counter()
    return TokenEvent(self, sample, token, text, reason)

  def completion(self) -> Completion:
    """The outputs; of a request that has not finished, those so far."""
    return Completion(
      prompt_tokens=tuple(self.prompt_tokens.tolist()),
      outputs=tuple(self._output(sample) for sample in self.samples),
      matched_tokens=self.matched_tokens,
      time_to_first_token_seconds=self.first_token_time - self.submit_time,
      seconds=self.finish_time - self.submit_time,
    )

  def _output(self, sample: Sample) -> Output:
    pieces = [entry[2] for entry in self._log if entry[0] == sample.index]
    tokens = sample.tokens[len(self.prompt_tokens) :]
    return Output(tuple(tokens), "".join(pieces), sample.finish_reason)
