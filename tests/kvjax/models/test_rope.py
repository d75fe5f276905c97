"""Rotation is multiplication by unit complex numbers."""

import jax.numpy as jnp
import numpy as np

from kvjax.models import rope


def test_pairs_turn_as_complex_numbers_do():
  rng = np.random.default_rng(0)
  x = rng.standard_normal((5, 3, 8))
  positions = np.array([0, 1, 2, 40, 1000])
  frequencies = rope.inverse_frequencies(8, 100.0, (1.0, 2.0, 4.0, 8.0))
  np.testing.assert_allclose(
    frequencies, [1, 100**-0.25 / 2, 100**-0.5 / 4, 100**-0.75 / 8]
  )

  turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(
    1j * positions[:, None] * frequencies
  )[:, None]
  cos_sin = rope.angles(jnp.asarray(positions, jnp.int32), frequencies)
  ours = rope.rotate(jnp.asarray(x, jnp.float32), cos_sin)

  expected = np.concatenate([turned.real, turned.imag], axis=-1)
  np.testing.assert_allclose(ours, expected, atol=2e-4)


def test_scores_depend_on_distance_only():
  rng = np.random.default_rng(1)
  q, k = jnp.asarray(rng.standard_normal((2, 1, 1, 8)), jnp.float32)
  frequencies = rope.inverse_frequencies(8, 10_000.0, None)

  def score(query_position, key_position):
    turned = [
      rope.rotate(x, rope.angles(jnp.array([p], jnp.int32), frequencies))
      for x, p in ((q, query_position), (k, key_position))
    ]
    return float(jnp.vdot(*turned))

  np.testing.assert_allclose(score(7, 3), score(104, 100), rtol=1e-4)
