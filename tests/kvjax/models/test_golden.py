"""SmolLM2 from its GGUF file says what transformers made it say."""

import json

from kvjax import testing


def test_greedy_ids_are_those_of_transformers():
  decoder, tokenizer = testing.smollm2()
  path = testing.data_path("smollm2/hf_greedy_reference.json")
  references = json.loads(path.read_text())
  dense = testing.DenseDecoder(decoder, max_length=96)
  for reference in references:
    prompt, expected = reference["prompt_ids"], reference["new_ids"]
    assert tokenizer.encode(reference["prompt"]) == prompt
    assert dense.greedy(prompt, len(expected)) == expected
  assert len(references) == 5


def test_the_chat_prompts_are_those_of_the_template():
  _, tokenizer = testing.smollm2()
  path = testing.data_path("smollm2/hf_greedy_reference.json")
  question = {"role": "user", "content": "What is the capital of France?"}
  expected = json.loads(path.read_text())[2]
  assert tokenizer.chat([question]) == expected["prompt"]
  assert tokenizer.encode(tokenizer.chat([question])) == expected["prompt_ids"]
  assert expected["new_ids"][-1] in tokenizer.eos_ids
