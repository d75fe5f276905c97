"""Hit rates of a recorded trace against the published ones."""

import pytest

from kvjax.experiments import common
from kvjax.experiments import trace_replay


@pytest.fixture(scope="module")
def prompts():
  try:
    path = common.find_data("mooncake/conversation_trace.jsonl")
  except common.ExperimentError as error:
    pytest.skip(f"needs the Mooncake conversation trace: {error}")
  return trace_replay.read_blocks(path)


# Of an ideal LRU cache of so many blocks of 512 tokens.
@pytest.mark.parametrize(("blocks", "rate"), [(1000, 0.0445), (10_000, 0.2112)])
def test_the_hit_rates_of_an_ideal_lru_cache_are_reached(prompts, blocks, rate):
  found = trace_replay.replay(prompts, num_pages=blocks)
  assert rate - 0.00005 <= found < rate + 0.003


def test_with_room_for_everything_every_repeated_beginning_is_found(prompts):
  """Against a set of all beginnings, each named by its blocks."""
  some = prompts[:1500]
  seen: set[bytes] = set()
  hits = 0
  for prompt in some:
    beginnings = [prompt[: i + 1].tobytes() for i in range(len(prompt))]
    known = [beginning in seen for beginning in beginnings]
    hits += known.index(False) if False in known else len(known)
    seen.update(beginnings)
  expected = hits / sum(map(len, some))
  for index in ("radix", "hash_chain"):
    found = trace_replay.replay(
      some, num_pages=sum(map(len, some)), prefix_index=index
    )
    assert found == expected


def test_both_indexes_find_the_same_under_pressure(prompts):
  rates = {
    trace_replay.replay(prompts[:1000], num_pages=500, prefix_index=index)
    for index in ("radix", "hash_chain")
  }
  assert len(rates) == 1
