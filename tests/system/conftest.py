"""The real model and its prompts, loaded once for all tests here."""

import json

import pytest

from kvjax import models
from kvjax import testing


@pytest.fixture(scope="session")
def smollm2():
  """SmolLM2-135M in float32."""
  return models.load(testing.smollm2_path())


@pytest.fixture(scope="session")
def smollm2_tokenizer():
  return models.load_tokenizer(testing.smollm2_path())


@pytest.fixture(scope="session")
def greedy_reference():
  """Prompts and what `transformers` generates from them, to the end."""
  path = testing.data_path("smollm2/hf_greedy_reference.json")
  return json.loads(path.read_text())
