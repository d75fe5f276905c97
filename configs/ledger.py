"""The worked ledger: what three requests with one prefix cost in bytes.

    python -m kvjax.run --config=configs/ledger.py --workdir=out/ledger

Opens the requests in a real allocator, shares their pages, and counts bytes
from its tables: reservations, references, unique pages, the pool and the
records that keep track of them. Your own geometry and lengths:

    python -m kvjax.run --config=configs/ledger.py --workdir=out/mine \\
      --config.num_layers=16 --config.page_size=32 --config.lengths='(900, 70)'
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the configuration of the worked ledger."""
  return ml_collections.ConfigDict(
    {
      "experiment": "ledger",
      # One tensor-parallel worker's share of the cache.
      "num_layers": 32,
      "num_kv_heads": 4,
      "head_dim": 128,
      "page_size": 16,
      "dtype": "float16",
      "quantization": "",
      # Requests: rows of each, every one an exact prefix of the longest, and
      # the rows a contiguous allocator would set aside for it.
      "lengths": (33, 25, 16),
      "reserved": (64, 48, 32),
      "num_pages": 8,
      # Bytes of one bookkeeping record of each kind.
      "map_entry_bytes": 4,
      "page_descriptor_bytes": 32,
      "hash_entry_bytes": 24,
      "request_tail_bytes": 2,
      "free_entry_bytes": 4,
      "fixed_bytes": 128,
      # What a device of this much memory would hold.
      "budget_gib": 16.0,
      "planned_length": 4096,
      "planned_shared": 3072,
    }
  )
