"""Draws the next tokens on the device, a row of parameters per sequence.

Neither top-k nor top-p sorts the vocabulary: both keep the tokens at or above
a threshold, and a bisection over the 32 bits of a float finds it exactly. A
batch of greedy sequences does neither, nor draws a random number.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import request as requests

_FIELDS = ("temperature", "top_p", "top_k", "seed_high", "seed_low", "sample")
_PRNG = "threefry2x32"  # the same bits whatever the batch
_WORD = 2**32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
  """The sampling parameters of a step's batch, in one packed array."""

  packed: jax.Array  # uint32 [6, S]

  @property
  def temperature(self) -> jax.Array:
    """float32 [S], 0 where the most likely token is taken."""
    return jax.lax.bitcast_convert_type(self.packed[0], jnp.float32)

  @property
  def top_p(self) -> jax.Array:
    """float32 [S], 1 where nothing is cut."""
    return jax.lax.bitcast_convert_type(self.packed[1], jnp.float32)

  @property
  def top_k(self) -> jax.Array:
    """int32 [S], 0 where nothing is cut."""
    return self.packed[2].astype(jnp.int32)

  @property
  def seed_words(self) -> jax.Array:
    """uint32 [S, 2], the high and the low word of the seeds."""
    return self.packed[3:5].T

  @property
  def sample(self) -> jax.Array:
    """uint32 [S], index of the continuation within its request."""
    return self.packed[5]


def pack(samples: Sequence[requests.Sample], num_sequences: int) -> np.ndarray:
  """The parameters of a batch, padded with greedy rows.

  Args:
    samples: the batch, in the step's order.
    num_sequences: sequences of the step's shape.

  Returns:
    uint32 `[6, num_sequences]`, for `SamplingRows.packed`.
  """
  packed = np.zeros((len(_FIELDS), num_sequences), np.uint32)
  packed[:2].view(np.float32)[1] = 1.0
  for row, sample in enumerate(samples):
    params = sample.params
    floats = np.array([params.temperature, params.top_p], np.float32)
    packed[:2, row] = floats.view(np.uint32)
    high, low = divmod(sample.request.seed, _WORD)
    packed[2:, row] = params.top_k, high, low, sample.index
  return packed


def sample_tokens(
  logits: jax.Array, rows: SamplingRows, positions: jax.Array
) -> jax.Array:
  """Draws one token per sequence.

  With key k of a seed and sample, a token at position t of its sequence is
  `categorical(fold_in(k, t), kept(logits / temperature))`.

  Args:
    logits: float32 `[S, vocab]`.
    rows: parameters of the same S sequences.
    positions: int32 `[S]`, where in its sequence each drawn token will stand.

  Returns:
    int32 `[S]`.
  """
  greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  return jax.lax.cond(
    jnp.any(rows.temperature > 0.0),
    lambda: jnp.where(
      rows.temperature > 0.0, _draw(logits, rows, positions), greedy
    ),
    lambda: greedy,
  )


def _draw(
  logits: jax.Array, rows: SamplingRows, positions: jax.Array
) -> jax.Array:
  temperature = jnp.where(rows.temperature > 0.0, rows.temperature, 1.0)
  # The largest logit is 0 afterwards: a tiny temperature cannot overflow it.
  shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
  scaled = shifted / temperature[:, None]
  scaled = jax.lax.cond(
    jnp.any(rows.top_k > 0),
    lambda: keep_top_k(scaled, rows.top_k),
    lambda: scaled,
  )
  scaled = jax.lax.cond(
    jnp.any(rows.top_p < 1.0),
    lambda: keep_top_p(scaled, rows.top_p),
    lambda: scaled,
  )
  draws = jax.vmap(jax.random.categorical)(_keys(rows, positions), scaled)
  return draws.astype(jnp.int32)


def _keys(rows: SamplingRows, positions: jax.Array) -> jax.Array:
  def key(words: jax.Array, sample: jax.Array, position: jax.Array):
    seeded = jax.random.wrap_key_data(words, impl=_PRNG)
    return jax.random.fold_in(jax.random.fold_in(seeded, sample), position)

  return jax.vmap(key)(rows.seed_words, rows.sample, positions)


def keep_top_k(logits: jax.Array, top_k: jax.Array) -> jax.Array:
  """Logits below the k-th largest of their row become -inf.

  Args:
    logits: float32 `[S, vocab]`.
    top_k: int32 `[S]`; 0 keeps all. What ties with the k-th is kept.
  """
  ordered = _ordered(logits)

  def enough(threshold: jax.Array) -> jax.Array:
    count = jnp.sum(ordered >= threshold[:, None], axis=-1, dtype=jnp.int32)
    return count >= top_k

  keep = ordered >= _largest(enough, top_k.shape)[:, None]
  return jnp.where(keep | (top_k == 0)[:, None], logits, -jnp.inf)


def keep_top_p(logits: jax.Array, top_p: jax.Array) -> jax.Array:
  """Keeps each row's fewest largest logits whose mass reaches `top_p`.

  Args:
    logits: float32 `[S, vocab]`.
    top_p: float32 `[S]`; 1 keeps all. What ties with the last is kept.
  """
  ordered = _ordered(logits)
  mass = jax.nn.softmax(logits, axis=-1)

  def enough(threshold: jax.Array) -> jax.Array:
    kept = jnp.where(ordered >= threshold[:, None], mass, 0.0)
    return jnp.sum(kept, axis=-1) >= top_p

  keep = ordered >= _largest(enough, top_p.shape)[:, None]
  return jnp.where(keep | (top_p >= 1.0)[:, None], logits, -jnp.inf)


def _ordered(values: jax.Array) -> jax.Array:
  """uint32 that sort as the floats do: flips negatives, lifts the others."""
  bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
  sign = jnp.uint32(1 << 31)
  return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest(enough, shape: tuple[int, ...]) -> jax.Array:
  """The largest uint32 that is `enough`; that falls as thresholds rise."""

  def try_bit(index: jax.Array, threshold: jax.Array) -> jax.Array:
    bit = jnp.left_shift(jnp.uint32(1), jnp.uint32(31) - index)
    raised = threshold | bit
    return jnp.where(enough(raised), raised, threshold)

  start = jnp.zeros(shape, jnp.uint32)
  return jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(32), try_bit, start)


class RowsUpload:
  """Sampling parameters on the device, uploaded when a batch changes.

  A batch that decodes keeps its rows from step to step, and all greedy
  batches of one shape share theirs.
  """

  def __init__(self):
    self._greedy: dict[int, SamplingRows] = {}
    self._samples: list[requests.Sample] = []
    self._drawn: SamplingRows | None = None
    self._num_sequences = 0

  def __call__(
    self, samples: list[requests.Sample], num_sequences: int
  ) -> SamplingRows:
    """The rows of a batch, padded to a step's number of sequences."""
    if all(s.params.temperature == 0.0 for s in samples):
      if num_sequences not in self._greedy:
        self._greedy[num_sequences] = _upload((), num_sequences)
      return self._greedy[num_sequences]
    if (
      self._drawn is None
      or num_sequences != self._num_sequences
      or samples != self._samples
    ):
      self._drawn = _upload(samples, num_sequences)
      self._samples, self._num_sequences = samples, num_sequences
    return self._drawn


def _upload(
  samples: Sequence[requests.Sample], num_sequences: int
) -> SamplingRows:
  return SamplingRows(jax.device_put(pack(samples, num_sequences)))
