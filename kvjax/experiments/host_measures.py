"""Single costs of the host allocator, each on a pool made for it.

Times are processor time of this thread, so that what else runs on the machine
counts only as far as it empties the caches.
"""

import gc
import random
import resource
import statistics
import time

import numpy as np

from host_allocator import allocator
from host_allocator import layout as layout_lib
from host_allocator import sequences
from host_allocator import tables

_VOCAB = 32000


def make_cache(
  *, num_pages: int, max_sequences: int, max_length: int, page_size: int = 16
) -> allocator.KVAllocator:
  """An allocator of one group; bytes do not matter to the host."""
  layout = layout_lib.CacheLayout.uniform(
    num_layers=1, num_kv_heads=1, head_dim=1, page_size=page_size
  )
  return allocator.KVAllocator(
    layout,
    num_pages=num_pages,
    max_sequences=max_sequences,
    max_length=max_length,
  )


def random_tokens(
  rng: np.random.Generator, count: int, *, low: int = 1, high: int = _VOCAB
) -> np.ndarray:
  """Token ids within `low .. high - 1`, int32 `[count]`."""
  return rng.integers(low, high, count, dtype=np.int32)


def compute(
  cache: allocator.KVAllocator, tokens: np.ndarray | list[int]
) -> sequences.Sequence:
  """Opens a sequence and commits all its rows in one step."""
  sequence = cache.open(tokens)
  rows = sequence.num_tokens - sequence.length
  cache.commit(cache.plan([(sequence, rows)]))
  return sequence


def decode_microseconds_per_token(
  *, num_sequences: int = 256, steps: int = 200, seed: int = 0
) -> float:
  """Host time of a decoded token: append, plan, pack and commit.

  Lengths lie evenly between 1k and 8k tokens, so that page boundaries, tables
  and publication fall as they do in serving.

  Returns:
    The median over the steps, in microseconds.
  """
  rng = np.random.default_rng(seed)
  shortest, longest = 1024, 8192
  cache = make_cache(
    num_pages=num_sequences * (longest + steps + 16) // 16,
    max_sequences=num_sequences,
    max_length=longest + steps,
  )
  lengths = np.linspace(shortest, longest, num_sequences).astype(int)
  rng.shuffle(lengths)
  batch = cache.batch(
    [compute(cache, random_tokens(rng, length)) for length in lengths]
  )
  packing = tables.Packing(
    tables.StepShape(num_sequences, num_sequences), cache.table_widths
  )
  tokens = random_tokens(rng, steps * num_sequences).reshape(steps, -1)
  seconds = []
  for row in tokens:
    start = time.thread_time()
    cache.append(batch, row)
    plan = cache.plan(batch)
    cache.pack(plan, packing)
    cache.commit(plan)
    seconds.append(time.thread_time() - start)
  return statistics.median(seconds) / num_sequences * 1e6


def match_128k_milliseconds(*, rounds: int = 60, seed: int = 0) -> float:
  """Opening on a cached prompt of 128k int32 tokens, built 512 at a time.

  Returns:
    The median over the rounds: tokens checked and kept, match, references,
    table and receipt.
  """
  tokens = random_tokens(np.random.default_rng(seed), 2**17)
  cache = make_cache(num_pages=10_000, max_sequences=2, max_length=2**17 + 1)
  sequence = cache.open(tokens)
  while sequence.length < len(tokens):
    cache.commit(cache.plan([(sequence, 512)]))
  cache.close(sequence)
  seconds = []
  for _ in range(rounds):
    start = time.thread_time()
    sequence = cache.open(tokens)
    seconds.append(time.thread_time() - start)
    if sequence.matched_tokens != len(tokens) - 1:
      raise RuntimeError(f"only {sequence.matched_tokens} tokens were found")
    cache.close(sequence)
  return statistics.median(seconds) * 1e3


def evict_milliseconds(
  *, leaves: int = 41_000, rounds: int = 200, seed: int = 0
) -> tuple[float, float]:
  """Evicting 64 pages from a tree of many four-page leaves.

  Returns:
    Median and 99th percentile over the rounds.
  """
  rng = np.random.default_rng(seed)
  shared = [random_tokens(rng, 1024) for _ in range(8)]
  cache = make_cache(
    num_pages=leaves * 4 + 1024, max_sequences=1, max_length=2048
  )
  for leaf in range(leaves):
    prompt = np.concatenate([shared[leaf % 8], random_tokens(rng, 64)])
    cache.close(compute(cache, prompt))
  seconds = []
  for _ in range(rounds):
    start = time.thread_time()
    cache.index.evict([64])
    seconds.append(time.thread_time() - start)
  return (
    statistics.median(seconds) * 1e3,
    float(np.percentile(seconds, 99)) * 1e3,
  )


def million_page_slowdown(
  *, small: int = 10_000, large: int = 1_000_000, rounds: int = 9
) -> float:
  """How much slower the same requests are in a pool a hundred times larger.

  Both pools are full of cached prefixes when measured, so that every request
  evicts, and of other tokens than the requests', so that both find nothing;
  rounds alternate between them.

  Returns:
    The median ratio of the times.
  """
  caches = [_full_cache(pages) for pages in (small, large)]
  rng = np.random.default_rng(1)
  ratios = []
  for _ in range(rounds):
    prompts = [random_tokens(rng, 500, low=_VOCAB // 2) for _ in range(100)]
    times = []
    for cache in caches:
      start = time.thread_time()
      for prompt in prompts:
        cache.close(compute(cache, prompt))
      times.append(time.thread_time() - start)
    ratios.append(times[1] / times[0])
  return statistics.median(ratios)


def _full_cache(num_pages: int) -> allocator.KVAllocator:
  """A pool whose pages are all evictable, in leaves of 64 pages."""
  rng = np.random.default_rng(0)
  cache = make_cache(num_pages=num_pages, max_sequences=1, max_length=1024)
  for _ in range(-(-num_pages // 64)):
    tokens = random_tokens(rng, 1024, high=_VOCAB // 2)
    cache.close(compute(cache, tokens))
  return cache


def memory_growth_bytes(*, requests: int, seed: int = 0) -> int:
  """Growth of the resident set over many requests, collector disabled.

  Requests fork, decode, truncate and are evicted again; a twentieth of them
  warm the process up first.

  Returns:
    Bytes by which the peak rose after the warm-up.
  """
  draw = random.Random(seed)
  cache = make_cache(num_pages=2048, max_sequences=4, max_length=128)
  shared = [draw.randrange(1, _VOCAB) for _ in range(32)]

  def serve(count: int) -> None:
    for _ in range(count):
      tail = [draw.randrange(1, _VOCAB) for _ in range(draw.randrange(1, 60))]
      sequence = compute(cache, shared + tail)
      child = cache.fork(sequence)
      cache.append([child], [1])
      cache.commit(cache.plan([(child, 1)]))
      cache.truncate(child, 20)
      cache.close(sequence)
      cache.close(child)

  enabled = gc.isenabled()
  gc.collect()
  gc.disable()
  try:
    serve(max(requests // 20, 200))
    before = _peak_bytes()
    serve(requests)
    return _peak_bytes() - before
  finally:
    if enabled:
      gc.enable()


def _peak_bytes() -> int:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
