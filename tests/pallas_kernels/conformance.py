"""The tests that every implementation of every op passes.

An implementation plugs in with a subclass that names it, in its own test file:

    class TestAttention(conformance.AttentionConformance):
      implementation = conformance.Implementation("xla")

A case that the implementation refuses is skipped with the reason that
`why_unsupported` gives; everything else must agree with the float64 oracle.
"""

from tests.pallas_kernels.attention_conformance import AttentionConformance
from tests.pallas_kernels.attention_conformance import FewerCases
from tests.pallas_kernels.harness import Implementation
from tests.pallas_kernels.mask_conformance import MaskConformance
from tests.pallas_kernels.merge_conformance import MergeConformance
from tests.pallas_kernels.update_conformance import UpdateConformance

__all__ = [
  "AttentionConformance",
  "FewerCases",
  "Implementation",
  "MaskConformance",
  "MergeConformance",
  "UpdateConformance",
]
