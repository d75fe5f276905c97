"""Assembles a decoder from named tensors, whatever file they come from.

Tensors go by the names that transformers gives them. A source knows their
shapes without reading them, so a wrong checkpoint is refused before its
weights are read.
"""

import dataclasses
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax import errors
from kvjax.models import config as config_lib
from kvjax.models import decoder as decoder_lib
from kvjax.models import params as params_lib

Shape = tuple[int, ...]

# What some writers store and nobody needs: recomputed, or tied.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


class TensorSource(Protocol):
  """Named tensors in one or several files."""

  def shapes(self) -> Mapping[str, Shape]:
    """Shapes by transformers' names, without reading the tensors."""
    ...

  def file_of(self, name: str) -> str:
    """The file that holds a tensor, or should, for messages."""
    ...

  def read(self, name: str) -> np.ndarray:
    """One tensor, dequantised, of a floating dtype."""
    ...


@dataclasses.dataclass(frozen=True)
class _Part:
  """One array of a decoder and the tensors it is joined from.

  Attributes:
    name: Its name in the decoder, within the layer.
    tensors: Names in the checkpoint, within the layer, with their shapes.
    is_kernel: The tensors are `[out, in]`; ours is `[in, sum of out]`.
  """

  name: str
  tensors: tuple[tuple[str, Shape], ...]
  is_kernel: bool = False


def build(
  config: config_lib.DecoderConfig,
  source: TensorSource,
  *,
  dtype: Any = jnp.float32,
  scan_layers: bool = False,
) -> decoder_lib.Decoder:
  """Makes a decoder with a checkpoint's weights.

  Args:
    config: Its sizes.
    source: Its tensors.
    dtype: Of the decoder's weights.
    scan_layers: Stack the layers' weights and scan over them.

  Returns:
    The decoder.

  Raises:
    CheckpointError: A tensor is missing, of another shape, unreadable or not
      finite.
    UnsupportedCheckpoint: There are tensors that the decoder has no use for.
  """
  check_tensors(config, source)
  abstract = nnx.eval_shape(
    lambda: decoder_lib.Decoder(
      config, rngs=nnx.Rngs(0), dtype=dtype, scan_layers=scan_layers
    )
  )
  merge, _ = params_lib.split(abstract)
  return merge(dict(_arrays(config, source, dtype, scan_layers)))


def check_tensors(
  config: config_lib.DecoderConfig, source: TensorSource
) -> None:
  """Compares the tensors that are there with those that should be.

  Args:
    config: The decoder's sizes.
    source: The checkpoint's tensors.

  Raises:
    CheckpointError: A tensor is missing, or of another shape.
    UnsupportedCheckpoint: There are tensors that the decoder has no use for.
  """
  found = source.shapes()
  expected = set()
  for name, shape in _expected(config):  # Not a list: a config may say 1e9.
    expected.add(name)
    if name not in found:
      raise errors.CheckpointError(
        f"{source.file_of(name)}: tensor {name} is missing; expected shape "
        f"{shape}"
      )
    if tuple(found[name]) != shape:
      raise errors.CheckpointError(
        f"{source.file_of(name)}: tensor {name}: expected shape {shape}, "
        f"found {tuple(found[name])}"
      )
  tied = {"lm_head.weight"} if config.tied_embeddings else set()
  extra = sorted(
    name
    for name in found
    if name not in expected
    and name not in tied
    and not name.endswith(_IGNORED_SUFFIXES)
  )
  if extra:
    raise errors.UnsupportedCheckpoint(
      f"{source.file_of(extra[0])}: tensor {extra[0]} of shape "
      f"{tuple(found[extra[0]])}, and {len(extra) - 1} more, have no place in "
      f"a {config.family} decoder with this config"
    )


def _arrays(
  config: config_lib.DecoderConfig,
  source: TensorSource,
  dtype: Any,
  scan_layers: bool,
) -> Iterator[tuple[str, Any]]:
  for part in _outer_parts(config):
    yield part.name, jnp.asarray(_join(part, "", source), dtype)
  for part in _layer_parts(config):
    joined = (
      _join(part, f"model.layers.{layer}.", source)
      for layer in range(config.num_layers)
    )
    if scan_layers:
      yield f"layers.{part.name}", jnp.asarray(np.stack(list(joined)), dtype)
    else:
      for layer, array in enumerate(joined):
        yield f"layers.{layer}.{part.name}", jnp.asarray(array, dtype)


def _join(part: _Part, prefix: str, source: TensorSource) -> np.ndarray:
  tensors = []
  for name, _ in part.tensors:
    tensor = source.read(prefix + name)
    if not np.isfinite(tensor).all():
      raise errors.CheckpointError(
        f"{source.file_of(prefix + name)}: tensor {prefix + name} is not finite"
      )
    tensors.append(tensor)
  joined = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
  return np.ascontiguousarray(joined.T) if part.is_kernel else joined


def _expected(
  config: config_lib.DecoderConfig,
) -> Iterable[tuple[str, Shape]]:
  for part in _outer_parts(config):
    yield from part.tensors
  for layer in range(config.num_layers):
    for part in _layer_parts(config):
      for name, shape in part.tensors:
        yield f"model.layers.{layer}.{name}", shape


def _outer_parts(config: config_lib.DecoderConfig) -> Iterator[_Part]:
  table = (config.vocab_size, config.hidden_size)
  yield _Part("embedding.embedding", (("model.embed_tokens.weight", table),))
  yield _Part(
    "final_norm.scale", (("model.norm.weight", (config.hidden_size,)),)
  )
  if not config.tied_embeddings:
    yield _Part("unembedding.kernel", (("lm_head.weight", table),), True)


def _layer_parts(config: config_lib.DecoderConfig) -> Iterator[_Part]:
  hidden, ffn = config.hidden_size, config.intermediate_size
  query, kv = config.query_width, config.kv_width
  yield _norm("attention_norm", "input_layernorm", hidden)
  yield _norm("mlp_norm", "post_attention_layernorm", hidden)
  if config.qk_norm:
    yield _norm("q_norm", "self_attn.q_norm", config.head_dim)
    yield _norm("k_norm", "self_attn.k_norm", config.head_dim)
  qkv = {
    "self_attn.q_proj": query,
    "self_attn.k_proj": kv,
    "self_attn.v_proj": kv,
  }
  yield from _linear("qkv", hidden, qkv, config.qkv_bias)
  out = {"self_attn.o_proj": hidden}
  yield from _linear("out", query, out, config.out_bias)
  gate_up = {"mlp.gate_proj": ffn, "mlp.up_proj": ffn}
  yield from _linear("gate_up", hidden, gate_up, config.mlp_bias)
  down = {"mlp.down_proj": hidden}
  yield from _linear("down", ffn, down, config.mlp_bias)


def _norm(name: str, tensor: str, width: int) -> _Part:
  return _Part(f"{name}.scale", ((f"{tensor}.weight", (width,)),))


def _linear(
  name: str, rows: int, tensors: Mapping[str, int], bias: bool
) -> Iterator[_Part]:
  """A matrix joined from projections of one input, by their columns."""
  kernels = tuple((f"{t}.weight", (n, rows)) for t, n in tensors.items())
  yield _Part(f"{name}.kernel", kernels, True)
  if bias:
    biases = tuple((f"{t}.bias", (n,)) for t, n in tensors.items())
    yield _Part(f"{name}.bias", biases)
