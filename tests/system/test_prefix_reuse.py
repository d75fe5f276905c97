"""Shared few-shot prompts are computed once, as far as anybody could."""

import json

import numpy as np
import pytest

from kvjax import engine as engines
from kvjax import prefixes
from kvjax import request as requests
from kvjax import testing


def few_shot_prompts(count):
  """GSM8K questions behind the same eight worked examples, as text."""

  def entries(name):
    lines = testing.data_path(f"gsm8k/{name}").read_text().splitlines()
    return [json.loads(line) for line in lines]

  shots = "".join(
    f"Question: {entry['question']}\nAnswer: {entry['answer']}\n\n"
    for entry in entries("train_first8.jsonl")
  )
  return [
    f"{shots}Question: {entry['question']}\nAnswer:"
    for entry in entries("test.jsonl")[:count]
  ]


def ideal_reuse(prompts):
  """Tokens that a cache which forgets nothing could reuse, in this order."""
  arrays = [np.array(prompt, np.int32) for prompt in prompts]
  return sum(
    max(
      min(prefixes.common_prefix(array, earlier), len(array) - 1)
      for earlier in arrays[:index]
    )
    for index, array in enumerate(arrays)
    if index
  )


@pytest.mark.parametrize("prefix_index", ["radix", "hash_chain"])
def test_nearly_all_that_could_be_reused_is(smollm2_tokenizer, prefix_index):
  prompts = [smollm2_tokenizer.encode(text) for text in few_shot_prompts(64)]
  # What is reused depends on the tokens alone, so a small model will do.
  model = testing.random_decoder(
    testing.tiny_config(
      vocab_size=smollm2_tokenizer.vocab_size, context_length=2048, num_layers=1
    )
  )
  params = requests.SamplingParams(max_tokens=2, ignore_eos=True)
  with engines.Engine(
    model, num_pages=512, prefix_index=prefix_index
  ) as engine:
    completions = engine.generate(prompts, params)
    reused = sum(completion.matched_tokens for completion in completions)
    assert reused >= 0.99 * ideal_reuse(prompts)
    assert reused == engine.stats.matched_tokens
    assert engine.stats.preemptions == 0
    assert engine.audit() == ()
