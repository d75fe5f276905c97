"""The reference implementation passes what every implementation passes."""

import pytest

from tests.pallas_kernels import batches
from tests.pallas_kernels import conformance
from tests.pallas_kernels import harness

REFERENCE = conformance.Implementation("reference", long=300)
# Pages as a TPU folds and pads them.
FOLDED = conformance.Implementation("reference", platform="tpu", long=300)


class TestAttention(conformance.FewerCases):
  implementation = REFERENCE


@pytest.mark.slow
class TestAllAttention(conformance.AttentionConformance):
  implementation = REFERENCE


class TestMasks(conformance.MaskConformance):
  implementation = REFERENCE


class TestMerge(conformance.MergeConformance):
  implementation = REFERENCE


class TestUpdate(conformance.UpdateConformance):
  implementation = REFERENCE


class TestFoldedUpdate(conformance.UpdateConformance):
  implementation = FOLDED


class TestFolded:
  """Pages as a TPU folds and pads them, read on any platform."""

  @pytest.mark.parametrize("head_dim", [64, 80])
  @pytest.mark.parametrize("counts", [None, [1, 13, 2]])
  def test_attention(self, counts, head_dim):
    batch = batches.make([5, 41, 60], counts, head_dim=head_dim)
    harness.check(FOLDED, batch)
