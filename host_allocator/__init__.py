"""Host bookkeeping of a KV cache: every decision about ownership, in integers.

Importing this package imports the standard library and NumPy, never JAX.
"""

from host_allocator.allocator import KVAllocator
from host_allocator.layout import CacheGroup
from host_allocator.layout import CacheLayout
from host_allocator.pages import PageHandle
from host_allocator.pages import PoolUsage
from host_allocator.prefix.side_inputs import SideInput
from host_allocator.sequences import Batch
from host_allocator.sequences import Sequence
from host_allocator.steps import StepPlan
from host_allocator.tables import Packing
from host_allocator.tables import step_shapes
from host_allocator.tables import StepShape

__all__ = [
  "Batch",
  "CacheGroup",
  "CacheLayout",
  "KVAllocator",
  "Packing",
  "PageHandle",
  "PoolUsage",
  "Sequence",
  "SideInput",
  "StepPlan",
  "StepShape",
  "step_shapes",
]
