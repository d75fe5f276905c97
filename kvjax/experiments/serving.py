"""Serves a list of prompts through an engine and measures what happens."""

import dataclasses
import math
import pathlib
import statistics
import time
from collections.abc import Mapping
from collections.abc import Sequence

import ml_collections
import tqdm

from kvjax import engine as engines
from kvjax import models
from kvjax import plots
from kvjax import request as requests
from kvjax.experiments import common
from kvjax.experiments import dense_baseline
from kvjax.experiments import prompts as prompts_lib

_PROMPT_WIDTH = 44


@dataclasses.dataclass(frozen=True)
class Served:
  """What serving one list of prompts did and cost.

  Attributes:
    completions: one for each prompt, in their order.
    seconds: from the first submit to the last token.
    matched_tokens: prompt rows that were found in the cache.
    computed_tokens: rows that the model computed.
    generated_tokens: tokens drawn.
    decode_tokens_per_second: tokens per second of the steps that computed one
      row for each of their sequences and nothing else; NaN without such steps.
    preemptions: sequences that were taken away because pages ran out.
    peak_pages: most pages that were live at once.
    pool_use: (seconds since the first submit, live pages) after each step.
    compilations: step shapes compiled.
    audit_findings: what the audit found wrong after the last step.
  """

  completions: tuple[requests.Completion, ...]
  seconds: float
  matched_tokens: int
  computed_tokens: int
  generated_tokens: int
  decode_tokens_per_second: float
  preemptions: int
  peak_pages: int
  pool_use: tuple[tuple[float, ...], tuple[int, ...]]
  compilations: int
  audit_findings: int

  @property
  def ttft_seconds_p50(self) -> float:
    """The median time to first token, queueing included."""
    return statistics.median(
      completion.time_to_first_token_seconds for completion in self.completions
    )


def load_model(
  config: ml_collections.ConfigDict,
) -> tuple[models.Decoder, models.Tokenizer]:
  """Loads the configured checkpoint and its tokenizer.

  Args:
    config: with `model`, a folder or a GGUF file, where empty takes the packaged
      SmolLM2-135M; and `scan_layers`.
  """
  source = config.model or str(models.smollm2_gguf())
  model = models.load(source, scan_layers=config.scan_layers)
  return model, models.load_tokenizer(source)


def cache_sizes(
  config: ml_collections.ConfigDict,
  model: models.Decoder,
  prompts: Sequence[Sequence[int]],
) -> dense_baseline.CacheSizes:
  """Returns how large the cache of the configuration's engine is.

  Args:
    config: page_size, num_pages, max_sequences, token_budget and max_tokens.
      num_pages=0 takes what the largest batch needs without sharing, so that
      nothing is pre-empted.
    model: its context bounds a sequence's length.
    prompts: token ids; the longest one sets the width of the page tables.
  """
  longest = max(map(len, prompts)) + config.max_tokens
  max_length = min(longest, model.config.context_length)
  # A page size that cannot be is the engine's to refuse.
  pages_each = -(-max_length // max(config.page_size, 1))
  return dense_baseline.CacheSizes(
    page_size=config.page_size,
    num_pages=config.num_pages or pages_each * config.max_sequences,
    max_sequences=config.max_sequences,
    max_length=max_length,
    token_budget=config.token_budget,
  )


def make_engine(
  config: ml_collections.ConfigDict,
  model: models.Decoder,
  tokenizer: models.Tokenizer,
  sizes: dense_baseline.CacheSizes,
  *,
  prefix_reuse: bool,
) -> engines.Engine:
  """Builds the engine that the configuration describes.

  Args:
    config: prefix_index and seed.
    model: the decoder.
    tokenizer: its tokenizer.
    sizes: of its cache.
    prefix_reuse: whether prompts may find each other's pages.
  """
  return engines.Engine(
    model,
    tokenizer=tokenizer,
    page_size=sizes.page_size,
    num_pages=sizes.num_pages,
    max_sequences=sizes.max_sequences,
    max_length=sizes.max_length,
    token_budget=sizes.token_budget,
    prefix_reuse=prefix_reuse,
    prefix_index=config.prefix_index,
    seed=config.seed,
  )


def sampling_params(
  config: ml_collections.ConfigDict,
) -> requests.SamplingParams:
  """Returns how the configuration wants tokens to be drawn."""
  return requests.SamplingParams(
    max_tokens=config.max_tokens,
    temperature=config.temperature,
    seed=config.seed,
    stop=tuple(config.stop),
  )


def serve(
  engine: engines.Engine,
  prompts: Sequence[Sequence[int]],
  params: requests.SamplingParams,
  *,
  title: str,
) -> Served:
  """Submits every prompt at once and steps until all have finished.

  Compiles ahead first, so that no time below holds a compilation. Closes the
  engine.

  Args:
    engine: a fresh engine.
    prompts: token ids.
    params: how tokens are drawn, the same for every prompt.
    title: stands before the progress bar.
  """
  warm_up(engine, title)
  start = time.perf_counter()
  submitted = [engine.submit(list(prompt), params) for prompt in prompts]
  decode_tokens, decode_seconds = 0, 0.0
  times: list[float] = [0.0]
  live: list[int] = [0]
  total = sum(map(len, prompts))
  bar = tqdm.tqdm(
    total=total, desc=f"{title}: serving", unit="token", unit_scale=True
  )
  with bar:
    while not all(request.is_finished for request in submitted):
      computed = engine.stats.computed_tokens
      step_start = time.perf_counter()
      events = engine.step()
      now = time.perf_counter()
      drawn = sum(event.token is not None for event in events)
      if drawn and engine.stats.computed_tokens - computed <= drawn:
        decode_tokens += drawn
        decode_seconds += now - step_start
      times.append(now - start)
      live.append(engine.stats.pool[-1].live if engine.stats.pool else 0)
      finished = sum(request.is_finished for request in submitted)
      bar.set_postfix_str(f"{finished}/{len(prompts)} answers", refresh=False)
      known = engine.stats.matched_tokens + engine.stats.computed_tokens
      bar.update(min(known, total) - bar.n)
  seconds = time.perf_counter() - start
  for request in submitted:
    if request.error is not None:
      raise request.error
  findings = engine.cache.audit()
  served = Served(
    completions=tuple(request.completion() for request in submitted),
    seconds=seconds,
    matched_tokens=engine.stats.matched_tokens,
    computed_tokens=engine.stats.computed_tokens,
    generated_tokens=engine.stats.generated_tokens,
    decode_tokens_per_second=(
      decode_tokens / decode_seconds if decode_seconds else math.nan
    ),
    preemptions=engine.stats.preemptions,
    peak_pages=engine.stats.peak_pages,
    pool_use=(tuple(times), tuple(live)),
    compilations=engine.stats.compilations,
    audit_findings=len(findings),
  )
  engine.close()
  return served


def warm_up(engine: engines.Engine, title: str) -> None:
  """Compiles every step shape, behind a progress bar."""
  with tqdm.tqdm(desc=f"{title}: compiling", unit="shape") as bar:

    def progress(done: int, total: int) -> None:
      bar.total = total
      bar.update(done - bar.n)

    engine.warm_up(progress)


def print_prompts(
  prompts: Sequence[str], served: Served, *, most: int = 16
) -> None:
  """Prints a line for each of the first prompts.

  Args:
    prompts: the texts; their ends are shown, for their beginnings are shared.
    served: what serving them did.
    most: lines at most.
  """
  rows = [
    [
      shorten(text),
      len(completion.prompt_tokens),
      completion.matched_tokens,
      len(completion.prompt_tokens) - completion.matched_tokens,
      completion.time_to_first_token_seconds,
      _decode_rate(completion),
    ]
    for text, completion in zip(prompts, served.completions, strict=True)
  ]
  common.print_table(
    [
      "prompt (its end)",
      "tokens",
      "matched",
      "computed",
      "first token s",
      "decode tokens/s",
    ],
    rows[:most],
  )
  if len(rows) > most:
    common.print_note(f"... and {len(rows) - most} more")


def print_runs(runs: Mapping[str, Served]) -> None:
  """Prints a line for each run: what it computed, how fast, in what space."""
  common.print_table(
    [
      "run",
      "matched",
      "computed",
      "first token s (p50)",
      "decode tokens/s",
      "peak pages",
      "total s",
    ],
    [
      [
        name,
        served.matched_tokens,
        served.computed_tokens,
        served.ttft_seconds_p50,
        served.decode_tokens_per_second,
        served.peak_pages,
        served.seconds,
      ]
      for name, served in runs.items()
    ],
  )


def write_texts(
  path: pathlib.Path, prompts: Sequence[str], served: Served
) -> None:
  """Writes what was generated, each text under the end of its prompt."""
  blocks = [
    f"[{index}] ...{prompt[-200:]}\n--> {completion.text}\n"
    for index, (prompt, completion) in enumerate(
      zip(prompts, served.completions, strict=True), 1
    )
  ]
  path.write_text("\n".join(blocks), encoding="utf-8")


def shorten(text: str) -> str:
  """Returns the end of a prompt on one line of at most 44 characters."""
  flat = " ".join(text.split())
  if len(flat) <= _PROMPT_WIDTH:
    return flat
  return "..." + flat[-(_PROMPT_WIDTH - 3) :]


def _decode_rate(completion: requests.Completion) -> float | None:
  later = len(completion.tokens) - 1
  seconds = completion.seconds - completion.time_to_first_token_seconds
  return later / seconds if later > 0 and seconds > 0 else None


def summarize(
  prompts: Sequence[Sequence[int]], served: Served
) -> dict[str, object]:
  """Returns the entries of `summary.json` that one run decides.

  `reused_share_of_ideal` is `matched_tokens` over what
  `prompts.ideal_matched_tokens` counts for the same prompts; None where an
  infinite cache could not spare a token either.
  """
  ideal = prompts_lib.ideal_matched_tokens(prompts)
  return {
    "requests": len(prompts),
    "prompt_tokens": sum(map(len, prompts)),
    "matched_tokens": served.matched_tokens,
    "ideal_matched_tokens": ideal,
    "reused_share_of_ideal": served.matched_tokens / ideal if ideal else None,
    "computed_tokens": served.computed_tokens,
    "generated_tokens": served.generated_tokens,
    "preemptions": served.preemptions,
    "peak_pages": served.peak_pages,
    "compilations": served.compilations,
    "ttft_seconds_p50": served.ttft_seconds_p50,
    "decode_tokens_per_second": served.decode_tokens_per_second,
    "seconds": served.seconds,
    "audit_findings": served.audit_findings,
  }


def compare(served: Served, without: Served) -> dict[str, object]:
  """Returns the entries of `summary.json` that a run without reuse adds.

  Args:
    served: the run with reuse.
    without: the run without, of the same prompts or of the first of them.

  Returns:
    Its costs beside the other's; `outputs_equal_without_reuse` tells whether
    every prompt of it got the same tokens. `compilations` and
    `audit_findings` cover both runs.
  """
  pairs = zip(served.completions, without.completions, strict=False)
  return {
    "outputs_equal_without_reuse": all(a.tokens == b.tokens for a, b in pairs),
    "ttft_seconds_p50_without_reuse": without.ttft_seconds_p50,
    "computed_tokens_without_reuse": without.computed_tokens,
    "peak_pages_without_reuse": without.peak_pages,
    "seconds_without_reuse": without.seconds,
    "compilations": max(served.compilations, without.compilations),
    "audit_findings": served.audit_findings + without.audit_findings,
  }


def draw_pool_use(path: pathlib.Path, runs: Mapping[str, Served]) -> None:
  """Draws the live pages of each run over time."""
  drawing = plots.lines(
    {name: served.pool_use for name, served in runs.items()},
    title="Pages in use while the same prompts are served",
    x_label="seconds since the first request",
    y_label="live pages",
    steps=True,
  )
  plots.save(drawing, path)
