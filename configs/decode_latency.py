"""Attention over pages against dense attention, verified, then in turns.

    python -m kvjax.run --config=configs/decode_latency.py --workdir=out/latency

On a TPU or GPU, a size that fills it:

    python -m kvjax.run --config=configs/decode_latency.py --workdir=out/latency \\
      --config.sequences=64 --config.q_heads=32 --config.kv_heads=8 \\
      --config.head_dim=128 --config.context=4096 --config.dtype=bfloat16 \\
      --config.calls=20
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the configuration of the decode latency run."""
  return ml_collections.ConfigDict(
    {
      "experiment": "decode_latency",
      "sequences": 8,
      "q_heads": 8,
      "kv_heads": 2,
      "head_dim": 64,
      "page_size": 16,
      # Rows of every sequence; of the longest where lengths are ragged.
      "context": 2048,
      # Rows of the shortest sequence where lengths are ragged.
      "shortest": 128,
      # The last rows of one context, computed behind the cached others.
      "prefill_rows": 512,
      "dtype": "float32",
      # Implementations beside the one that a caller gets by default.
      "implementations": ("xla",),
      "rounds": 40,
      # Calls in flight before a round waits; above 1 it hides the launch.
      "calls": 1,
      "seed": 0,
    }
  )
