"""Writers of small checkpoints, in each format that kvjax reads."""

import json
import pathlib

import gguf
import ml_dtypes  # noqa: F401 - so that safetensors can write bfloat16
import numpy as np
import pytest
import safetensors.numpy

from kvjax import models

_GGUF_LAYER = {
  "input_layernorm": "attn_norm",
  "post_attention_layernorm": "ffn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "self_attn.q_norm": "attn_q_norm",
  "self_attn.k_norm": "attn_k_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}
_GGUF_OUTER = {
  "model.embed_tokens.weight": "token_embd.weight",
  "model.norm.weight": "output_norm.weight",
  "lm_head.weight": "output.weight",
}


class Checkpoint:
  """A config's random tensors by transformers' names, and its files."""

  def __init__(self, config: models.DecoderConfig, seed: int = 0):
    self.config = config
    self.tensors = _random_tensors(config, np.random.default_rng(seed))
    self.json = _config_json(config)

  def write_folder(self, folder: pathlib.Path, shards: int = 1) -> pathlib.Path:
    """config.json and safetensors: one file, or shards and their index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(self.json))
    if shards == 1:
      safetensors.numpy.save_file(self.tensors, folder / "model.safetensors")
      return folder
    names = sorted(self.tensors)
    weight_map = {}
    for shard in range(shards):
      file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
      part = {name: self.tensors[name] for name in names[shard::shards]}
      safetensors.numpy.save_file(part, folder / file)
      weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder

  def write_gguf(
    self,
    path: pathlib.Path,
    *,
    rope_factors: np.ndarray | None = None,
    metadata: dict[str, object] | None = None,
  ) -> pathlib.Path:
    """A GGUF file as its converters write it, rows permuted for llama."""
    config = self.config
    arch = "llama" if config.family in ("llama", "mistral") else config.family
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    for key, value in (metadata or {}).items():
      add = writer.add_uint32 if isinstance(value, int) else writer.add_string
      add(key.format(arch=arch), value)
    for name, tensor in self.tensors.items():
      if arch == "llama" and ".q_proj." in name:
        tensor = _interleave(tensor, config.num_heads)
      if arch == "llama" and ".k_proj." in name:
        tensor = _interleave(tensor, config.num_kv_heads)
      writer.add_tensor(_gguf_name(name), np.ascontiguousarray(tensor))
    if rope_factors is not None:
      writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def checkpoint() -> type[Checkpoint]:
  """Makes a checkpoint of a config."""
  return Checkpoint


@pytest.fixture(scope="session")
def write_tokenizer_gguf():
  """Writes a GGUF file that holds a tokenizer and nothing else."""
  return _write_tokenizer_gguf


def _write_tokenizer_gguf(
  path, tokens, *, model="gpt2", pre=None, kinds=None, **more
):
  writer = gguf.GGUFWriter(path, "llama")
  writer.add_tokenizer_model(model)
  writer.add_token_list(tokens)
  writer.add_token_types(kinds or [1] * len(tokens))
  if pre is not None:
    writer.add_tokenizer_pre(pre)
  for name, value in more.items():
    getattr(writer, f"add_{name}")(value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def _gguf_name(name: str) -> str:
  if name in _GGUF_OUTER:
    return _GGUF_OUTER[name]
  layer, rest = name.removeprefix("model.layers.").split(".", 1)
  role, kind = rest.rsplit(".", 1)
  return f"blk.{layer}.{_GGUF_LAYER[role]}.{kind}"


def _interleave(tensor: np.ndarray, num_heads: int) -> np.ndarray:
  """Rows i and i + head_dim / 2 of a head become rows 2i and 2i + 1."""
  out = np.empty_like(tensor)
  head_dim = tensor.shape[0] // num_heads
  for head in range(num_heads):
    for i in range(head_dim // 2):
      row = head * head_dim + i
      out[head * head_dim + 2 * i] = tensor[row]
      out[head * head_dim + 2 * i + 1] = tensor[row + head_dim // 2]
  return out


def _random_tensors(
  config: models.DecoderConfig, rng: np.random.Generator
) -> dict[str, np.ndarray]:
  hidden, ffn = config.hidden_size, config.intermediate_size
  heads = config.num_heads * config.head_dim
  kv_heads = config.num_kv_heads * config.head_dim
  tensors: dict[str, np.ndarray] = {}

  def matrix(name: str, rows: int, columns: int, bias: bool = False) -> None:
    values = rng.standard_normal((rows, columns)) / np.sqrt(columns)
    tensors[f"{name}.weight"] = values.astype(np.float32)
    if bias:
      values = rng.standard_normal(rows) / 4
      tensors[f"{name}.bias"] = values.astype(np.float32)

  def norm(name: str, width: int) -> None:
    values = 1 + rng.standard_normal(width) / 4
    tensors[f"{name}.weight"] = values.astype(np.float32)

  matrix("model.embed_tokens", config.vocab_size, hidden)
  norm("model.norm", hidden)
  if not config.tied_embeddings:
    matrix("lm_head", config.vocab_size, hidden)
  for layer in range(config.num_layers):
    prefix = f"model.layers.{layer}"
    norm(f"{prefix}.input_layernorm", hidden)
    norm(f"{prefix}.post_attention_layernorm", hidden)
    for role, width in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
      name = f"{prefix}.self_attn.{role}_proj"
      matrix(name, width, hidden, config.qkv_bias)
    matrix(f"{prefix}.self_attn.o_proj", hidden, heads, config.out_bias)
    if config.qk_norm:
      norm(f"{prefix}.self_attn.q_norm", config.head_dim)
      norm(f"{prefix}.self_attn.k_norm", config.head_dim)
    matrix(f"{prefix}.mlp.gate_proj", ffn, hidden, config.mlp_bias)
    matrix(f"{prefix}.mlp.up_proj", ffn, hidden, config.mlp_bias)
    matrix(f"{prefix}.mlp.down_proj", hidden, ffn, config.mlp_bias)
  return tensors


def _config_json(config: models.DecoderConfig) -> dict[str, object]:
  return {
    "model_type": config.family,
    "vocab_size": config.vocab_size,
    "hidden_size": config.hidden_size,
    "intermediate_size": config.intermediate_size,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "max_position_embeddings": config.context_length,
    "rms_norm_eps": config.rms_norm_eps,
    "rope_theta": config.rope_theta,
    "tie_word_embeddings": config.tied_embeddings,
    "attention_bias": config.out_bias,
    "mlp_bias": config.mlp_bias,
    "sliding_window": None,
    "hidden_act": "silu",
    "eos_token_id": list(config.eos_ids),
  }
