"""The host allocator under load, beside vLLM's and SGLang's managers."""

import gc
import os
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import ml_collections

from host_allocator import allocator as allocators
from host_allocator import errors
from kvjax.experiments import churn
from kvjax.experiments import common
from kvjax.experiments import host_measures
from kvjax.experiments.rivals import sglang_manager
from kvjax.experiments.rivals import vllm_manager

OURS = "kvjax"


def run(
  config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> dict[str, object]:
  """Serves one trace through every manager that is there; no device is used.

  Rounds interleave the managers, each starting empty, so that a slow minute of
  the machine hits all; ratios are medians over the rounds.  Where a rival's
  source is not pointed at, its ratio is None.

  Args:
    config: see `configs/host_churn.py`.
    workdir: gets `summary.json`.

  Returns:
    The summary.

  Raises:
    ExperimentError: Where VLLM_SRC or SGLANG_SRC leads nowhere.
  """
  trace = churn.shared_prefix_trace(
    config.num_requests, seed=config.seed, output_tokens=config.output_tokens
  )
  makers = _makers(config)
  outcomes: dict[str, list[churn.Outcome]] = {name: [] for name in makers}
  findings: tuple[str, ...] = ()
  for round_number in range(config.rounds):
    for name, make in makers.items():
      common.print_note(f"round {round_number + 1}: {name}")
      manager = make()
      gc.collect()
      gc.freeze()  # What was imported is not searched again and again.
      outcomes[name].append(
        churn.run_schedule(
          manager,
          trace,
          max_active=config.max_active,
          admissions_per_step=config.admissions_per_step,
        )
      )
      if isinstance(manager, KvjaxManager):
        findings += manager.cache.audit()
  _print_outcomes(outcomes)
  summary = {
    "requests": config.num_requests,
    "requests_per_second": _median_rate(outcomes[OURS]),
    **{
      f"ratio_vs_{name}": _ratio(outcomes, name)
      for name in ("vllm", "sglang_python", "sglang_rust")
    },
    "hit_rate": outcomes[OURS][0].hit_rate,
    **_measures(config),
    "audit_findings": len(findings),
  }
  common.print_table(["measure", "value"], list(summary.items()))
  return common.write_summary(workdir, summary)


class KvjaxManager:
  """Our allocator, as a user gets it: receipts, generations, rollback."""

  def __init__(self, config: ml_collections.ConfigDict):
    self.cache = allocators.KVAllocator(
      host_measures.make_cache(
        num_pages=1,
        max_sequences=1,
        max_length=1,
        page_size=config.page_size,
      ).layout,
      num_pages=config.num_pages,
      max_sequences=config.max_active,
      max_length=config.max_length,
      prefix_index=config.prefix_index,
      tail_policy=config.tail_policy,
      eviction=config.eviction,
    )
    self._members: list[Any] = []
    self._batch: Any = None

  def admit(self, request: churn.Request) -> tuple[Any, int] | None:
    """Opens the prompt; its pages are reserved with the step."""
    cache = self.cache
    sequence = cache.open(request.prompt)
    pool = cache.pools[0]
    missing = sequence.num_tokens - sequence.length
    if missing > pool.available * pool.page_size:
      cache.close(sequence)
      return None
    return sequence, sequence.matched_tokens

  def prefill(self, handles: list[Any]) -> None:
    """One step of all admitted prompts."""
    cache = self.cache
    plan = cache.plan(
      [(each, each.num_tokens - each.length) for each in handles]
    )
    cache.commit(plan)

  def decode(self, handles: list[Any], tokens: list[int]) -> bool:
    """One step of one token each."""
    cache = self.cache
    if handles != self._members:
      self._members, self._batch = handles, cache.batch(handles)
    cache.append(self._batch, tokens)
    try:
      plan = cache.plan(self._batch)
    except errors.OutOfPages:
      return False
    cache.commit(plan)
    return True

  def finish(self, handle: Any) -> None:
    """Closes the sequence; its pages stay findable."""
    self.cache.close(handle)


def _makers(
  config: ml_collections.ConfigDict,
) -> dict[str, Callable[[], churn.Manager]]:
  """The managers that can be made here, ours first."""
  makers: dict[str, Callable[[], churn.Manager]] = {
    OURS: lambda: KvjaxManager(config)
  }
  rivals = {
    "vllm": ("VLLM_SRC", vllm_manager.VllmManager),
    "sglang_python": ("SGLANG_SRC", sglang_manager.SglangManager),
    "sglang_rust": ("SGLANG_SRC", sglang_manager.SglangRustManager),
  }
  for name, (variable, manager) in rivals.items():
    source = os.environ.get(variable)
    if not source:
      common.print_note(f"{variable} is not set: {name} is not measured")
      continue
    makers[name] = _rival_maker(manager, source, config)
    try:
      makers[name]()
    except (ImportError, OSError) as error:
      raise common.ExperimentError(
        f"{name} cannot be run from {variable}={source!r}: {error}"
      ) from error
  return makers


def _rival_maker(
  manager: Any, source: str, config: ml_collections.ConfigDict
) -> Callable[[], churn.Manager]:
  return lambda: manager(
    source, num_pages=config.num_pages, page_size=config.page_size
  )


def _median_rate(outcomes: list[churn.Outcome]) -> float:
  return statistics.median(each.requests_per_second for each in outcomes)


def _ratio(
  outcomes: dict[str, list[churn.Outcome]], rival: str
) -> float | None:
  """How many times our requests/s are the rival's, round by round."""
  if rival not in outcomes:
    return None
  return statistics.median(
    theirs.seconds / ours.seconds
    for ours, theirs in zip(outcomes[OURS], outcomes[rival], strict=True)
  )


def _print_outcomes(outcomes: dict[str, list[churn.Outcome]]) -> None:
  rows = [
    [name, _median_rate(runs), runs[0].hit_rate, _ratio(outcomes, name)]
    for name, runs in outcomes.items()
  ]
  common.print_table(
    ["manager", "requests/s", "hit rate", "times slower"], rows
  )
  print()


def _measures(config: ml_collections.ConfigDict) -> dict[str, float | int]:
  common.print_note("single costs: decode, match, evict, pool size, memory")
  evict, evict_p99 = host_measures.evict_milliseconds(leaves=config.leaves)
  return {
    "host_us_per_decoded_token_at_256": (
      host_measures.decode_microseconds_per_token()
    ),
    "match_128k_ms": host_measures.match_128k_milliseconds(),
    "evict_64_pages_of_41k_leaves_ms": evict,
    "evict_64_pages_of_41k_leaves_p99_ms": evict_p99,
    "million_page_slowdown": host_measures.million_page_slowdown(
      large=config.large_pool_pages
    ),
    "rss_growth_bytes": host_measures.memory_growth_bytes(
      requests=config.memory_requests
    ),
  }
