"""A thousand requests with shared prefixes through the host allocator alone.

    python -m kvjax.run --config=configs/host_churn.py --workdir=out/host_churn

With VLLM_SRC and SGLANG_SRC set to the folders that hold `vllm/` and `sglang/`,
and torch, cbor2, xxhash and msgspec installed, their managers run the same
trace under the same schedule in the same process.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the configuration of the host churn."""
  return ml_collections.ConfigDict(
    {
      "experiment": "host_churn",
      "seed": 0,
      # The trace: 8 system prompts of 1,024 tokens, 64 groups of 256 more, own
      # tails of 32 to 512.
      "num_requests": 1000,
      "output_tokens": 64,
      # The schedule, the same for every manager.
      "max_active": 64,
      "admissions_per_step": 4,
      "rounds": 5,
      # The pool.
      "page_size": 16,
      "num_pages": 8192,
      "max_length": 2048,
      # Ours.
      "prefix_index": "radix",
      "tail_policy": "copy_rows",
      "eviction": "lru",
      # The single costs.
      "leaves": 41_000,
      "large_pool_pages": 1_000_000,
      "memory_requests": 50_000,
    }
  )
