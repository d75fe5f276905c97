"""One step after another: schedule, compute, commit, hand out the tokens."""

import contextlib
import time
from collections.abc import Callable

import jax
import numpy as np

from host_allocator import sequences
from kvjax import cache as caches
from kvjax import errors
from kvjax import program
from kvjax import request as requests
from kvjax import sampling
from kvjax import scheduler as schedulers
from kvjax import stats as stats_lib


class Stepper:
  """Runs what the scheduler plans.

  Args:
    model: computes the logits.
    cache: the sequences' pages.
    scheduler: whose samples run.
    stats: counts steps, tokens, pages and compilations.
  """

  def __init__(
    self,
    model: program.Model,
    cache: caches.KVCache,
    scheduler: schedulers.Scheduler,
    stats: stats_lib.EngineStats,
  ):
    self._cache = cache
    self._scheduler = scheduler
    self._stats = stats
    self._program = program.StepProgram(model)
    self._rows = sampling.RowsUpload()
    self._start_time = time.perf_counter()
    self._in_flight: tuple[schedulers.Batch, jax.Array] | None = None
    self._batch: sequences.Batch | None = None

  def step(self) -> list[requests.TokenEvent]:
    """Runs one step; see `Engine.step` for what an exception leaves.

    Returns:
      An event for each token drawn; none where no step was possible.
    """
    in_flight = self._in_flight or self._start()
    if in_flight is None:
      return []
    # An interrupt here leaves the step in flight, for the next call to finish.
    batch, drawn = in_flight
    tokens = self._read(drawn)
    self._in_flight = None
    return self._accept(batch, tokens)

  def _start(self) -> tuple[schedulers.Batch, jax.Array] | None:
    """Dispatches and commits a step, if one is possible."""
    try:
      batch, drawn = self._dispatch(self._scheduler.schedule())
    except BaseException:
      self._recover()
      raise
    if drawn is None:
      return None
    self._in_flight = batch, drawn
    # While the device computes, the host finishes its part of the step.
    self._scheduler.commit(batch)
    self._record()
    return self._in_flight

  def _dispatch(
    self, batch: schedulers.Batch
  ) -> tuple[schedulers.Batch, jax.Array | None]:
    """Starts a step, made smaller until its pages are there."""
    with contextlib.ExitStack() as stack:
      step = None
      while batch and step is None:
        try:
          step = stack.enter_context(self._cache.step(self._members(batch)))
        except errors.OutOfPages as error:
          batch = self._scheduler.make_room(batch, error)
      if step is None:
        return [], None
      drawn, step.pages = self._program(
        step.pages,
        step.arrays,
        self._rows([sample for sample, _ in batch], step.arrays.num_sequences),
      )
      return batch, drawn

  def _members(
    self, batch: schedulers.Batch
  ) -> list[tuple[sequences.Sequence, int]] | sequences.Batch:
    """A step's rows, as the kept batch where all decode a row each."""
    if all(count == 1 for _, count in batch):
      return self._kept([sample.held for sample, _ in batch])
    return [(sample.held, count) for sample, count in batch]

  def _kept(self, members: list[sequences.Sequence]) -> sequences.Batch:
    """The batch of the last step while its members stay the same.

    The allocator does less for one that it has seen before.
    """
    if self._batch is None or self._batch.sequences != tuple(members):
      self._batch = self._cache.batch(members)
    return self._batch

  def _read(self, drawn: jax.Array) -> list[int]:
    """Waits for the step's tokens."""
    try:
      return np.asarray(drawn).tolist()
    except Exception as error:
      self._in_flight = None
      self._cache.poison()
      self._recover()
      raise errors.DeviceLost(
        "a step failed on the device after it was committed; every sequence "
        "is computed anew"
      ) from error

  def _recover(self) -> None:
    self._stats.failed_steps += 1
    self._scheduler.requeue_lost()

  def _accept(
    self, batch: schedulers.Batch, tokens: list[int]
  ) -> list[requests.TokenEvent]:
    """Gives each sample whose rows are all there its new token."""
    events, growing, appended = [], [], []
    for (sample, _), token in zip(batch, tokens, strict=False):
      if sample.remaining:
        continue  # in the middle of its prompt, or ended meanwhile
      event = sample.accept(token)
      events.append(event)
      if event.finish_reason is None:
        growing.append(sample.held)
        appended.append(token)
      else:
        self._scheduler.leave(sample)
    self._stats.generated_tokens += len(events)
    if growing:
      self._cache.append(self._kept(growing), appended)
    return events

  def _record(self) -> None:
    stats = self._stats
    stats.steps += 1
    stats.compilations = self._program.compilations
    usage = self._cache.usage()
    use = stats_lib.PoolUse(
      seconds=time.perf_counter() - self._start_time,
      live=sum(group.live for group in usage),
      evictable=sum(group.evictable for group in usage),
      free=sum(group.free for group in usage),
      running=len(self._scheduler.running),
      waiting=self._scheduler.num_waiting,
    )
    stats.pool.append(use)
    stats.peak_pages = max(stats.peak_pages, use.live)

  def warm_up(self, progress: Callable[[int, int], None] | None) -> None:
    """Compiles every step shape; see `Engine.warm_up`."""
    shapes = self._cache.step_shapes
    for done, shape in enumerate(shapes, 1):
      with self._cache.idle_step(shape) as step:
        drawn, step.pages = self._program(
          step.pages, step.arrays, self._rows([], shape.num_sequences)
        )
      drawn.block_until_ready()
      self._stats.compilations = self._program.compilations
      if progress is not None:
        progress(done, len(shapes))
