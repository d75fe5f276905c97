"""One small model in plain JAX, flax.nnx and flax.linen, through `attend`.

Each program is what a user would write: the attention call is the one line
that differs from a model without a cache. With layers unrolled and scanned,
all six compute the same numbers and update the pages in place.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from flax import nnx

import kvjax
from host_allocator import tables
from kvjax import pages as pages_lib

VOCAB, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 31, 3, 4, 2, 8
WIDTH = HEADS * HEAD_DIM
QKV_WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM
PAGE_SIZE, TABLE_WIDTH = 4, 16
NUM_PAGES = 8191  # So that a copy of the pool could not be overlooked.
LAYOUT = kvjax.CacheLayout.uniform(
  num_layers=LAYERS,
  num_kv_heads=KV_HEADS,
  head_dim=HEAD_DIM,
  page_size=PAGE_SIZE,
)


@functools.cache
def _weights():
  """embed [VOCAB, WIDTH], qkv [LAYERS, WIDTH, QKV_WIDTH], out [LAYERS, ...]."""
  rng = np.random.default_rng(0)
  shapes = {
    "embed": (VOCAB, WIDTH),
    "qkv": (LAYERS, WIDTH, QKV_WIDTH),
    "out": (LAYERS, WIDTH, WIDTH),
  }
  return {
    name: (rng.standard_normal(shape) / np.sqrt(WIDTH)).astype(np.float32)
    for name, shape in shapes.items()
  }


def _heads(projected):
  """q, k and v, whatever the leading axes."""
  heads = projected.reshape(*projected.shape[:-1], -1, HEAD_DIM)
  return jnp.split(heads, (HEADS, HEADS + KV_HEADS), axis=-2)


def _plain_block(qkv, out, x, pages, step, layer):
  q, k, v = _heads(x @ qkv)
  attended, pages = kvjax.attend(q, k, v, pages, step, layer=layer)
  return x + attended.reshape(x.shape) @ out, pages


def plain_unrolled(params, pages, step):
  x = params["embed"][step.tokens]
  for layer in range(LAYERS):
    weights = params["qkv"][layer], params["out"][layer]
    x, pages = _plain_block(*weights, x, pages, step, layer)
  return x, pages


def plain_scanned(params, pages, step):
  # The pages are carried; scanned over, they would be copied.
  def body(carry, inputs):
    qkv, out, layer = inputs
    return _plain_block(qkv, out, *carry, step, layer), None

  layers = jnp.arange(LAYERS, dtype=jnp.int32)
  carry = params["embed"][step.tokens], pages
  inputs = params["qkv"], params["out"], layers
  (x, pages), _ = jax.lax.scan(body, carry, inputs)
  return x, pages


class NnxBlock(nnx.Module):
  def __init__(self, rngs):
    linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
    self.qkv = linear(WIDTH, QKV_WIDTH)
    self.out = linear(WIDTH, WIDTH)

  def __call__(self, x, pages, step, layer):
    q, k, v = _heads(self.qkv(x))
    attended, pages = kvjax.attend(q, k, v, pages, step, layer=layer)
    return x + self.out(attended.reshape(x.shape)), pages


class NnxUnrolled(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
    self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])

  def __call__(self, pages, step):
    x = self.embed(step.tokens)
    for layer, block in enumerate(self.blocks):
      x, pages = block(x, pages, step, layer)
    return x, pages


class NnxScanned(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
    make = nnx.vmap(NnxBlock)
    self.blocks = nnx.split_rngs(splits=LAYERS)(make)(rngs)

  def __call__(self, pages, step):
    @nnx.scan(in_axes=(0, nnx.Carry, 0), out_axes=nnx.Carry)
    def body(block, carry, layer):
      return block(*carry, step, layer)

    carry = self.embed(step.tokens), pages
    return body(self.blocks, carry, jnp.arange(LAYERS, dtype=jnp.int32))


class LinenBlock(linen.Module):
  @linen.compact
  def __call__(self, carry, step, layer):
    x, pages = carry
    qkv = linen.Dense(QKV_WIDTH, use_bias=False, name="qkv")(x)
    q, k, v = _heads(qkv)  # [1, time, heads, head_dim]
    attended, pages = kvjax.attend(q, k, v, pages, step, layer=layer)
    out = linen.Dense(WIDTH, use_bias=False, name="out")
    return (x + out(attended.reshape(x.shape)), pages), None


class LinenUnrolled(linen.Module):
  @linen.compact
  def __call__(self, pages, step):
    x = linen.Embed(VOCAB, WIDTH, name="embed")(step.tokens[None])
    carry = x, pages
    for layer in range(LAYERS):
      carry, _ = LinenBlock(name=f"block_{layer}")(carry, step, layer)
    return carry[0][0], carry[1]


class LinenScanned(linen.Module):
  @linen.compact
  def __call__(self, pages, step):
    x = linen.Embed(VOCAB, WIDTH, name="embed")(step.tokens[None])
    blocks = linen.scan(
      LinenBlock,
      variable_axes={"params": 0},
      split_rngs={"params": True},
      in_axes=(linen.broadcast, 0),
      length=LAYERS,
    )
    layers = jnp.arange(LAYERS, dtype=jnp.int32)
    carry, _ = blocks(name="blocks")((x, pages), step, layers)
    return carry[0][0], carry[1]


def _plain(fn):
  return fn, jax.tree.map(jnp.asarray, _weights())


def _nnx(module_type):
  weights = _weights()
  module = module_type(nnx.Rngs(0))
  module.embed.embedding[...] = jnp.asarray(weights["embed"])
  for name in ("qkv", "out"):
    if module_type is NnxScanned:
      getattr(module.blocks, name).kernel[...] = jnp.asarray(weights[name])
      continue
    for layer, block in enumerate(module.blocks):
      getattr(block, name).kernel[...] = jnp.asarray(weights[name][layer])
  graphdef, state = nnx.split(module)  # Once, outside of jit.

  def fn(state, pages, step):
    return nnx.merge(graphdef, state)(pages, step)

  return fn, state


def _linen(module_type):
  weights = _weights()
  params = {"embed": {"embedding": weights["embed"]}}
  if module_type is LinenScanned:
    params["blocks"] = {n: {"kernel": weights[n]} for n in ("qkv", "out")}
  else:
    for layer in range(LAYERS):
      params[f"block_{layer}"] = {
        name: {"kernel": weights[name][layer]} for name in ("qkv", "out")
      }
  return module_type().apply, {"params": params}


PROGRAMS = {
  "plain JAX, unrolled": lambda: _plain(plain_unrolled),
  "plain JAX, scanned": lambda: _plain(plain_scanned),
  "flax.nnx, unrolled": lambda: _nnx(NnxUnrolled),
  "flax.nnx, scanned": lambda: _nnx(NnxScanned),
  "flax.linen, unrolled": lambda: _linen(LinenUnrolled),
  "flax.linen, scanned": lambda: _linen(LinenScanned),
}


@pytest.fixture(params=PROGRAMS, scope="module")
def steps(request):
  """Each program compiled: `{token rows: fn(pages, step) -> (x, pages)}`.

  Also what the compiler says of its memory: `{token rows: analysis}`.
  """
  fn, params = PROGRAMS[request.param]()
  jitted = jax.jit(fn, donate_argnums=1)
  pages = jax.eval_shape(lambda: pages_lib.make_pages(LAYOUT, (NUM_PAGES,)))
  calls, memory = {}, {}
  for num_tokens in (2, 8):
    packing = tables.Packing(tables.StepShape(num_tokens, 2), (TABLE_WIDTH,))
    packed = jax.ShapeDtypeStruct((packing.size,), jnp.int32)
    step = kvjax.StepArrays(packed, packing)
    compiled = jitted.lower(params, pages, step).compile()
    calls[num_tokens] = functools.partial(compiled, params)
    memory[num_tokens] = compiled.memory_analysis()
  return calls, memory


def _dense(tokens):
  """The same model in float64 without a cache."""
  weights = {name: w.astype(np.float64) for name, w in _weights().items()}
  x = weights["embed"][tokens]
  for layer in range(LAYERS):
    heads = (x @ weights["qkv"][layer]).reshape(len(tokens), -1, HEAD_DIM)
    q, k, v = np.split(heads, (HEADS, HEADS + KV_HEADS), axis=1)
    k, v = (np.repeat(y, HEADS // KV_HEADS, axis=1) for y in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
    scores[:, ~np.tri(len(tokens), dtype=bool)] = -np.inf
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    attended = np.einsum("hqk,khd->qhd", probs, v).reshape(x.shape)
    x = x + attended @ weights["out"][layer]
  return x


def test_every_framework_computes_the_dense_model(steps):
  calls, _ = steps
  cache = kvjax.KVCache(
    LAYOUT,
    num_pages=NUM_PAGES,
    max_sequences=2,
    max_length=TABLE_WIDTH * PAGE_SIZE,
    max_tokens_per_step=8,
  )
  prompts = [[3, 1, 4, 1, 5, 9], [2, 6]]
  first, second = (cache.open(prompt) for prompt in prompts)
  with cache.step([(first, 6), (second, 2)]) as step:
    x, step.pages = calls[8](step.pages, step.arrays)
  np.testing.assert_allclose(x[:6], _dense(prompts[0]), atol=1e-5)
  np.testing.assert_allclose(x[6:], _dense(prompts[1]), atol=1e-5)

  cache.append([first, second], [8, 7])
  with cache.step([(first, 1), (second, 1)]) as step:
    x, step.pages = calls[2](step.pages, step.arrays)
  np.testing.assert_allclose(x[0], _dense([*prompts[0], 8])[-1], atol=1e-5)
  np.testing.assert_allclose(x[1], _dense([*prompts[1], 7])[-1], atol=1e-5)
  assert cache.audit() == ()


@pytest.mark.parametrize("num_tokens", [2, 8], ids=["decode", "prefill"])
def test_every_framework_updates_the_pages_in_place(steps, num_tokens):
  _, memory = steps
  slab = LAYERS * (NUM_PAGES + 1) * KV_HEADS * PAGE_SIZE * HEAD_DIM * 4
  # K and V come out in the buffers they came in, and nothing copies them.
  assert memory[num_tokens].alias_size_in_bytes >= 2 * slab
  assert memory[num_tokens].temp_size_in_bytes < slab / 4
