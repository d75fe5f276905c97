"""config.json is read for what it says, and refused for what is not run."""

import dataclasses
import json

import pytest

from kvjax import errors
from kvjax import testing
from kvjax.models import config as config_lib


@pytest.fixture
def read(tmp_path, checkpoint):
  """Reads a tiny config.json with some members changed or dropped."""

  def read(family="llama", *, context_length=None, **changes):
    raw = checkpoint(testing.tiny_config(family)).json | changes
    raw = {key: value for key, value in raw.items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return config_lib.from_json(
      tmp_path / "config.json", context_length=context_length
    )

  return read


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_size_is_read(read, family):
  assert read(family) == testing.tiny_config(family)


def test_sizes_that_transformers_leaves_out_are_derived(read):
  plain = read(num_key_value_heads="absent", head_dim="absent")
  assert (plain.num_kv_heads, plain.head_dim) == (4, 12)
  assert read("qwen3", head_dim="absent").head_dim == 128


def test_attention_bias_covers_the_output_projection_too(read):
  config = read(attention_bias=True)
  assert config.qkv_bias
  assert config.out_bias
  assert not read("qwen2").out_bias


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_stretches_only_the_long_wavelengths(read, key):
  scaling = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
  }
  config = read(head_dim=64, **{key: scaling})
  assert config.rope_factors is not None
  # Wavelengths: 2 pi at pair 0, 47,000 at pair 31; the context is 256.
  assert config.rope_factors[0] == 1.0
  assert config.rope_factors[-1] == 8.0
  assert sorted(config.rope_factors) == list(config.rope_factors)


def test_linear_scaling_divides_every_frequency(read):
  config = read(rope_scaling={"type": "linear", "factor": 2.0})
  assert config.rope_factors == (2.0,) * 8


def test_rope_base_is_found_where_newer_configs_keep_it(read):
  parameters = {"rope_type": "default", "rope_theta": 5e5}
  config = read(rope_theta="absent", rope_parameters=parameters)
  assert config.rope_theta == 5e5


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model_type": "gemma3"}, "model_type 'gemma3' is none of"),
    ({"model_type": "absent"}, "model_type None is none of"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantized weights"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "scaling 'yarn'"),
  ],
)
def test_what_is_not_run_is_refused_by_name(read, changes, message):
  with pytest.raises(errors.UnsupportedCheckpoint, match=message):
    read(**changes)


@pytest.mark.parametrize(
  ("family", "changes"),
  [
    ("mistral", {"sliding_window": 128}),
    ("mistral", {"sliding_window": "absent", "max_position_embeddings": 8192}),
    ("qwen2", {"sliding_window": 128, "use_sliding_window": True}),
    (
      "qwen3",
      {
        "sliding_window": 128,
        "layer_types": ["full_attention", "sliding_attention"],
      },
    ),
  ],
)
def test_a_window_within_the_context_is_refused(read, family, changes):
  with pytest.raises(errors.UnsupportedCheckpoint, match="looks back over"):
    read(family, **changes)


@pytest.mark.parametrize(
  ("family", "changes"),
  [
    ("mistral", {"sliding_window": 512}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"sliding_window": 128, "use_sliding_window": False}),
    ("qwen2", {"sliding_window": 128, "layer_types": ["full_attention"] * 2}),
  ],
)
def test_a_window_that_hides_nothing_is_ignored(read, family, changes):
  assert read(family, **changes) == testing.tiny_config(family)


def test_a_shorter_context_keeps_within_the_window(read):
  config = read("mistral", sliding_window=128, context_length=128)
  assert config.context_length == 128


def test_a_context_is_never_lengthened(read):
  assert read(context_length=10**6).context_length == 512


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"hidden_size": "absent"}, "hidden_size"),
    ({"hidden_size": "wide"}, "malformed"),
    ({"num_hidden_layers": 0}, "num_layers is 0"),
    ({"num_attention_heads": 0, "head_dim": "absent"}, "malformed"),
    (
      {"head_dim": 10**12, "rope_scaling": {"type": "linear", "factor": 2.0}},
      "head_dim is 1000000000000",
    ),
    ({"num_key_value_heads": 3}, "4 query heads are no multiple of 3"),
    ({"head_dim": 15}, "head_dim is 15, not an even"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
  ],
)
def test_a_damaged_config_is_refused_with_its_file(read, changes, message):
  with pytest.raises(errors.CheckpointError, match=rf"config\.json.*{message}"):
    read(**changes)


def test_what_is_no_json_object_is_refused(tmp_path):
  path = tmp_path / "config.json"
  with pytest.raises(errors.CheckpointError, match="No such file"):
    config_lib.from_json(path)
  path.write_text("{")
  with pytest.raises(errors.CheckpointError, match="not JSON"):
    config_lib.from_json(path)
  path.write_text("[]")
  with pytest.raises(errors.CheckpointError, match="not a JSON object"):
    config_lib.from_json(path)


def test_rotary_factors_must_match_the_head(read):
  config = dataclasses.replace(testing.tiny_config(), rope_factors=(1.0,))
  with pytest.raises(errors.CheckpointError, match="expected 8 rotary factors"):
    config_lib.check(config, "file")
