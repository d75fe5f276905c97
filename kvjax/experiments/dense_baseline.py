"""Paged steps against a dense cache, in one process, taking turns.

Both sides run the same weights, and both bring the next tokens to the host.
The paged side is a step as the engine takes it: plan, pack, upload, run with
the sampler, commit; in a cache of the engine's sizes it even runs the engine's
compiled functions.
Rows that the timed steps only read are left at zero instead of being computed,
on both sides: their values do not change what a step costs.
"""

import dataclasses

import jax
import numpy as np

import kvjax
from kvjax import models
from kvjax import program
from kvjax import sampling
from kvjax import testing
from kvjax.experiments import common

_DECODES_PER_PREFILL = 3  # a prefill takes many times as long as a decode


@dataclasses.dataclass(frozen=True)
class CacheSizes:
  """The sizes of an engine's cache, which its compiled steps depend on.

  Attributes:
    page_size: rows of a page.
    num_pages: allocatable pages.
    max_sequences: most sequences of a step.
    max_length: most tokens of a sequence.
    token_budget: most token rows of a step.
  """

  page_size: int
  num_pages: int
  max_sequences: int
  max_length: int
  token_budget: int


@dataclasses.dataclass(frozen=True)
class Ratios:
  """Paged time over dense time; below 1 the pages are faster.

  Attributes:
    batch: sequences of a step.
    context: rows that each sequence has after the last timed step.
    chunk: tokens of each sequence in a prefill step.
    decode: ratio for one token of each sequence; None where not measured.
    prefill: ratio for `chunk` tokens of each sequence.
    decode_seconds: the median paged decode step.
    prefill_seconds: the median paged prefill step.
  """

  batch: int
  context: int
  chunk: int
  decode: float | None = None
  prefill: float | None = None
  decode_seconds: float | None = None
  prefill_seconds: float | None = None

  def summary(self) -> dict[str, object]:
    """Returns the entries of `summary.json`."""
    return {
      "decode_ratio_vs_dense": self.decode,
      "prefill_ratio_vs_dense": self.prefill,
      "decode_step_seconds": self.decode_seconds,
      "prefill_step_seconds": self.prefill_seconds,
      "baseline_batch": self.batch,
      "baseline_context": self.context,
      "baseline_chunk": self.chunk,
    }


def measure(
  model: models.Decoder,
  *,
  batch: int,
  context: int,
  chunk: int,
  rounds: int,
  sizes: CacheSizes,
) -> Ratios:
  """Times prefill steps, then decode steps, of pages and of a dense cache.

  Args:
    model: the decoder that both run.
    batch: sequences of every step, all of one length.
    context: rows that each sequence ends with; the dense cache holds exactly
      as many.
    chunk: tokens of each sequence in a prefill step.
    rounds: how often a decode step of each is timed, and a third as often a
      prefill step; 0 measures nothing.
    sizes: of an engine's cache; made larger where the steps need it.

  Returns:
    The medians over the rounds of paged time / dense time.

  Raises:
    ExperimentError: if a size is below one, or the timed steps alone compute
      more than `context` rows.
  """
  if rounds == 0:
    return Ratios(batch, context, chunk)
  prefills = -(-rounds // _DECODES_PER_PREFILL)
  start = context - chunk * (prefills + 1) - (rounds + 1)
  if min(batch, chunk, rounds) < 1:
    raise common.ExperimentError(
      f"a baseline of {batch=}, {chunk=}, {rounds=} is none; rounds=0 skips it"
    )
  if start < 1:
    raise common.ExperimentError(
      f"a baseline of {context=} rows is too short for {rounds=} of {chunk=}"
    )
  tokens = np.random.default_rng(0).integers(
    model.config.vocab_size, size=(batch, context), dtype=np.int32
  )
  paged = _PagedSide(model, tokens, start, chunk, rounds, sizes)
  dense = _DenseSide(model, tokens, start, chunk)
  prefill = common.interleave(
    {"paged": paged.prefill, "dense": dense.prefill}, rounds=prefills
  )
  decode = common.interleave(
    {"paged": paged.decode, "dense": dense.decode}, rounds=rounds
  )
  return Ratios(
    batch,
    context,
    chunk,
    decode=common.median_ratio(decode["paged"], decode["dense"]),
    prefill=common.median_ratio(prefill["paged"], prefill["dense"]),
    decode_seconds=decode["paged"].median,
    prefill_seconds=prefill["paged"].median,
  )


def print_ratios(ratios: Ratios) -> None:
  """Prints what `measure` found, or nothing where it measured nothing."""
  if ratios.decode is None:
    return
  common.print_table(
    [
      f"{ratios.batch} sequences, {ratios.context:,} rows",
      "ms",
      "paged / dense",
    ],
    [
      ["decode step", 1e3 * (ratios.decode_seconds or 0), ratios.decode],
      [
        f"prefill of {ratios.chunk} tokens each",
        1e3 * (ratios.prefill_seconds or 0),
        ratios.prefill,
      ],
    ],
  )


class _PagedSide:
  """Sequences of a `KVCache`, their first `start` rows already there."""

  def __init__(
    self,
    model: models.Decoder,
    tokens: np.ndarray,
    start: int,
    chunk: int,
    rounds: int,
    sizes: CacheSizes,
  ):
    self._program = program.StepProgram(model)
    self._rows = sampling.RowsUpload()
    self._chunk = chunk
    batch, context = tokens.shape
    page_size = sizes.page_size
    self._cache = kvjax.KVCache(
      model.cache_layout(page_size=page_size),
      num_pages=max(sizes.num_pages, batch * -(-(context + 1) // page_size)),
      max_sequences=max(sizes.max_sequences, batch),
      max_length=max(sizes.max_length, context + 1),
      max_tokens_per_step=max(sizes.token_budget, batch * chunk),
      prefix_index=None,
    )
    known = context - rounds
    self._sequences = [self._cache.open(row[:known]) for row in tokens]
    allocator = self._cache.allocator
    # A page of each in turn: no sequence has its pages side by side.
    for first in range(0, start, page_size):
      count = min(page_size, start - first)
      plan = allocator.plan([(each, count) for each in self._sequences])
      allocator.commit(plan)

  def prefill(self) -> np.ndarray:
    return self._run(self._chunk)

  def decode(self) -> np.ndarray:
    drawn = self._run(1)
    self._cache.append(self._sequences, drawn.tolist())
    return drawn

  def _run(self, count: int) -> np.ndarray:
    batch = [(sequence, count) for sequence in self._sequences]
    with self._cache.step(batch) as step:
      rows = self._rows([], step.arrays.num_sequences)
      drawn, step.pages = self._program(step.pages, step.arrays, rows)
    return np.asarray(drawn)[: len(batch)]


class _DenseSide:
  """The same through `DenseDecoder`."""

  def __init__(
    self, model: models.Decoder, tokens: np.ndarray, start: int, chunk: int
  ):
    batch, context = tokens.shape
    self._decoder = testing.DenseDecoder(model, batch=batch, max_length=context)
    self._decoder.length = start
    self._chunk = chunk
    self._tokens = tokens
    self._drawn = tokens[:, 0]

  def prefill(self) -> np.ndarray:
    start = self._decoder.length
    chunk = self._tokens[:, start : start + self._chunk]
    return self._draw(self._decoder.prefill(chunk))

  def decode(self) -> np.ndarray:
    return self._draw(self._decoder.decode(self._drawn))

  def _draw(self, logits: jax.Array) -> np.ndarray:
    self._drawn = np.asarray(logits).argmax(axis=-1)
    return self._drawn
