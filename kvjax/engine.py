"""`Engine`: many requests through one cache, a step at a time."""

import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

from kvjax import cache as caches
from kvjax import errors
from kvjax import intake
from kvjax import program
from kvjax import request as requests
from kvjax import scheduler as schedulers
from kvjax import stats as stats_lib
from kvjax import stepper as steppers


class Engine:
  """Serves requests from one model over one paged cache.

  Every step computes one token of each sequence that decodes and, with what
  is left of the token budget, the next rows of prompts, first come first
  served. Prompts are looked up in the cache first. When pages run out the
  latest arrival waits, or gives up its pages and is recomputed later; what
  it generates does not change.

  Public methods may be called from several threads.

  Example:
    >>> from kvjax import testing
    >>> model = testing.random_decoder(testing.tiny_config(num_layers=1))
    >>> params = requests.SamplingParams(max_tokens=4, ignore_eos=True)
    >>> with Engine(model, num_pages=64) as engine:
    ...   [completion] = engine.generate([[5, 6, 7]], params)
    >>> len(completion.tokens), completion.finish_reason.value
    (4, 'length')

  Attributes:
    cache: the sequences' pages; the engine's own, for looking only.
    stats: what was counted so far.
    max_length: most tokens of a prompt and what it generates.
  """

  def __init__(
    self,
    model: program.Model,
    *,
    num_pages: int | Sequence[int],
    tokenizer: Any | None = None,
    page_size: int = 16,
    max_sequences: int = 8,
    max_length: int | None = None,
    token_budget: int = 256,
    prefix_reuse: bool = True,
    prefix_index: str = "radix",
    tail_policy: str = "copy_rows",
    eviction: str = "lru",
    seed: int = 0,
  ):
    """Allocates the cache; nothing is compiled before the first step.

    Args:
      model: a decoder, see `kvjax.program.Model`.
      num_pages: allocatable pages, of every cache group or one count each.
      tokenizer: encodes and decodes text, and knows the end tokens; without
        one, prompts are token ids and outputs have no text.
      page_size: token rows of a page.
      max_sequences: most sequences that run together.
      max_length: most tokens of a sequence; by default the model's context.
      token_budget: most token rows of a step, and so of a prefill chunk.
      prefix_reuse: whether prompts are looked up in the cache.
      prefix_index: "radix" or "hash_chain".
      tail_policy: "copy_rows" or "full_pages", see `KVCache`.
      eviction: the order in which unused pages are given up.
      seed: of requests that bring none.

    Raises:
      LayoutError: sizes that do not fit together, or none of something.
    """
    layout = model.cache_layout(page_size=page_size)
    if isinstance(num_pages, int):
      num_pages = (num_pages,) * len(layout.groups)
    context = model.config.context_length
    self.max_length = min(context, max_length or context)
    capacity = min(
      count * group.page_size
      for count, group in zip(num_pages, layout.groups, strict=True)
    )
    self.cache = caches.KVCache(
      layout,
      num_pages=num_pages,
      max_sequences=max_sequences,
      max_length=max(1, min(self.max_length, capacity)),
      max_tokens_per_step=token_budget,
      prefix_index=prefix_index if prefix_reuse else None,
      tail_policy=tail_policy,
      eviction=eviction,
      vocab_size=model.config.vocab_size,
    )
    self.stats = stats_lib.EngineStats()
    self._scheduler = schedulers.Scheduler(
      self.cache,
      token_budget=token_budget,
      max_sequences=max_sequences,
      shares_prefixes=prefix_reuse,
      stats=self.stats,
    )
    self._stepper = steppers.Stepper(
      model, self.cache, self._scheduler, self.stats
    )
    self._intake = intake.Intake(
      self.cache,
      tokenizer=tokenizer,
      vocab_size=model.config.vocab_size,
      max_length=self.max_length,
      eos_ids=frozenset(getattr(model.config, "eos_ids", ()))
      | frozenset(getattr(tokenizer, "eos_ids", ())),
      seed=seed,
    )
    self._active: dict[int, requests.Request] = {}
    self._cancelled: list[requests.Request] = []
    self._lock = threading.RLock()
    self._in_step = False
    self._is_closed = False

  # Requests.

  def submit(
    self,
    prompt: intake.Prompt,
    params: requests.SamplingParams | None = None,
    *,
    namespace: str = "",
  ) -> requests.Request:
    """Takes a request; it waits, holding nothing, until a step admits it.

    Args:
      prompt: text, or token ids.
      params: how to continue it; greedily, by default.
      namespace: whose cached prefixes it may find, and feeds.

    Raises:
      BadRequest: text or stop strings without a tokenizer.
      EmptyPrompt: no tokens.
      TokenOutOfRange: a token id is not below the vocabulary's size.
      PromptTooLong: more tokens than `max_length`.
      NeverFits: prompt and `max_tokens` need more pages than there are.
      EngineClosed: `close` was called.
    """
    with self._lock:
      self._check_open()
      request = self._intake.make_request(
        prompt, params or requests.SamplingParams(), namespace=namespace
      )
      for sample in request.samples:
        self._scheduler.add(sample)
      self._active[request.id] = request
      self.stats.requests += 1
      self.stats.prompt_tokens += len(request.prompt_tokens)
      return request

  def cancel(self, request: requests.Request) -> None:
    """Ends a request; inside a step, at its commit. Ended ones stay as is.

    Raises:
      BadRequest: the request is another engine's.
      EngineClosed: `close` was called.
    """
    with self._lock:
      self._check_open()
      if request.is_finished:
        return
      if self._active.get(request.id) is not request:
        raise errors.BadRequest(f"request {request.id} is not of this engine")
      if self._in_step:
        self._cancelled.append(request)
      else:
        self._end(request, requests.FinishReason.CANCELLED)

  # Steps.

  @property
  def num_unfinished(self) -> int:
    """Requests that have not ended; while there are any, `step`."""
    return len(self._active)

  def step(self) -> list[requests.TokenEvent]:
    """Computes one step's rows, draws its tokens and returns them as events.

    An exception inside the model ends the step, is raised, and leaves every
    request as it was: call `step` again, or cancel. After `DeviceLost` all
    rows are recomputed.

    Raises:
      EngineClosed: `close` was called.
    """
    with self._lock:
      self._check_open()
      if self._in_step:
        raise errors.StepOpen("the model called the engine that runs it")
      self._in_step = True
      try:
        events = self._stepper.step()
        for event in events:
          if event.finish_reason is not None:
            self._retire(event.request)
      finally:
        self._in_step = False
        ended = self._end_deferred()
      return events + ended

  # Ends.

  def _end_deferred(self) -> list[requests.TokenEvent]:
    """Ends what was refused or cancelled during the step."""
    events = []
    refused, self._scheduler.refused = self._scheduler.refused, []
    for sample, error in refused:
      events += self._end(
        sample.request, requests.FinishReason.ERROR, error=error
      )
    cancelled, self._cancelled = self._cancelled, []
    for request in cancelled:
      events += self._end(request, requests.FinishReason.CANCELLED)
    return events

  def _end(
    self,
    request: requests.Request,
    reason: requests.FinishReason,
    *,
    error: BaseException | None = None,
  ) -> list[requests.TokenEvent]:
    """Ends the samples of a request that have not ended."""
    if request.is_finished:
      return []
    request.error = error
    events = []
    for sample in request.samples:
      if sample.finish_reason is None:
        events.append(sample.end(reason))
        self._scheduler.leave(sample)
    self._retire(request)
    return events

  def _retire(self, request: requests.Request) -> None:
    """Forgets a request whose samples have all ended."""
    if not request.is_finished or request.id not in self._active:
      return
    del self._active[request.id]
    self.stats.finished.append(
      stats_lib.RequestTimes(
        id=request.id,
        prompt_tokens=len(request.prompt_tokens),
        matched_tokens=request.matched_tokens,
        generated_tokens=sum(s.num_generated for s in request.samples),
        first_token_seconds=request.first_token_time - request.submit_time,
        finish_seconds=request.finish_time - request.submit_time,
      )
    )

  # Whole requests.

  def stream(self, request: requests.Request) -> Iterator[requests.TokenEvent]:
    """Yields a request's events, stepping the engine as needed.

    Closing the iterator early cancels the request. An exception of the
    model's is raised, and streaming may be taken up again by another call,
    which begins with the first event.

    Raises:
      KVError: what failed the request.
      EngineClosed: `close` was called before it ended.
    """
    position = 0
    try:
      while True:
        while position < request.num_events:
          yield request.event(position)
          position += 1
        if not request.is_finished:
          self.step()
        elif position == request.num_events:  # other threads step, too
          break
    except GeneratorExit:
      with self._lock:
        if not self._is_closed:
          self.cancel(request)
      raise
    if request.error is not None:
      raise request.error

  def generate(
    self,
    prompts: Sequence[intake.Prompt],
    params: requests.SamplingParams
    | Sequence[requests.SamplingParams]
    | None = None,
    *,
    namespace: str = "",
  ) -> list[requests.Completion]:
    """Submits prompts, runs until they have ended, returns their outputs.

    Args:
      prompts: texts, or lists of token ids.
      params: for all of them, or one each.
      namespace: whose cached prefixes they may find, and feed.

    Returns:
      One completion per prompt, in their order.

    Raises:
      KVError: as `submit`, before anything runs; or what failed a request.
      Exception: what the model raised; the requests then end with it.
    """
    params = params or requests.SamplingParams()
    if isinstance(params, requests.SamplingParams):
      params = [params] * len(prompts)
    if isinstance(prompts, str) or len(params) != len(prompts):
      raise errors.BadRequest(
        f"expected a list of prompts and as many params, got {len(params)} "
        f"params for {type(prompts).__name__} of {len(prompts)}"
      )
    submitted: list[requests.Request] = []
    try:
      for prompt, own in zip(prompts, params, strict=True):
        submitted.append(self.submit(prompt, own, namespace=namespace))
      while not all(request.is_finished for request in submitted):
        self.step()
    except BaseException as error:
      with self._lock:
        for request in submitted:
          self._end(request, requests.FinishReason.ERROR, error=error)
      raise
    for request in submitted:
      if request.error is not None:
        raise request.error
    return [request.completion() for request in submitted]

  # The engine's own life.

  def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
    """Compiles every step shape ahead, so that no request waits for it.

    Args:
      progress: called after each shape with the number done and the total.

    Raises:
      EngineClosed: `close` was called.
    """
    with self._lock:
      self._check_open()
      self._stepper.warm_up(progress)

  def close(self) -> None:
    """Cancels what has not ended; the engine takes nothing more.

    Raises:
      EngineClosed: it was closed before.
    """
    with self._lock:
      self._check_open()
      if self._in_step:
        raise errors.StepOpen("the engine cannot be closed inside its step")
      for request in list(self._active.values()):
        self._end(request, requests.FinishReason.CANCELLED)
      self._is_closed = True

  def __enter__(self) -> "Engine":
    return self

  def __exit__(self, *exception: object) -> None:
    if not self._is_closed:
      self.close()

  def audit(self) -> tuple:
    """The cache's findings; an empty tuple means that all invariants hold."""
    return self.cache.audit()

  def _check_open(self) -> None:
    if self._is_closed:
      raise errors.EngineClosed("the engine was closed")
