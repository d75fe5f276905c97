"""KV-cache memory and exact prefix reuse for JAX.

`KVCache` owns the pages, `attend` is what a model calls, `Engine` serves
requests; `models` loads decoders that use them.
"""

from host_allocator.layout import CacheGroup
from host_allocator.layout import CacheLayout
from kvjax.attention import attend
from kvjax.cache import KVCache
from kvjax.cache import Step
from kvjax.pages import Pages
from kvjax.step import StepArrays

__all__ = [
  "CacheGroup",
  "CacheLayout",
  "KVCache",
  "Pages",
  "Step",
  "StepArrays",
  "attend",
]
