"""What is drawn: against sorting in NumPy, and JAX's own keys."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import request as requests
from kvjax import sampling

VOCAB = 64


def fake_sample(index=0, seed=0, **params):
  """All that `pack` reads of a sample."""
  return types.SimpleNamespace(
    index=index,
    params=requests.SamplingParams(**params),
    request=types.SimpleNamespace(seed=seed),
  )


@jax.jit
def draw(logits, rows, positions):
  return sampling.sample_tokens(logits, rows, positions)


def draw_for(samples, logits, positions, padding=0):
  """Draws for some samples, in a batch padded with greedy rows."""
  size = len(samples) + padding
  rows = sampling.SamplingRows(jnp.asarray(sampling.pack(samples, size)))
  full = np.zeros((size, logits.shape[1]), np.float32)
  full[: len(samples)] = logits
  where = np.zeros(size, np.int32)
  where[: len(samples)] = positions
  return np.asarray(draw(full, rows, where))[: len(samples)]


def random_logits(rows, seed=0, scale=3.0):
  values = np.random.default_rng(seed).normal(size=(rows, VOCAB)) * scale
  return values.astype(np.float32)


def kept_by_sorting(logits, top_k, top_p):
  """The set that survives top-k and then top-p, in float64."""
  order = np.argsort(-logits.astype(np.float64), kind="stable")
  kept = order[:top_k] if top_k else order
  mass = np.exp(logits[kept].astype(np.float64) - logits.max())
  mass /= mass.sum()
  if top_p < 1.0:
    kept = kept[: int(np.searchsorted(np.cumsum(mass), top_p)) + 1]
  return set(kept.tolist())


def test_temperature_zero_takes_the_most_likely_token():
  logits = random_logits(3)
  samples = [fake_sample(), fake_sample(temperature=0.7), fake_sample()]
  drawn = draw_for(samples, logits, [1, 2, 3])
  np.testing.assert_array_equal(drawn[[0, 2]], logits.argmax(-1)[[0, 2]])


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**40 + 5])
@pytest.mark.parametrize("index", [0, 3])
def test_the_key_is_the_seeds_folded_with_sample_and_position(seed, index):
  logits = random_logits(1, seed=seed % 1000)
  for position in (1, 9, 1000):
    high, low = divmod(seed, 2**32)
    key = jax.random.wrap_key_data(
      jnp.array([high, low], jnp.uint32), impl="threefry2x32"
    )
    key = jax.random.fold_in(jax.random.fold_in(key, index), position)
    expected = jax.random.categorical(key, logits[0] / np.float32(0.5))
    sample = fake_sample(index, seed, temperature=0.5)
    assert draw_for([sample], logits, [position])[0] == expected


def test_a_row_draws_the_same_alone_and_in_any_batch():
  logits = random_logits(5)
  samples = [
    fake_sample(seed=1, temperature=1.0),
    fake_sample(seed=2, temperature=0.3, top_k=5),
    fake_sample(),
    fake_sample(seed=3, temperature=2.0, top_p=0.6),
    fake_sample(2, seed=3, temperature=2.0, top_k=9, top_p=0.6),
  ]
  positions = [4, 8, 15, 16, 23]
  together = draw_for(samples, logits, positions, padding=3)
  order = [3, 0, 4, 2, 1]
  shuffled = draw_for(
    [samples[i] for i in order], logits[order], np.array(positions)[order]
  )
  np.testing.assert_array_equal(shuffled, together[order])
  for row, sample in enumerate(samples):
    alone = draw_for([sample], logits[row : row + 1], positions[row])
    assert alone[0] == together[row]


def test_draws_follow_the_softmax_of_the_scaled_logits():
  logits = random_logits(1, scale=1.0)
  draws = 4096
  sample = fake_sample(seed=5, temperature=0.8)
  drawn = draw_for(
    [sample] * draws, np.repeat(logits, draws, 0), np.arange(draws)
  )
  found = np.bincount(drawn, minlength=VOCAB) / draws
  mass = np.exp(logits[0].astype(np.float64) / 0.8)
  mass /= mass.sum()
  # Five standard deviations of each count.
  assert (abs(found - mass) < 5 * np.sqrt(mass / draws) + 1e-4).all()


@pytest.mark.parametrize(
  ("top_k", "top_p"),
  [
    (1, 1.0),
    (5, 1.0),
    (VOCAB + 9, 1.0),
    (0, 0.3),
    (0, 0.95),
    (6, 0.7),
    (9, 1e-6),
  ],
)
def test_cuts_keep_what_sorting_keeps(top_k, top_p):
  logits = random_logits(24, seed=top_k)
  kept = jax.jit(sampling.keep_top_k)(logits, jnp.full(24, top_k, jnp.int32))
  if top_p < 1.0:
    kept = jax.jit(sampling.keep_top_p)(kept, jnp.full(24, top_p, jnp.float32))
  for row, values in zip(logits, np.asarray(kept), strict=True):
    found = set(np.flatnonzero(np.isfinite(values)).tolist())
    assert found == kept_by_sorting(row, top_k, top_p)
    np.testing.assert_array_equal(values[list(found)], row[list(found)])


def test_cuts_of_one_row_leave_its_neighbours_alone():
  logits = random_logits(3)
  kept = np.asarray(sampling.keep_top_k(logits, jnp.array([0, 2, VOCAB])))
  assert np.isfinite(kept).sum(-1).tolist() == [VOCAB, 2, VOCAB]
  kept = np.asarray(
    sampling.keep_top_p(logits, jnp.array([1.0, 1e-9, 1.0], jnp.float32))
  )
  assert np.isfinite(kept).sum(-1).tolist() == [VOCAB, 1, VOCAB]


def test_tokens_that_tie_with_the_last_kept_one_are_kept():
  logits = np.full((1, VOCAB), -5.0, np.float32)
  logits[0, [3, 4, 5]] = [2.0, 1.0, 1.0]
  kept = np.asarray(sampling.keep_top_k(logits, jnp.array([2])))
  assert np.flatnonzero(np.isfinite(kept[0])).tolist() == [3, 4, 5]


def test_a_tiny_temperature_is_greedy_and_not_nan():
  logits = random_logits(4) * 1e4
  samples = [fake_sample(seed=i, temperature=1e-30) for i in range(4)]
  drawn = draw_for(samples, logits, [1, 2, 3, 4])
  np.testing.assert_array_equal(drawn, logits.argmax(-1))


def test_all_negative_and_infinite_logits_are_cut_in_order():
  logits = -np.abs(random_logits(1)) - 1.0
  logits[0, :8] = -np.inf
  kept = np.asarray(sampling.keep_top_k(logits, jnp.array([4])))
  assert set(np.flatnonzero(np.isfinite(kept[0]))) == set(
    np.argsort(-logits[0])[:4]
  )


def test_greedy_batches_neither_draw_nor_cut():
  logits = jax.ShapeDtypeStruct((8, VOCAB), jnp.float32)
  rows = sampling.SamplingRows(jax.ShapeDtypeStruct((6, 8), jnp.uint32))
  positions = jax.ShapeDtypeStruct((8,), jnp.int32)
  jaxpr = jax.make_jaxpr(sampling.sample_tokens)(logits, rows, positions)
  outside = {str(equation.primitive) for equation in jaxpr.eqns}
  assert not outside & {"random_bits", "while", "scan", "sort", "exp"}
  assert "sort" not in str(jaxpr)


def test_rows_are_uploaded_only_when_the_batch_changes():
  rows = sampling.RowsUpload()
  greedy, warm = fake_sample(), fake_sample(temperature=1.0)
  assert rows([greedy], 4) is rows([greedy, greedy], 4)
  assert rows([warm, greedy], 4) is rows([warm, greedy], 4)
  first = rows([warm, greedy], 4)
  assert rows([greedy, warm], 4) is not first
  np.testing.assert_array_equal(
    rows([greedy, warm], 4).temperature, [0, 1, 0, 0]
  )


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"temperature": -0.1}, "temperature=-0.1"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"top_k": -1}, "top_k=-1"),
    ({"top_p": 0.0}, "top_p=0.0"),
    ({"top_p": 1.5}, "top_p=1.5"),
    ({"seed": -1}, "seed=-1"),
    ({"seed": 2**64}, "seed="),
    ({"stop": ("a", "")}, "stop="),
    ({"n": 0}, "n=0"),
  ],
)
def test_parameters_out_of_range_are_refused(changes, message):
  with pytest.raises(requests.errors.BadRequest, match=message):
    requests.SamplingParams(**changes)


def test_one_stop_string_may_be_given_bare():
  assert requests.SamplingParams(stop="###").stop == ("###",)
