"""KV-cache memory and exact prefix reuse for JAX.

`KVCache` owns the pages, `attend` is what a model calls, `Engine` serves
requests; `models` loads decoders that use them. Every error that the library
raises is in `errors`.
"""

from host_allocator.layout import CacheGroup
from host_allocator.layout import CacheLayout
from kvjax import errors
from kvjax import models
from kvjax.attention import attend
from kvjax.cache import KVCache
from kvjax.cache import Step
from kvjax.engine import Engine
from kvjax.pages import Pages
from kvjax.request import Completion
from kvjax.request import FinishReason
from kvjax.request import Request
from kvjax.request import SamplingParams
from kvjax.request import TokenEvent
from kvjax.step import StepArrays

__all__ = [
  "CacheGroup",
  "CacheLayout",
  "Completion",
  "Engine",
  "FinishReason",
  "KVCache",
  "Pages",
  "Request",
  "SamplingParams",
  "Step",
  "StepArrays",
  "TokenEvent",
  "attend",
  "errors",
  "models",
]
