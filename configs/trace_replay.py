"""Hit rates of the Mooncake conversation trace, by capacity.

    python -m kvjax.run --config=configs/trace_replay.py \
      --config.trace=conversation_trace.jsonl --workdir=out/trace_replay

A trace is one JSON object a line whose "hash_ids" name the blocks of a prompt.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the configuration of the trace replay."""
  return ml_collections.ConfigDict(
    {
      "experiment": "trace_replay",
      # Empty takes mooncake/conversation_trace.jsonl below $KVJAX_DATA.
      "trace": "",
      # The first so many requests; 0 for all.
      "limit": 0,
      "capacities": (1000, 5000, 10_000, 30_000, 50_000, 100_000),
      "prefix_index": "radix",
      "eviction": "lru",
    }
  )
