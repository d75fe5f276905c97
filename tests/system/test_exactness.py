"""SmolLM2 says what `transformers` says, whatever the cache does.

The product of page sizes, chunks, batches, forks and pre-emptions is in
tests/kvjax/test_engine.py on a small random model; here is what only a real
model shows.
"""

import pytest

from kvjax import engine as engines
from kvjax import request as requests

MAX_TOKENS = 48


def generate(engine, reference, n=1, max_tokens=MAX_TOKENS):
  """The continuation of each reference prompt, all of them together."""
  params = requests.SamplingParams(max_tokens=max_tokens, n=n)
  completions = engine.generate(
    [entry["prompt_ids"] for entry in reference], params
  )
  return [
    [list(output.tokens) for output in completion.outputs]
    for completion in completions
  ]


@pytest.fixture(scope="module")
def engine(smollm2, smollm2_tokenizer):
  """One engine for the tests that need no other, so that steps compile once."""
  with engines.Engine(
    smollm2,
    tokenizer=smollm2_tokenizer,
    num_pages=64,
    max_length=128,
    max_sequences=8,
    token_budget=64,
  ) as engine:
    yield engine
    assert engine.audit() == ()
    assert engine.stats.compilations <= 16


def test_greedy_ids_equal_the_reference_to_the_end(engine, greedy_reference):
  expected = [[entry["new_ids"]] for entry in greedy_reference]
  assert generate(engine, greedy_reference) == expected


def test_a_warm_cache_changes_no_id(engine, greedy_reference):
  expected = [[entry["new_ids"]] for entry in greedy_reference]
  before = engine.stats.matched_tokens
  assert generate(engine, greedy_reference) == expected
  prompts = sum(len(entry["prompt_ids"]) for entry in greedy_reference)
  assert engine.stats.matched_tokens - before == prompts - len(expected)


def test_forks_change_no_id(engine, greedy_reference):
  chat = greedy_reference[2:]
  expected = [[entry["new_ids"]] * 2 for entry in chat]
  assert generate(engine, chat, n=2) == expected
  assert engine.stats.forked_tokens > 0


def test_text_prompts_are_encoded_as_the_reference_was(
  engine, greedy_reference
):
  params = requests.SamplingParams(max_tokens=4)
  texts = [entry["prompt"] for entry in greedy_reference]
  for completion, entry in zip(
    engine.generate(texts, params), greedy_reference, strict=True
  ):
    assert list(completion.prompt_tokens) == entry["prompt_ids"]
    assert list(completion.tokens) == entry["new_ids"][:4]


def test_a_stop_string_cuts_the_text_of_a_real_tokenizer(
  engine, greedy_reference
):
  entry = greedy_reference[0]
  whole = engine.generate(
    [entry["prompt"]], requests.SamplingParams(max_tokens=MAX_TOKENS)
  )[0].text
  stop = whole[9:14]
  request = engine.submit(
    entry["prompt"],
    requests.SamplingParams(max_tokens=MAX_TOKENS, stop=(stop,)),
  )
  pieces = [event.text for event in engine.stream(request)]
  assert "".join(pieces) == whole[: whole.index(stop)]


@pytest.mark.parametrize(
  ("options", "max_tokens"),
  [
    # 8 pages of 16 rows for five prompts that come to 301 rows.
    ({"num_pages": 8}, MAX_TOKENS),
    ({"page_size": 1, "num_pages": 256, "prefix_reuse": False}, 24),
  ],
  ids=["pre-empted", "page-1-no-reuse"],
)
def test_other_caches_change_no_id(
  smollm2, greedy_reference, options, max_tokens
):
  # Few rows a step more than sequences: few shapes to compile.
  defaults = {"max_length": 128, "max_sequences": 5, "token_budget": 6}
  expected = [[entry["new_ids"][:max_tokens]] for entry in greedy_reference]
  with engines.Engine(smollm2, **(defaults | options)) as engine:
    found = generate(engine, greedy_reference, max_tokens=max_tokens)
    assert found == expected
    if options["num_pages"] == 8:
      assert engine.stats.preemptions > 0
    assert engine.audit() == ()
