"""What every merge gets right."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels import harness


def _states(parts, seed=0):
  rng = np.random.default_rng(seed)
  outs = rng.standard_normal((parts, 5, 4, 64)).astype(np.float32)
  lses = (3 * rng.standard_normal((parts, 5, 4))).astype(np.float32)
  return outs, lses


def _oracle(outs, lses):
  """By the definition, in float64; a part with lse -inf does not exist."""
  weights = np.exp(lses.astype(np.float64))
  outs = np.where(weights[..., None] == 0, 0, outs.astype(np.float64))
  total = weights.sum(0)
  with np.errstate(divide="ignore"):
    lse = np.log(total)
  total = np.where(total == 0, 1, total)
  return (outs * weights[..., None]).sum(0) / total[..., None], lse


class MergeConformance:
  """Subclasses set `implementation`."""

  implementation: harness.Implementation

  @pytest.mark.parametrize("parts", [1, 2, 5])
  def test_a_merge_weighs_parts_by_their_lse(self, parts):
    outs, lses = _states(parts)
    out, lse = self.implementation.merge(outs, lses)
    harness.assert_close((out, lse), _oracle(outs, lses))

  @pytest.mark.parametrize("parts", [1, 2, 3])
  def test_merging_nothing_gives_nothing(self, parts):
    outs = np.zeros((parts, 5, 4, 64), np.float32)
    lses = np.full((parts, 5, 4), -np.inf, np.float32)
    out, lse = self.implementation.merge(outs, lses)
    assert (out == 0).all()
    assert (lse == -np.inf).all()

  @pytest.mark.parametrize("junk", [0.0, np.nan, np.inf])
  def test_an_empty_part_is_the_identity_on_every_side(self, junk):
    outs, lses = _states(3)
    for empty in range(3):
      some_outs, some_lses = outs.copy(), lses.copy()
      some_outs[empty], some_lses[empty] = junk, -np.inf
      got = self.implementation.merge(some_outs, some_lses)
      harness.assert_close(got, _oracle(some_outs, some_lses))
      kept = [part for part in range(3) if part != empty]
      harness.assert_close(
        got, self.implementation.merge(outs[kept], lses[kept])
      )

  def test_one_part_alone_comes_back(self):
    outs, lses = _states(2)
    lses[0] = -np.inf
    out, lse = self.implementation.merge(outs, lses)
    harness.assert_close((out, lse), (outs[1], lses[1]))

  def test_order_does_not_matter(self):
    outs, lses = _states(3)
    want = _oracle(outs, lses)
    for order in itertools.permutations(range(3)):
      at = list(order)
      got = self.implementation.merge(outs[at], lses[at])
      harness.assert_close(got, want)

  def test_large_lses_do_not_overflow(self):
    outs, lses = _states(3)
    shift = np.asarray([300.0, -300.0, 1e30], np.float32)
    for amount in shift:
      got = self.implementation.merge(outs, lses + amount)
      assert np.isfinite(got[0]).all()
    got = self.implementation.merge(outs, lses + np.float32(300))
    want = _oracle(outs, lses)
    harness.assert_close(got, (want[0], want[1] + 300), 1e-4)

  def test_bfloat16_outputs_are_merged_in_float32(self):
    outs, lses = _states(4)
    narrow = outs.astype(jnp.bfloat16)
    out, _ = self.implementation.merge(narrow, lses)
    assert out.dtype == jnp.bfloat16
    want, _ = _oracle(narrow.astype(np.float32), lses)
    error = np.abs(out.astype(np.float64) - want).max()
    assert error <= 2**-8 * np.abs(want).max()
