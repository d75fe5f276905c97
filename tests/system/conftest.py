"""The real model and its prompts, loaded once for all tests here."""

import json

import pytest

from kvjax import models
from kvjax import testing


@pytest.fixture(scope="session")
def smollm2_path():
  try:
    return models.smollm2_gguf()
  except models.CheckpointError as error:
    pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
  """SmolLM2-135M in float32, scanned, which compiles five times faster."""
  return models.load(smollm2_path, scan_layers=True)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path):
  return models.load_tokenizer(smollm2_path)


@pytest.fixture(scope="session")
def greedy_reference():
  """Prompts and what `transformers` generates from them, to the end."""
  path = testing.data_path("smollm2/hf_greedy_reference.json")
  return json.loads(path.read_text())
