"""What a decoder is made of, read from config.json; GGUF: `from_gguf`."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from kvjax import errors
from kvjax.models import rope

# model_type of config.json: architecture name in GGUF files.
ARCHITECTURES = {
  "llama": "llama",
  "mistral": "llama",
  "qwen2": "qwen2",
  "qwen3": "qwen3",
}
_MOST_HEAD_DIM = 4096


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Sizes and switches of one decoder; hashable, so jit may close over it.

  Attributes:
    family: "llama" (SmolLM2 too), "mistral", "qwen2" or "qwen3".
    vocab_size: Rows of the embedding.
    hidden_size: Width of the residual stream.
    intermediate_size: Width of the gated feed-forward.
    num_layers: Decoder blocks.
    num_heads: Query heads.
    num_kv_heads: Key and value heads; divides `num_heads`.
    head_dim: Width of a head.
    context_length: Most tokens of a sequence.
    rms_norm_eps: Added to the mean square in every norm.
    rope_theta: Base of the rotary frequencies.
    rope_factors: Divisor of each rotary frequency, `head_dim // 2` of them, or
      None for ones.
    tied_embeddings: The output projection is the embedding.
    qkv_bias: Query, key and value projections add a bias.
    out_bias: The attention's output projection adds a bias.
    mlp_bias: All three feed-forward projections add a bias.
    qk_norm: Heads of queries and keys are normalised before they turn.
    bos_id: Token that begins a text, or None.
    eos_ids: Tokens that end generation.
  """

  family: str
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  context_length: int
  rms_norm_eps: float = 1e-6
  rope_theta: float = 10_000.0
  rope_factors: tuple[float, ...] | None = None
  tied_embeddings: bool = False
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  bos_id: int | None = None
  eos_ids: tuple[int, ...] = ()

  @property
  def query_width(self) -> int:
    """Columns of the query projection."""
    return self.num_heads * self.head_dim

  @property
  def kv_width(self) -> int:
    """Columns of the key projection, and of the value projection."""
    return self.num_kv_heads * self.head_dim


def check(config: DecoderConfig, source: str) -> DecoderConfig:
  """Refuses sizes that no decoder can have.

  Args:
    config: The sizes.
    source: The file they came from, for the message.

  Returns:
    `config`.

  Raises:
    CheckpointError: A size is not positive, heads do not divide, or there are
      not `head_dim // 2` rotary factors.
  """
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if field.type in (int, float) and not value > 0:
      raise errors.CheckpointError(f"{source}: {field.name} is {value}")
  if config.num_heads % config.num_kv_heads:
    raise errors.CheckpointError(
      f"{source}: {config.num_heads} query heads are no multiple of "
      f"{config.num_kv_heads} key heads"
    )
  factors = config.rope_factors
  if factors is not None and len(factors) != config.head_dim // 2:
    raise errors.CheckpointError(
      f"{source}: expected {config.head_dim // 2} rotary factors, found "
      f"{len(factors)}"
    )
  return config


def check_head_dim(head_dim: int, source: str) -> None:
  """Refuses a head that cannot be rotated, before there is a factor a pair.

  Args:
    head_dim: Width of a head.
    source: The file that says so, for the message.

  Raises:
    CheckpointError: It is odd, or no width that a head has.
  """
  if head_dim % 2 or not 0 < head_dim <= _MOST_HEAD_DIM:
    raise errors.CheckpointError(
      f"{source}: head_dim is {head_dim}, not an even number up to "
      f"{_MOST_HEAD_DIM}"
    )


def shorten(config: DecoderConfig, context_length: int | None) -> DecoderConfig:
  """The same decoder with at most `context_length` tokens, None for its own."""
  if context_length is None:
    return config
  return dataclasses.replace(
    config, context_length=min(context_length, config.context_length)
  )


def refuse_window(window: int | None, context_length: int, source: str) -> None:
  """Refuses a sliding window that would hide keys within the context.

  Args:
    window: Keys a query sees, or None for all of them.
    context_length: Most tokens of a sequence.
    source: The file that says so, for the message.

  Raises:
    UnsupportedCheckpoint: The window is shorter than the context.
  """
  if window is not None and 0 < window < context_length:
    raise errors.UnsupportedCheckpoint(
      f"{source}: attention looks back over {window} of {context_length} "
      "tokens and only full attention is run; load with "
      f"context_length={window} to stay within the window"
    )


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """One JSON object.

  Args:
    path: The file.

  Returns:
    Its members.

  Raises:
    CheckpointError: There is no such file, or it holds no JSON object.
  """
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise errors.CheckpointError(f"{path}: {error.strerror}") from error
  except ValueError as error:
    raise errors.CheckpointError(f"{path}: not JSON: {error}") from error
  if not isinstance(value, dict):
    raise errors.CheckpointError(f"{path}: not a JSON object")
  return value


def from_json(
  path: pathlib.Path, *, context_length: int | None = None
) -> DecoderConfig:
  """Reads config.json.

  Args:
    path: The file.
    context_length: Shortens the context, None keeps the model's own.

  Returns:
    The decoder's sizes.

  Raises:
    CheckpointError: The file is damaged or lacks a size.
    UnsupportedCheckpoint: The architecture, or a feature of it, is not run.
  """
  raw = read_json(path)
  family = raw.get("model_type")
  if family not in ARCHITECTURES:
    raise errors.UnsupportedCheckpoint(
      f"{path}: model_type {family!r} is none of {sorted(ARCHITECTURES)}"
    )
  _refuse_features(raw, path)
  try:
    config = _sizes(raw, path)
  except (KeyError, TypeError, ValueError, ArithmeticError) as error:
    if isinstance(error, errors.KVError):
      raise  # A ValueError too.
    raise errors.CheckpointError(
      f"{path}: missing or malformed: {error!r}"
    ) from error
  config = shorten(check(config, str(path)), context_length)
  refuse_window(_window(raw), config.context_length, str(path))
  return config


def _refuse_features(raw: Mapping[str, Any], path: pathlib.Path) -> None:
  if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
    raise errors.UnsupportedCheckpoint(
      f"{path}: hidden_act {activation!r}; only 'silu' is run"
    )
  if raw.get("quantization_config"):
    raise errors.UnsupportedCheckpoint(
      f"{path}: quantized weights; use a GGUF file or an unquantized folder"
    )
  if (rotated := raw.get("partial_rotary_factor") or 1.0) != 1.0:
    raise errors.UnsupportedCheckpoint(
      f"{path}: partial_rotary_factor {rotated}; only whole heads are rotated"
    )


def _sizes(raw: Mapping[str, Any], path: pathlib.Path) -> DecoderConfig:
  family = raw["model_type"]
  num_heads = int(raw["num_attention_heads"])
  head_dim = raw.get("head_dim") or (
    128 if family == "qwen3" else int(raw["hidden_size"]) // num_heads
  )
  check_head_dim(int(head_dim), str(path))
  theta, factors = _rope(raw, int(head_dim), path)
  biased = bool(raw.get("attention_bias", False))
  return DecoderConfig(
    family=family,
    vocab_size=int(raw["vocab_size"]),
    hidden_size=int(raw["hidden_size"]),
    intermediate_size=int(raw["intermediate_size"]),
    num_layers=int(raw["num_hidden_layers"]),
    num_heads=num_heads,
    num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
    head_dim=int(head_dim),
    context_length=int(raw["max_position_embeddings"]),
    rms_norm_eps=float(raw["rms_norm_eps"]),
    rope_theta=theta,
    rope_factors=factors,
    tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
    qkv_bias=biased or family == "qwen2",
    out_bias=biased and family != "qwen2",
    mlp_bias=bool(raw.get("mlp_bias", False)),
    qk_norm=family == "qwen3",
    bos_id=raw.get("bos_token_id"),
    eos_ids=token_ids(raw.get("eos_token_id")),
  )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
  """A token id of a config, which may be one, several or none."""
  if value is None:
    return ()
  return tuple(value) if isinstance(value, list) else (value,)


def _rope(
  raw: Mapping[str, Any], head_dim: int, path: pathlib.Path
) -> tuple[float, tuple[float, ...] | None]:
  """Base and factors, from either spelling that transformers has used."""
  scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
  theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10_000.0)))
  kind = scaling.get("rope_type", scaling.get("type", "default"))
  if kind == "default":
    return theta, None
  if kind == "linear":
    return theta, rope.linear_factors(head_dim, scaling["factor"])
  if kind == "llama3":
    return theta, rope.llama3_factors(
      head_dim,
      theta,
      factor=scaling["factor"],
      low_freq_factor=scaling["low_freq_factor"],
      high_freq_factor=scaling["high_freq_factor"],
      original_context=scaling["original_max_position_embeddings"],
    )
  raise errors.UnsupportedCheckpoint(
    f"{path}: rope scaling {kind!r} is none of 'default', 'linear', 'llama3'"
  )


def _window(raw: Mapping[str, Any]) -> int | None:
  """The sliding window of any layer, None where every layer sees all keys."""
  mistral = raw["model_type"] == "mistral"
  layer_types = raw.get("layer_types")
  if layer_types is not None:
    sliding = any(kind != "full_attention" for kind in layer_types)
  else:
    sliding = raw.get("use_sliding_window", mistral)
  # A Mistral config that does not say means 4,096.
  window = raw.get("sliding_window", 4096 if mistral else None)
  return window if sliding else None
