"""Sizes and tensors of a decoder in a GGUF file.

GGUF names tensors its own way and, for the llama architecture, stores the rows
of the query and key projections in the order of an interleaved rotation: pair
i at rows 2i and 2i + 1. Ours, like transformers', rotates row i with row
i + head_dim / 2, so those rows are put back.
"""

import re
from collections.abc import Mapping

import numpy as np

from kvjax import errors
from kvjax.models import config as config_lib
from kvjax.models import gguf_file
from kvjax.models import gguf_tokenizer
from kvjax.models import rope
from kvjax.models import weights

_OUTER = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
}
_LAYER = {
  "attn_norm": "input_layernorm",
  "ffn_norm": "post_attention_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


class GgufTensors:
  """A GGUF file's tensors by the names of transformers."""

  def __init__(
    self, file: gguf_file.GgufFile, config: config_lib.DecoderConfig
  ):
    self._file = file
    self._config = config
    self._interleaved = file.metadata["general.architecture"] == "llama"
    self._gguf_names = {
      _rename(name): name for name in file.tensors if name != _ROPE_FACTORS
    }

  def shapes(self) -> Mapping[str, weights.Shape]:
    """Shapes by name."""
    names = self._gguf_names.items()
    return {name: self._file.tensors[theirs].shape for name, theirs in names}

  def file_of(self, name: str) -> str:
    """The file."""
    del name  # All tensors are in one.
    return str(self._file.path)

  def read(self, name: str) -> np.ndarray:
    """One tensor as float32, its rows in transformers' order."""
    tensor = self._file.read(self._gguf_names[name])
    if self._interleaved and "self_attn.q_proj" in name:
      return _split_pairs(tensor, self._config.num_heads)
    if self._interleaved and "self_attn.k_proj" in name:
      return _split_pairs(tensor, self._config.num_kv_heads)
    return tensor


def read_config(
  file: gguf_file.GgufFile, *, context_length: int | None = None
) -> config_lib.DecoderConfig:
  """Reads a decoder's sizes from the metadata.

  Args:
    file: The parsed file.
    context_length: Shortens the context, None keeps the model's own.

  Returns:
    The sizes.

  Raises:
    CheckpointError: A size is missing or malformed.
    UnsupportedCheckpoint: The architecture, or a feature of it, is not run.
  """
  arch = file.need("general.architecture", str)
  known = sorted(set(config_lib.ARCHITECTURES.values()))
  if arch not in known:
    raise errors.UnsupportedCheckpoint(
      f"{file.path}: architecture {arch!r} is none of {known}"
    )
  if file.get(f"{arch}.expert_count", int, 0):
    raise errors.UnsupportedCheckpoint(
      f"{file.path}: mixtures of experts are not run"
    )
  config = config_lib.shorten(
    config_lib.check(_sizes(file, arch), str(file.path)), context_length
  )
  window = file.get(f"{arch}.attention.sliding_window", int)
  config_lib.refuse_window(window, config.context_length, str(file.path))
  return config


def _sizes(file: gguf_file.GgufFile, arch: str) -> config_lib.DecoderConfig:
  if "token_embd.weight" not in file.tensors:
    raise errors.CheckpointError(
      f"{file.path}: tensor token_embd.weight is missing"
    )
  hidden_size = file.need(f"{arch}.embedding_length", int)
  num_heads = file.need(f"{arch}.attention.head_count", int)
  num_kv_heads = file.get(f"{arch}.attention.head_count_kv", int, num_heads)
  head_dim = file.get(
    f"{arch}.attention.key_length", int, hidden_size // max(num_heads, 1)
  )
  config_lib.check_head_dim(head_dim, str(file.path))
  if (rotated := file.get(f"{arch}.rope.dimension_count", int, head_dim)) != (
    head_dim
  ):
    raise errors.UnsupportedCheckpoint(
      f"{file.path}: {rotated} of {head_dim} dimensions are rotated; only "
      "whole heads are"
    )
  bias = "blk.0.attn_q.bias" in file.tensors
  return config_lib.DecoderConfig(
    family=arch,
    vocab_size=file.tensors["token_embd.weight"].shape[0],
    hidden_size=hidden_size,
    intermediate_size=file.need(f"{arch}.feed_forward_length", int),
    num_layers=file.need(f"{arch}.block_count", int),
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    context_length=file.need(f"{arch}.context_length", int),
    rms_norm_eps=file.need(f"{arch}.attention.layer_norm_rms_epsilon", float),
    rope_theta=file.get(f"{arch}.rope.freq_base", float, 10_000.0),
    rope_factors=_rope_factors(file, arch, head_dim),
    tied_embeddings="output.weight" not in file.tensors,
    qkv_bias=bias,
    out_bias="blk.0.attn_output.bias" in file.tensors,
    mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    qk_norm=arch == "qwen3",
    bos_id=file.get("tokenizer.ggml.bos_token_id", int),
    eos_ids=gguf_tokenizer.eos_ids(file),
  )


def _rope_factors(
  file: gguf_file.GgufFile, arch: str, head_dim: int
) -> tuple[float, ...] | None:
  if _ROPE_FACTORS in file.tensors:
    return tuple(file.read(_ROPE_FACTORS).ravel().tolist())
  kind = file.get(f"{arch}.rope.scaling.type", str, "none")
  if kind == "none":
    return None
  if kind == "linear":
    factor = file.need(f"{arch}.rope.scaling.factor", float)
    return rope.linear_factors(head_dim, factor)
  raise errors.UnsupportedCheckpoint(
    f"{file.path}: rope scaling {kind!r} is none of 'none', 'linear', or a "
    f"tensor {_ROPE_FACTORS}"
  )


def _rename(name: str) -> str:
  """transformers' name, or the same where there is none."""
  match = _BLOCK.fullmatch(name)
  if match is None or match[2] not in _LAYER:
    return _OUTER.get(name, name)
  layer, role, kind = match.groups()
  return f"model.layers.{layer}.{_LAYER[role]}.{kind}"


def _split_pairs(tensor: np.ndarray, num_heads: int) -> np.ndarray:
  """Rows 2i, 2i + 1 of each head become rows i, i + head_dim / 2.

  >>> _split_pairs(np.arange(8), 2).tolist()
  [0, 2, 1, 3, 4, 6, 5, 7]
  """
  rest = tensor.shape[1:]
  pairs = tensor.reshape(num_heads, -1, 2, *rest)
  return pairs.swapaxes(1, 2).reshape(tensor.shape)
