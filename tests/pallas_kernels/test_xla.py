"""The XLA implementation passes what every implementation passes."""

import functools
from unittest import mock

import pytest

from pallas_kernels.paged_attention import tiles
from tests.pallas_kernels import batches
from tests.pallas_kernels import conformance
from tests.pallas_kernels import harness


def _tiling(**sizes):
  chosen = tiles.XlaTiles(**sizes)
  return mock.patch.object(tiles, "choose_xla_tiles", return_value=chosen)


XLA = conformance.Implementation(
  "xla",
  tilings=(
    functools.partial(_tiling, block_rows=8, decode_sequences=1, query_rows=3),
    functools.partial(_tiling, block_rows=64, decode_sequences=2),
    functools.partial(_tiling, block_rows=4096, query_rows=512),
  ),
)
# Pages as a TPU folds and pads them.
FOLDED = conformance.Implementation("xla", platform="tpu")


class TestAttention(conformance.AttentionConformance):
  implementation = XLA


class TestMasks(conformance.MaskConformance):
  implementation = XLA


class TestMerge(conformance.MergeConformance):
  implementation = XLA


class TestUpdate(conformance.UpdateConformance):
  implementation = XLA


class TestFoldedUpdate(conformance.UpdateConformance):
  implementation = FOLDED


class TestFolded:
  """Pages as a TPU folds and pads them, read on any platform."""

  @pytest.mark.parametrize("head_dim", [64, 80])
  @pytest.mark.parametrize("counts", [None, [1, 13, 2]])
  def test_attention(self, counts, head_dim):
    batch = batches.make([5, 41, 60], counts, head_dim=head_dim)
    harness.check(FOLDED, batch)
