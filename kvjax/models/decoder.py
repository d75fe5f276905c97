"""The decoder of Llama, SmolLM2, Qwen2, Qwen3 and Mistral, in flax.nnx.

Attention is a function that the caller passes in, with a carry that threads
through the layers: pages with `kvjax.attend`, a dense cache in the baseline.
The three input projections of attention are one matrix, and so are the two of
the feed-forward: fewer, wider products, measured to be no slower in decode.
"""

from collections.abc import Callable
from typing import Any
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from host_allocator import layout
from kvjax import attention as attention_lib
from kvjax import pages as pages_lib
from kvjax import step as step_lib
from kvjax.models import config as config_lib
from kvjax.models import params as params_lib
from kvjax.models import rope

# (q, k, v, carry, layer) -> (out like q, carry)
Attention: TypeAlias = Callable[
  [jax.Array, jax.Array, jax.Array, Any, Any], tuple[jax.Array, Any]
]


class RMSNorm(nnx.Module):
  """Divides by the root of the mean square, in float32, and scales."""

  def __init__(self, width: int, *, epsilon: float, dtype: Any):
    self.epsilon = epsilon
    self.scale = nnx.Param(jnp.ones((width,), dtype))

  def __call__(self, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normal = (wide * jax.lax.rsqrt(square + self.epsilon)).astype(x.dtype)
    return normal * jnp.expand_dims(self.scale[...], range(x.ndim - 1))


class Block(nnx.Module):
  """One decoder layer: attention, then a gated feed-forward."""

  def __init__(
    self, config: config_lib.DecoderConfig, *, dtype: Any, rngs: nnx.Rngs
  ):
    def linear(rows: int, columns: int, bias: bool) -> nnx.Linear:
      return nnx.Linear(
        rows,
        columns,
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype,
        bias_init=nnx.initializers.normal(0.02),
        rngs=rngs,
      )

    def norm(width: int) -> RMSNorm:
      return RMSNorm(width, epsilon=config.rms_norm_eps, dtype=dtype)

    self.config = config
    width = config.hidden_size
    qkv_width = config.query_width + 2 * config.kv_width
    self.attention_norm = norm(width)
    self.qkv = linear(width, qkv_width, config.qkv_bias)
    if config.qk_norm:
      self.q_norm = norm(config.head_dim)
      self.k_norm = norm(config.head_dim)
    self.out = linear(config.query_width, width, config.out_bias)
    self.mlp_norm = norm(width)
    self.gate_up = linear(width, 2 * config.intermediate_size, config.mlp_bias)
    self.down = linear(config.intermediate_size, width, config.mlp_bias)

  def __call__(
    self,
    x: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    carry: Any,
    attention: Attention,
    layer: int | jax.Array,
  ) -> tuple[jax.Array, Any]:
    q, k, v = self._heads(self.qkv(self.attention_norm(x)))
    q, k = rope.rotate(q, cos_sin), rope.rotate(k, cos_sin)
    attended, carry = attention(q, k, v, carry, layer)
    x = x + self.out(attended.reshape(*x.shape[:-1], -1))
    gate, up = jnp.split(self.gate_up(self.mlp_norm(x)), 2, axis=-1)
    return x + self.down(jax.nn.silu(gate) * up), carry

  def _heads(
    self, projected: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    config = self.config
    bounds = (config.query_width, config.query_width + config.kv_width)
    q, k, v = (
      part.reshape(*part.shape[:-1], -1, config.head_dim)
      for part in jnp.split(projected, bounds, axis=-1)
    )
    if config.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    return q, k, v


class Decoder(nnx.Module):
  """A decoder-only transformer over a paged cache.

  Example:
    fn, params = decoder.pure()
    step_fn = jax.jit(fn, donate_argnums=1)
    with cache.step(batch) as step:
      logits, step.pages = step_fn(params, step.pages, step.arrays)
  """

  def __init__(
    self,
    config: config_lib.DecoderConfig,
    *,
    rngs: nnx.Rngs,
    dtype: Any = jnp.float32,
    scan_layers: bool = False,
  ):
    """Makes a decoder with random weights; `models.load` reads real ones.

    Args:
      config: Its sizes.
      rngs: Where the random weights come from.
      dtype: Of weights and activations; norms, rotation and logits are
        computed in float32.
      scan_layers: Stack the layers' weights and loop over them: compiles in a
        time that does not grow with the depth. Unrolled runs faster.
    """
    self.config = config
    self.scan_layers = scan_layers
    self.embedding = nnx.Embed(
      config.vocab_size,
      config.hidden_size,
      dtype=dtype,
      param_dtype=dtype,
      rngs=rngs,
    )
    blocks = [
      Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)
    ]
    self.layers: Any = _stacked(blocks) if scan_layers else nnx.List(blocks)
    self.final_norm = RMSNorm(
      config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype
    )
    if not config.tied_embeddings:
      self.unembedding = nnx.Linear(
        config.hidden_size,
        config.vocab_size,
        use_bias=False,
        dtype=dtype,
        param_dtype=dtype,
        rngs=rngs,
      )

  def __call__(
    self, pages: pages_lib.Pages, step: step_lib.StepArrays
  ) -> tuple[jax.Array, pages_lib.Pages]:
    """Runs one step of a batch over the paged cache.

    Args:
      pages: The cache's pages, of `cache_layout`.
      step: The step's arrays.

    Returns:
      float32 logits `[sequences, vocab]` of each sequence's last row, and the
      successor pages.
    """

    # XLA inlines it; the jit is so that it is traced once and not once a
    # layer, which takes seconds of every new step shape of a deep model.
    @jax.jit
    def attend(
      q: jax.Array,
      k: jax.Array,
      v: jax.Array,
      pages: pages_lib.Pages,
      layer: jax.Array,
    ) -> tuple[jax.Array, pages_lib.Pages]:
      return attention_lib.attend(q, k, v, pages, step, layer=layer)

    hidden, pages = self.backbone(step.tokens, step.positions, pages, attend)
    return self.logits(hidden[step.logit_rows]), pages

  def backbone(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    carry: Any,
    attention: Attention,
  ) -> tuple[jax.Array, Any]:
    """Embeds tokens and runs every layer.

    Args:
      tokens: Token ids `[...]`.
      positions: Position of each in its sequence `[...]`.
      carry: What attention reads and writes, a pytree.
      attention: `(q, k, v, carry, layer) -> (out, carry)`, with q
        `[..., heads, head_dim]` and k, v `[..., kv_heads, head_dim]` already
        rotated, and out like q. `layer` is traced when layers are scanned.

    Returns:
      The residual stream `[..., hidden]` before the final norm, and the carry.
    """
    config = self.config
    frequencies = rope.inverse_frequencies(
      config.head_dim, config.rope_theta, config.rope_factors
    )
    cos_sin = rope.angles(positions, frequencies)
    x = self.embedding(tokens)
    if not self.scan_layers:
      for layer, block in enumerate(self.layers):
        x, carry = block(x, cos_sin, carry, attention, layer)
      return x, carry

    graphdef, stacked = nnx.split(self.layers)

    def body(
      state: tuple[jax.Array, Any], inputs: tuple[Any, jax.Array]
    ) -> tuple[tuple[jax.Array, Any], None]:
      weights, layer = inputs
      block = nnx.merge(graphdef, weights)
      return block(state[0], cos_sin, state[1], attention, layer), None

    layers = jnp.arange(config.num_layers, dtype=jnp.int32)
    (x, carry), _ = jax.lax.scan(body, (x, carry), (stacked, layers))
    return x, carry

  def logits(self, hidden: jax.Array) -> jax.Array:
    """float32 `[..., vocab]` from the residual stream `[..., hidden]`."""
    hidden = self.final_norm(hidden)
    if self.config.tied_embeddings:
      return self.embedding.attend(hidden).astype(jnp.float32)
    return self.unembedding(hidden).astype(jnp.float32)

  def pure(
    self,
  ) -> tuple[
    Callable[
      [dict[str, Any], pages_lib.Pages, step_lib.StepArrays],
      tuple[jax.Array, pages_lib.Pages],
    ],
    dict[str, Any],
  ]:
    """Splits the module once, so that a jitted step has nothing left to do.

    Returns:
      `(fn, params)` with `fn(params, pages, step) -> (logits, pages)`, pure:
      jit it with `donate_argnums=1`. `params` is a dict of named arrays, the
      module's own.
    """
    merge, params = params_lib.split(self)

    def fn(
      params: dict[str, Any],
      pages: pages_lib.Pages,
      step: step_lib.StepArrays,
    ) -> tuple[jax.Array, pages_lib.Pages]:
      return merge(params)(pages, step)

    return fn, params

  def cache_layout(
    self, *, page_size: int, dtype: Any = None
  ) -> layout.CacheLayout:
    """The layout of a cache for this decoder.

    Args:
      page_size: Token rows of a page.
      dtype: Of the pages; the weights' own where None.

    Returns:
      One cache group with all the layers.
    """
    if dtype is None:
      dtype = self.embedding.param_dtype
    return layout.CacheLayout.uniform(
      num_layers=self.config.num_layers,
      num_kv_heads=self.config.num_kv_heads,
      head_dim=self.config.head_dim,
      page_size=page_size,
      dtype=jnp.dtype(dtype).name,
    )


def _stacked(blocks: list[Block]) -> Block:
  """One block whose every weight has a leading axis of layers."""
  graphdef, first = nnx.split(blocks[0])
  rest = [nnx.state(block) for block in blocks[1:]]
  weights = jax.tree.map(lambda *leaves: jnp.stack(leaves), first, *rest)
  return nnx.merge(graphdef, weights)
