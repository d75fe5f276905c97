"""`attend` over a cache equals dense attention over the same rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import errors

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 8, 3


def make_cache(**options) -> kvjax.KVCache:
  layout = kvjax.CacheLayout.uniform(
    num_layers=LAYERS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    page_size=options.pop("page_size", 4),
    quantization=options.pop("quantization", None),
  )
  defaults = {"num_pages": 64, "max_sequences": 4, "max_tokens_per_step": 32}
  return kvjax.KVCache(layout, **(defaults | options))


def projections(tokens: np.ndarray, layer: int) -> tuple[np.ndarray, ...]:
  """q, k and v of each token, a fixed random function of its id."""
  rng = np.random.default_rng(layer)
  table = rng.standard_normal((100, HEADS + 2 * KV_HEADS, HEAD_DIM))
  rows = table.astype(np.float32)[tokens]
  return np.split(rows, [HEADS, HEADS + KV_HEADS], axis=1)


def oracle(tokens: np.ndarray, layer: int, window: int | None) -> np.ndarray:
  """float64 causal attention of every token, without any cache."""
  q, k, v = (x.astype(np.float64) for x in projections(tokens, layer))
  k = np.repeat(k, HEADS // KV_HEADS, axis=1)
  v = np.repeat(v, HEADS // KV_HEADS, axis=1)
  logits = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
  distance = np.arange(len(tokens))[:, None] - np.arange(len(tokens))
  visible = (distance >= 0) & (distance < (window or len(tokens)))
  logits = np.where(visible, logits, -np.inf)
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  return np.einsum("hqk,khd->qhd", weights, v)


@functools.partial(jax.jit, static_argnames="window", donate_argnums=0)
def layers_unrolled(pages, step, inputs, window=None):
  outs = []
  for layer in range(LAYERS):
    q, k, v = (x[layer] for x in inputs)
    out, pages = kvjax.attend(q, k, v, pages, step, layer=layer, window=window)
    outs.append(out)
  return jnp.stack(outs), pages


@functools.partial(jax.jit, static_argnames="window", donate_argnums=0)
def layers_scanned(pages, step, inputs, window=None):
  def body(pages, layer_inputs):
    layer, (q, k, v) = layer_inputs
    out, pages = kvjax.attend(q, k, v, pages, step, layer=layer, window=window)
    return pages, out

  layers = jnp.arange(LAYERS, dtype=jnp.int32)
  pages, outs = jax.lax.scan(body, pages, (layers, inputs))
  return outs, pages


def run(cache, batch, layers=layers_unrolled, window=None):
  """Computes a batch; returns `[LAYERS, tokens, HEADS, HEAD_DIM]`."""
  with cache.step(batch) as step:
    tokens = np.asarray(step.arrays.tokens)
    per_layer = [projections(tokens, layer) for layer in range(LAYERS)]
    inputs = tuple(jnp.stack(x) for x in zip(*per_layer, strict=True))
    out, step.pages = layers(step.pages, step.arrays, inputs, window=window)
  return np.asarray(out)


def check(out, sequence, start, window=None):
  tokens = np.asarray(sequence.tokens)
  for layer in range(LAYERS):
    expected = oracle(tokens, layer, window)[start : sequence.length]
    np.testing.assert_allclose(out[layer], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layers", [layers_unrolled, layers_scanned])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_chunks_then_decode_equal_dense_attention(layers, window):
  cache = make_cache()
  sequence = cache.open([3, 1, 4, 1, 5, 9, 2, 6, 5])
  check(run(cache, [(sequence, 6)], layers, window)[:, :6], sequence, 0, window)
  check(run(cache, [(sequence, 3)], layers, window)[:, :3], sequence, 6, window)
  for token in (7, 8):
    start = sequence.length
    cache.append([sequence], [token])
    out = run(cache, [(sequence, 1)], layers, window)
    check(out[:, :1], sequence, start, window)


def test_a_mixed_batch_computes_each_sequence_as_if_alone():
  cache = make_cache()
  first, second = cache.open([1, 2, 3, 4, 5]), cache.open([9, 8, 7])
  run(cache, [(first, 5)])
  cache.append([first], [6])
  out = run(cache, [(first, 1), (second, 3)])
  check(out[:, :1], first, 5)
  check(out[:, 1:4], second, 0)


def test_rows_past_the_batch_are_zero():
  cache = make_cache()
  out = run(cache, [(cache.open([1, 2, 3, 4, 5]), 5)])
  assert out.shape[1] > 5
  assert (out[:, 5:] == 0).all()


def test_a_fork_diverges_without_touching_its_parent():
  cache = make_cache()
  parent = cache.open([1, 2, 3, 4, 5, 6])
  run(cache, [(parent, 6)])
  child = cache.fork(parent)
  cache.append([parent, child], [10, 20])
  out = run(cache, [(parent, 1), (child, 1)])
  check(out[:, :1], parent, 6)
  check(out[:, 1:2], child, 6)
  cache.append([parent, child], [11, 21])
  out = run(cache, [(parent, 1), (child, 1)])
  check(out[:, :1], parent, 7)
  check(out[:, 1:2], child, 7)


def test_a_matched_prefix_is_read_as_if_computed():
  cache = make_cache()
  first = cache.open([1, 2, 3, 4, 5, 6, 7])
  run(cache, [(first, 7)])
  # Six of seven rows: one page whole, two rows of the next one copied.
  second = cache.open([1, 2, 3, 4, 5, 6, 50, 51])
  assert second.matched_tokens == 6
  check(run(cache, [(second, 2)])[:, :2], second, 6)
  cache.append([first], [8])
  check(run(cache, [(first, 1)])[:, :1], first, 7)


def test_a_wholly_cached_prompt_recomputes_one_row():
  cache = make_cache()
  prompt = [1, 2, 3, 4, 5, 6, 7, 8]
  run(cache, [(cache.open(prompt), 8)])
  again = cache.open(prompt)
  assert again.matched_tokens == 7
  check(run(cache, [(again, 1)])[:, :1], again, 7)


def test_truncation_then_new_tokens_equal_dense_attention():
  cache = make_cache()
  sequence = cache.open([1, 2, 3, 4, 5, 6, 7])
  run(cache, [(sequence, 7)])
  cache.truncate(sequence, 5)
  cache.append([sequence], [30])
  check(run(cache, [(sequence, 1)])[:, :1], sequence, 5)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_quantised_rows_copied_on_write_keep_their_scales(quantization):
  outs = []
  for prefix_index in ("radix", None):
    cache = make_cache(quantization=quantization, prefix_index=prefix_index)
    run(cache, [(cache.open([1, 2, 3, 4, 5, 6, 7]), 7)])
    sequence = cache.open([1, 2, 3, 4, 5, 6, 50])
    matched = sequence.matched_tokens
    assert matched == (6 if prefix_index else 0)
    out = run(cache, [(sequence, 7 - matched)])
    outs.append(out[:, 6 - matched])
  np.testing.assert_allclose(*outs, rtol=1e-6, atol=1e-6)


def test_reading_without_writing_sees_the_rows_already_there():
  cache = make_cache()
  sequence = cache.open([1, 2, 3])
  run(cache, [(sequence, 3)])
  cache.append([sequence], [4])
  with cache.step([(sequence, 1)]) as step:
    q, k, v = (jnp.asarray(x) for x in projections(np.array([4]), 0))
    _, pages = kvjax.attend(q, k, v, step.pages, step.arrays, layer=0)
    out, step.pages = kvjax.attend(q, None, None, pages, step.arrays, layer=0)
  expected = oracle(np.array([1, 2, 3, 4]), 0, None)[3:]
  np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def test_batch_and_time_axes_are_kept():
  cache = make_cache()
  sequence = cache.open([1])
  with cache.step([(sequence, 1)]) as step:
    q, k, v = (jnp.asarray(x)[:, None] for x in projections(np.array([1]), 0))
    out, step.pages = kvjax.attend(q, k, v, step.pages, step.arrays, layer=0)
  assert out.shape == (1, 1, HEADS, HEAD_DIM)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"q": (1, HEADS, 5)}, r"q has shape \(1, 4, 5\).*8\]"),
    ({"k": (2, KV_HEADS, HEAD_DIM)}, r"k has shape .*1 tokens"),
    ({"v": (1, HEADS, HEAD_DIM)}, r"v has shape .*2, 8\]"),
    ({"q": (1, 3, HEAD_DIM)}, r"3 heads, not a multiple"),
    ({"v": None}, "together"),
  ],
)
def test_misshapen_arguments_are_named(change, message):
  shapes = {
    "q": (1, HEADS, HEAD_DIM),
    "k": (1, KV_HEADS, HEAD_DIM),
    "v": (1, KV_HEADS, HEAD_DIM),
  } | change
  arrays = [x if x is None else jnp.zeros(x) for x in shapes.values()]
  cache = make_cache()
  with (
    pytest.raises(errors.BadRequest, match=message),
    cache.step([(cache.open([1]), 1)]) as step,
  ):
    kvjax.attend(*arrays, step.pages, step.arrays, layer=0)
  assert cache.audit() == ()
