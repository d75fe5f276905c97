"""Checkpoints that transformers writes give the logits that it computes."""

import warnings

import numpy as np
import pytest

from kvjax import models
from kvjax import testing

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

_TOKENS = [5, 17, 80, 3, 3, 61, 9, 33, 96, 0, 2, 44]
_LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def oracle():
  """(torch, transformers), which warn and promote as they please."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
  torch.manual_seed(0)
  return torch, transformers


def _theirs(oracle, family, **settings):
  """A random model of a family, every weight far from its default."""
  torch, transformers = oracle
  name = {"llama": "Llama", "mistral": "Mistral"}.get(family, family.title())
  given = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "pad_token_id": None,
    "sliding_window": None,
  } | settings
  config = getattr(transformers, f"{name}Config")(**given)
  model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(torch.randn_like(parameter) * 0.1)
  return model


def _their_logits(oracle, model):
  torch, _ = oracle
  with torch.no_grad():
    return model(torch.tensor([_TOKENS])).logits[0, -1].numpy()


def _our_logits(decoder):
  dense = testing.DenseDecoder(decoder, max_length=len(_TOKENS))
  return np.asarray(dense.prefill([_TOKENS])[0])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers(
  tmp_path, oracle, family, num_kv_heads, tied
):
  model = _theirs(
    oracle,
    family,
    num_key_value_heads=num_kv_heads,
    tie_word_embeddings=tied,
  )
  model.save_pretrained(tmp_path)
  np.testing.assert_allclose(
    _our_logits(models.load(tmp_path)),
    _their_logits(oracle, model),
    atol=1e-4,
  )


@pytest.mark.parametrize(
  ("family", "settings"),
  [
    ("llama", {"rope_scaling": _LLAMA3 | {"rope_theta": 500_000.0}}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True, "head_dim": 32}),
    ("mistral", {"sliding_window": 128, "head_dim": 32}),
  ],
)
def test_features_are_those_of_transformers(tmp_path, oracle, family, settings):
  model = _theirs(oracle, family, **settings)
  model.save_pretrained(tmp_path, max_shard_size="20KB")
  assert (tmp_path / "model.safetensors.index.json").exists()
  np.testing.assert_allclose(
    _our_logits(models.load(tmp_path)),
    _their_logits(oracle, model),
    atol=1e-4,
  )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_gguf_files_as_we_do(
  tmp_path, oracle, checkpoint, family
):
  # The other way round: their GGUF reader is the oracle for row orders.
  from transformers import modeling_gguf_pytorch_utils as theirs

  made = checkpoint(testing.tiny_config(family))
  file = made.write_gguf(tmp_path / "model.gguf")
  model = _theirs(oracle, family, hidden_size=48, head_dim=16)
  loaded = theirs.load_gguf_checkpoint(
    str(file), return_tensors=True, model_to_load=model
  )
  model.load_state_dict(loaded["tensors"], strict=True)
  np.testing.assert_allclose(
    _our_logits(models.load(file)),
    _their_logits(oracle, model),
    atol=1e-4,
  )
