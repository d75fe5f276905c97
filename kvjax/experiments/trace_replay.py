"""Hit rates of a recorded trace, by the capacity of the cache."""

import itertools
import json
import pathlib
import time

import ml_collections
import numpy as np

from host_allocator import allocator as allocators
from host_allocator import layout as layout_lib
from kvjax.experiments import common


def run(
  config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> dict[str, object]:
  """Replays the prompts of a trace, one after the other.

  A trace names each block of a prompt by the hash of its content, so a block is
  one token here and a page holds one: hits are counted in whole blocks, and the
  last block of a prompt may be found too.

  Args:
    config: see `configs/trace_replay.py`.
    workdir: gets `summary.json`.

  Returns:
    The summary: `hit_rate_unlimited`, `hit_rate_N` for each capacity N in
    blocks, and `requests_per_second` over all replays.

  Raises:
    ExperimentError: Where the trace is not there or not one.
  """
  prompts = read_blocks(_trace_path(config.trace))
  if config.limit:
    prompts = prompts[: config.limit]
  distinct = len(set(itertools.chain.from_iterable(map(list, prompts))))
  capacities = {"unlimited": distinct + 1}
  capacities |= {str(count): count for count in config.capacities}
  rates: dict[str, float] = {}
  start = time.perf_counter()
  for name, num_pages in capacities.items():
    rates[name] = replay(
      prompts,
      num_pages=num_pages,
      prefix_index=config.prefix_index,
      eviction=config.eviction,
    )
  seconds = time.perf_counter() - start
  common.print_table(["blocks", "hit rate"], list(rates.items()))
  return common.write_summary(
    workdir,
    {
      "requests": len(prompts),
      "blocks": sum(map(len, prompts)),
      "distinct_blocks": distinct,
      **{f"hit_rate_{name}": rate for name, rate in rates.items()},
      "requests_per_second": len(prompts) * len(rates) / seconds,
    },
  )


def replay(
  prompts: list[np.ndarray],
  *,
  num_pages: int,
  prefix_index: str = "radix",
  eviction: str = "lru",
) -> float:
  """Share of the prompts' blocks that were found in the cache.

  A prompt longer than the pool is looked up and keeps as much of its beginning
  as fits.

  Args:
    prompts: int32 block names, each prompt's in order.
    num_pages: Blocks that the cache holds.
    prefix_index: "radix" or "hash_chain".
    eviction: The policy's name.
  """
  layout = layout_lib.CacheLayout.uniform(
    num_layers=1, num_kv_heads=1, head_dim=1, page_size=1
  )
  cache = allocators.KVAllocator(
    layout,
    num_pages=num_pages,
    max_sequences=1,
    max_length=max(map(len, prompts)),
    prefix_index=prefix_index,
    eviction=eviction,
  )
  found = 0
  for prompt in prompts:
    sequence = cache.open(prompt[:num_pages], want_logits=False)
    found += sequence.matched_tokens
    rest = sequence.num_tokens - sequence.length
    if rest:
      cache.commit(cache.plan([(sequence, rest)]))
    cache.close(sequence)
  return found / sum(map(len, prompts))


def read_blocks(path: pathlib.Path) -> list[np.ndarray]:
  """The block names of each prompt in a trace of JSON lines.

  Raises:
    ExperimentError: Naming the first line without "hash_ids".
  """
  prompts = []
  with path.open(encoding="utf-8") as lines:
    for number, line in enumerate(lines, 1):
      try:
        prompts.append(np.array(json.loads(line)["hash_ids"], np.int32))
      except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise common.ExperimentError(
          f"line {number} of {str(path)!r} is no request with hash_ids"
        ) from error
  if not prompts:
    raise common.ExperimentError(f"{str(path)!r} holds no request")
  return prompts


def _trace_path(name: str) -> pathlib.Path:
  if not name:
    return common.find_data("mooncake/conversation_trace.jsonl")
  path = pathlib.Path(name)
  if not path.is_file():
    raise common.ExperimentError(f"no trace at {name!r}")
  return path
