"""The XLA implementation passes what every implementation passes."""

import dataclasses
import functools
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bits
from pallas_kernels import page_shape
from pallas_kernels.paged_attention import tiles
from tests.pallas_kernels import batches
from tests.pallas_kernels import conformance
from tests.pallas_kernels import harness
from tests.pallas_kernels import oracle


def _tiling(*sizes):
  chosen = tiles.XlaTiles(*sizes)
  return mock.patch.object(tiles, "choose_xla_tiles", return_value=chosen)


XLA = conformance.Implementation(
  "xla",
  tilings=(
    functools.partial(_tiling, 8, 1, 3, 2),
    functools.partial(_tiling, 64, 2, 4, 8),
    functools.partial(_tiling, 4096, 8, 512, 512),
  ),
)
# Pages as a TPU folds and pads them.
FOLDED = conformance.Implementation("xla", platform="tpu")


class TestAttention(conformance.FewerCases):
  implementation = XLA


@pytest.mark.slow
class TestAllAttention(conformance.AttentionConformance):
  implementation = XLA


class TestBlocks:
  """How the blocks of a batch are dealt out."""

  @pytest.mark.parametrize("together", [1, 3, 8])
  def test_a_sequence_keeps_its_bits_wherever_its_blocks_fall(self, together):
    # Blocks of 16 rows: a neighbour of 0 to 13 blocks moves those behind it.
    last = batches.make([61])
    found = []
    # An `after` of its own keeps its compiled functions apart.
    dealt = dataclasses.replace(XLA, after=lambda: None)
    with _tiling(16, together, 128, 32):
      for rows in (40, 0, 200, 17):
        first = batches.make([rows], seed=1)
        both = dataclasses.replace(
          first,
          q=np.concatenate([first.q, last.q]),
          keys=first.keys + last.keys,
          values=first.values + last.values,
          counts=first.counts + last.counts,
        )
        arrays = batches.paged(both, "cpu", width=26)
        out, lse = dealt.attend(arrays)
        assert oracle.relative_error(out, lse, oracle.attention(both)) <= 1e-5
        found.append((out[1:], lse[1:]))
    for other in found[1:]:
      harness.assert_same_bits(other, found[0])


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


class TestStoredAsIntegers:
  """Narrow floats that lie in pages of unsigned integers."""

  @pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
  @pytest.mark.parametrize("implementation", ["xla", "reference"])
  def test_attention_reads_the_same_bits(self, implementation, kv_dtype):
    case = conformance.Implementation(implementation)
    batch = batches.make([5, 41, 60], dtype="bfloat16", kv_dtype=kv_dtype)
    arrays = batches.paged(batch, "cpu")
    want = case.attend(arrays)
    stored = bits.storage_dtype(kv_dtype, platform="cpu")
    for name in ("k_pages", "v_pages"):
      arrays[name] = arrays[name].view(stored)
    harness.assert_same_bits(case.attend(arrays), want)

  @pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
  @pytest.mark.parametrize("implementation", ["xla", "reference"])
  def test_writes_leave_the_same_bits(self, implementation, kv_dtype):
    case = conformance.Implementation(implementation)
    x = np.random.default_rng(0).standard_normal((3, 2, 64))
    pages = np.zeros((4, 2, 16, 64), jnp.dtype(kv_dtype))
    arrays = {
      "k": x.astype(np.float32),
      "v": x.astype(np.float32),
      "slots": np.asarray([17, 40, 63], np.int32),
    }
    if kv_dtype == "float8_e4m3fn":
      arrays["k_scales"] = np.ones((4, *page_shape.scales_shape(2, 16)))
      arrays["k_scales"] = arrays["k_scales"].astype(np.float32)
      arrays["v_scales"] = arrays["k_scales"]
    want = case.write(arrays | {"k_pages": pages, "v_pages": pages})
    stored = pages.view(bits.storage_dtype(kv_dtype, platform="cpu"))
    got = case.write(arrays | {"k_pages": stored, "v_pages": stored})
    assert got[0].dtype == stored.dtype
    for found, wanted in zip(got, want, strict=True):
      np.testing.assert_array_equal(found.view(wanted.dtype), wanted)
