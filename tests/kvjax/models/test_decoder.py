"""The decoder computes what a plain float64 program does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax import testing
from kvjax.models import params


def _norm(x, scale, eps):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def _plain_logits(made, tokens):
  """One sequence in float64 from the checkpoint's own tensors."""
  config = made.config
  w = {name: t.astype(np.float64) for name, t in made.tensors.items()}
  time, dim = len(tokens), config.head_dim
  group = config.num_heads // config.num_kv_heads
  factors = np.array(config.rope_factors or np.ones(dim // 2))
  angles = np.arange(time)[:, None] * (
    config.rope_theta ** (-np.arange(0, dim, 2) / dim) / factors
  )

  def linear(name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

  def heads(name, x):
    x = linear(f"{name}_proj", x).reshape(time, -1, dim)
    if config.qk_norm and not name.endswith("v"):
      x = _norm(x, w[f"{name}_norm.weight"], config.rms_norm_eps)
    return x

  def rotate(x):
    pairs = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * np.exp(
      1j * angles
    )[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)

  x = w["model.embed_tokens.weight"][tokens]
  for layer in range(config.num_layers):
    p = f"model.layers.{layer}"
    h = _norm(x, w[f"{p}.input_layernorm.weight"], config.rms_norm_eps)
    q, k, v = (heads(f"{p}.self_attn.{role}", h) for role in "qkv")
    k, v = np.repeat(rotate(k), group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", rotate(q), k) / np.sqrt(dim)
    scores[:, ~np.tri(time, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended = np.einsum("hqk,khd->qhd", weights, v).reshape(time, -1)
    x = x + linear(f"{p}.self_attn.o_proj", attended)
    h = _norm(x, w[f"{p}.post_attention_layernorm.weight"], config.rms_norm_eps)
    gate = linear(f"{p}.mlp.gate_proj", h)
    gated = gate / (1 + np.exp(-gate)) * linear(f"{p}.mlp.up_proj", h)
    x = x + linear(f"{p}.mlp.down_proj", gated)
  head = "model.embed_tokens" if config.tied_embeddings else "lm_head"
  return linear(head, _norm(x, w["model.norm.weight"], config.rms_norm_eps))[-1]


_CONFIGS = {
  "llama": testing.tiny_config(
    rope_factors=tuple(np.linspace(1, 8, 8).tolist()), tied_embeddings=True
  ),
  "llama with every bias": testing.tiny_config(
    qkv_bias=True, out_bias=True, mlp_bias=True
  ),
  "mistral, one key head": testing.tiny_config("mistral", num_kv_heads=1),
  "qwen2": testing.tiny_config("qwen2", num_kv_heads=4, tied_embeddings=True),
  "qwen3": testing.tiny_config("qwen3", rope_theta=1e6, head_dim=32),
}


@pytest.mark.parametrize("name", _CONFIGS)
def test_logits_are_those_of_a_plain_program(tmp_path, checkpoint, name):
  made = checkpoint(_CONFIGS[name])
  decoder = models.load(made.write_folder(tmp_path))
  decoder.config = made.config  # For the factors, which are not in the JSON.
  tokens = [5, 17, 80, 3, 3, 61, 9, 33, 96, 0, 2]
  logits = testing.DenseDecoder(decoder, max_length=11).prefill([tokens])
  np.testing.assert_allclose(logits[0], _plain_logits(made, tokens), atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scanned_and_unrolled_layers_agree(family):
  config = testing.tiny_config(family, num_layers=3)

  def run(decoder):
    tokens = jnp.arange(6, dtype=jnp.int32)[None]

    def attention(q, k, v, carry, layer):
      out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
      return out, carry + layer

    hidden, layers = decoder.backbone(tokens, tokens, jnp.int32(0), attention)
    assert layers == 0 + 1 + 2
    return decoder.logits(hidden)

  unrolled = run(testing.random_decoder(config))
  scanned = run(testing.random_decoder(config, scan_layers=True))
  np.testing.assert_allclose(scanned, unrolled, atol=1e-5)


def test_scanning_compiles_one_layer_whatever_the_depth():
  def compiled_size(num_layers):
    decoder = testing.random_decoder(
      testing.tiny_config(num_layers=num_layers), scan_layers=True
    )
    merge, arrays = params.split(decoder)
    tokens = jnp.zeros(4, jnp.int32)

    def run(arrays):
      return merge(arrays).backbone(
        tokens, tokens, 0, lambda q, k, v, carry, layer: (q, carry)
      )[0]

    return len(jax.jit(run).lower(arrays).as_text().splitlines())

  assert compiled_size(5) == compiled_size(2)


def test_bfloat16_weights_give_float32_logits_near_the_float32_ones(
  tmp_path, checkpoint
):
  folder = checkpoint(testing.tiny_config("qwen3")).write_folder(tmp_path)
  decoder = models.load(folder, dtype=jnp.bfloat16)
  dense = testing.DenseDecoder(decoder, max_length=8)
  with jax.numpy_dtype_promotion("standard"):  # jax.nn needs it.
    logits = dense.prefill([[5, 17, 80, 3, 3, 61, 9, 33]])
  exact = testing.DenseDecoder(models.load(folder), max_length=8)
  expected = exact.prefill([[5, 17, 80, 3, 3, 61, 9, 33]])
  assert logits.dtype == jnp.float32
  np.testing.assert_allclose(logits, expected, atol=0.15)


@pytest.mark.parametrize(
  ("family", "scan_layers"), [("llama", False), ("qwen3", True)]
)
def test_the_paged_cache_gives_the_dense_caches_logits(family, scan_layers):
  config = testing.tiny_config(family)
  decoder = testing.random_decoder(config, scan_layers=scan_layers)
  fn, arrays = decoder.pure()
  step_fn = jax.jit(fn, donate_argnums=1)
  cache = kvjax.KVCache(
    decoder.cache_layout(page_size=4), num_pages=16, max_sequences=2
  )
  prompts = [[5, 17, 80, 3, 3, 61, 9, 33, 96, 0, 2], [44, 8, 9]]
  sequences = [cache.open(prompt) for prompt in prompts]

  def run(counts):
    batch = [(s, n) for s, n in zip(sequences, counts, strict=True) if n]
    with cache.step(batch) as step:
      logits, step.pages = step_fn(arrays, step.pages, step.arrays)
    return np.asarray(logits)

  run([6, 0])
  logits = run([5, 3])
  cache.append(sequences, [7, 70])
  decoded = run([1, 1])

  dense = testing.DenseDecoder(testing.random_decoder(config), max_length=12)
  for row, (prompt, token) in enumerate(zip(prompts, [7, 70], strict=True)):
    dense.reset()
    np.testing.assert_allclose(
      logits[row], dense.prefill([prompt])[0], atol=2e-5
    )
    np.testing.assert_allclose(
      decoded[row], dense.decode([token])[0], atol=2e-5
    )


def test_params_are_the_modules_own_arrays():
  decoder = testing.random_decoder()
  fn, arrays = decoder.pure()
  assert callable(fn)
  assert arrays["layers.1.qkv.kernel"] is decoder.layers[1].qkv.kernel[...]
  assert len(arrays) == 3 + 2 * 6


def test_cache_layout_has_a_row_for_every_layer_and_head():
  layout = testing.random_decoder().cache_layout(page_size=8)
  (group,) = layout.groups
  assert (group.num_layers, group.num_kv_heads, group.head_dim) == (2, 2, 16)
  assert (group.page_size, group.dtype) == (8, "float32")
