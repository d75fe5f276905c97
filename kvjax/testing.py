"""What tests, benchmarks and experiments share: data, decoders, a baseline."""

import functools
import os
import pathlib
from collections.abc import Sequence
from typing import Any
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax import models
from kvjax.models import params as params_lib

_GREEDY_CHUNK = 8
DenseCache: TypeAlias = tuple[tuple[jax.Array, jax.Array], ...]


def data_path(name: str) -> pathlib.Path:
  """A file of the shared data; skips the running test where it is absent.

  Args:
    name: Path below the data folder: $KVJAX_DATA, or `../shared/data` beside
      the repository.

  Returns:
    The file's path.
  """
  default = pathlib.Path(__file__).parents[2] / "shared" / "data"
  path = pathlib.Path(os.environ.get("KVJAX_DATA", default)) / name
  if not path.exists():
    import pytest

    pytest.skip(f"no data at {path}; set KVJAX_DATA")
  return path


@functools.cache
def smollm2() -> tuple[models.Decoder, models.Tokenizer]:
  """SmolLM2-135M-Instruct and its tokenizer, loaded once in a process.

  Skips the running test where the package with the weights is not installed.
  """
  try:
    path = models.smollm2_gguf()
  except models.CheckpointError as error:
    import pytest

    pytest.skip(str(error))
  return models.load(path), models.load_tokenizer(path)


def tiny_config(family: str = "llama", **changes: Any) -> models.DecoderConfig:
  """A decoder config that runs in milliseconds.

  Args:
    family: "llama", "mistral", "qwen2" or "qwen3".
    **changes: Fields to set.

  Returns:
    Two layers, four query heads on two key heads, head_dim 16.
  """
  fields: dict[str, Any] = {
    "family": family,
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "context_length": 512,
    "qkv_bias": family == "qwen2",
    "qk_norm": family == "qwen3",
    "eos_ids": (2,),
  }
  return models.DecoderConfig(**(fields | changes))


def random_decoder(
  config: models.DecoderConfig | None = None,
  *,
  seed: int = 0,
  dtype: Any = jnp.float32,
  scan_layers: bool = False,
) -> models.Decoder:
  """A decoder with random weights, the same for the same seed.

  Args:
    config: Its sizes, `tiny_config()` where None.
    seed: Which weights.
    dtype: Of the weights.
    scan_layers: Stacked layers; the weights are those of the unrolled decoder.
  """
  return models.Decoder(
    config or tiny_config(),
    rngs=nnx.Rngs(seed),
    dtype=dtype,
    scan_layers=scan_layers,
  )


class DenseDecoder:
  """The plain way to decode in JAX: a contiguous `[B, T, Kh, D]` cache.

  The baseline that the paged cache is measured against and checked by. It
  shares the decoder's weights, donates its cache, writes rows with
  `dynamic_update_slice` and attends with `jax.nn.dot_product_attention`. All
  sequences of a batch have the same length, as in most such programs.

  Example:
    dense = DenseDecoder(decoder, batch=8, max_length=1408)
    logits = dense.prefill(prompts)  # [8, 1400]
    logits = dense.decode(jnp.argmax(logits, axis=-1))
  """

  def __init__(
    self, decoder: models.Decoder, *, batch: int = 1, max_length: int
  ):
    """Makes an empty cache.

    Args:
      decoder: The decoder, its layers unrolled.
      batch: Sequences.
      max_length: Rows of the cache, which every decode step attends over.
    """
    if decoder.scan_layers:
      raise ValueError("the dense baseline takes unrolled layers")
    config = decoder.config
    shape = (batch, max_length, config.num_kv_heads, config.head_dim)
    dtype = decoder.embedding.param_dtype
    self.max_length = max_length
    self.length = 0
    self._cache: DenseCache = tuple(
      (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
      for _ in range(config.num_layers)
    )
    merge, self._params = params_lib.split(decoder)

    def run(
      params: dict[str, Any],
      cache: DenseCache,
      tokens: jax.Array,
      start: jax.Array,
    ) -> tuple[jax.Array, DenseCache]:
      return _dense_step(merge(params), cache, tokens, start)

    self._run = jax.jit(run, donate_argnums=1)

  def reset(self) -> None:
    """Forgets the sequences; their rows will be overwritten."""
    self.length = 0

  def prefill(self, tokens: Any) -> jax.Array:
    """Appends prompts.

    Args:
      tokens: Token ids `[batch, time]`.

    Returns:
      float32 logits `[batch, vocab]` of the last tokens.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    end = self.length + tokens.shape[1]
    if end > self.max_length:
      raise ValueError(f"{end=} rows, but {self.max_length=}")
    logits, self._cache = self._run(
      self._params, self._cache, tokens, jnp.int32(self.length)
    )
    self.length = end
    return logits

  def decode(self, tokens: Any) -> jax.Array:
    """Appends one token `[batch]` to each; as `prefill`."""
    return self.prefill(jnp.asarray(tokens, jnp.int32)[:, None])

  def greedy(
    self, prompt: Sequence[int], max_tokens: int, eos_ids: Sequence[int] = ()
  ) -> list[int]:
    """The likeliest continuation of one prompt, in a batch of one.

    The prompt goes in by eights, its rest one by one, so that prompts of any
    length compile two shapes.

    Args:
      prompt: Its token ids.
      max_tokens: Most tokens to add.
      eos_ids: Tokens after which to end.

    Returns:
      The new token ids, an ending one included.
    """
    self.reset()
    whole = len(prompt) - len(prompt) % _GREEDY_CHUNK
    pieces = [
      list(prompt[begin : begin + _GREEDY_CHUNK])
      for begin in range(0, whole, _GREEDY_CHUNK)
    ]
    pieces += [[token] for token in prompt[whole:]]
    logits = [self.prefill([piece]) for piece in pieces][-1]
    tokens: list[int] = []
    while True:
      tokens.append(int(np.argmax(logits[0])))
      if len(tokens) == max_tokens or tokens[-1] in eos_ids:
        return tokens
      logits = self.decode(tokens[-1:])


def _dense_step(
  decoder: models.Decoder,
  cache: DenseCache,
  tokens: jax.Array,
  start: jax.Array,
) -> tuple[jax.Array, DenseCache]:
  """Runs `[batch, time]` tokens whose first position is `start`."""
  batch, time = tokens.shape
  max_length = cache[0][0].shape[1]
  positions = start + jnp.arange(time, dtype=jnp.int32)
  visible = (
    jnp.arange(max_length, dtype=jnp.int32)[None, :] <= positions[:, None]
  )

  def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, layer: int
  ) -> tuple[jax.Array, Any]:
    k = jax.lax.dynamic_update_slice(cache[layer][0], k, (0, start, 0, 0))
    v = jax.lax.dynamic_update_slice(cache[layer][1], v, (0, start, 0, 0))
    out = jax.nn.dot_product_attention(q, k, v, mask=visible[None, None])
    return out, (*cache[:layer], (k, v), *cache[layer + 1 :])

  hidden, cache = decoder.backbone(
    tokens, jnp.broadcast_to(positions, (batch, time)), cache, attention
  )
  return decoder.logits(hidden[:, -1]), cache
