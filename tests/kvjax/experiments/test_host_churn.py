"""The host experiments at a hundredth of their size."""

import json

import ml_collections
import numpy as np
import pytest

from kvjax.experiments import churn
from kvjax.experiments import common
from kvjax.experiments import host_churn
from kvjax.experiments import host_measures
from kvjax.experiments import trace_replay


@pytest.fixture
def config():
  return ml_collections.ConfigDict(
    {
      "seed": 0,
      "num_requests": 12,
      "output_tokens": 5,
      "max_active": 4,
      "admissions_per_step": 2,
      "rounds": 1,
      "page_size": 16,
      "num_pages": 512,
      "max_length": 2048,
      "prefix_index": "radix",
      "tail_policy": "copy_rows",
      "eviction": "lru",
      "leaves": 60,
      "large_pool_pages": 10_000,
      "memory_requests": 20,
    }
  )


def test_the_trace_shares_prefixes_and_is_the_same_each_time():
  one = churn.shared_prefix_trace(40, seed=3)
  assert one == churn.shared_prefix_trace(40, seed=3)
  assert one != churn.shared_prefix_trace(40, seed=4)
  assert len({tuple(r.prompt[:1024]) for r in one}) <= 8
  assert len({tuple(r.prompt[:1280]) for r in one}) > 8
  assert all(1280 + 32 <= len(r.prompt) <= 1280 + 512 for r in one)


class CountingManager:
  """Admits two requests at once and notes what it is asked."""

  def __init__(self):
    self.held, self.log = 0, []

  def admit(self, request):
    if self.held == 2:
      return None
    self.held += 1
    return request.number, 10

  def prefill(self, handles):
    self.log.append(("prefill", tuple(handles)))

  def decode(self, handles, tokens):
    self.log.append(("decode", tuple(handles), tuple(tokens)))
    return True

  def finish(self, handle):
    self.held -= 1
    self.log.append(("finish", handle))


def test_the_schedule_serves_everybody_in_turn():
  trace = [churn.Request(i, [1] * 20, [i, i + 100]) for i in range(3)]
  manager = CountingManager()
  outcome = churn.run_schedule(
    manager, trace, max_active=8, admissions_per_step=4
  )
  assert manager.log == [
    ("prefill", (0, 1)),
    ("decode", (0, 1), (0, 1)),
    ("decode", (0, 1), (100, 101)),
    ("finish", 0),
    ("finish", 1),
    ("prefill", (2,)),
    ("decode", (2,), (2,)),
    ("decode", (2,), (102,)),
    ("finish", 2),
  ]
  assert outcome.hit_rate == 0.5
  assert outcome.steps == 4


def test_host_churn_writes_every_key_and_nulls_for_absent_rivals(
  config, tmp_path, monkeypatch
):
  monkeypatch.delenv("VLLM_SRC", raising=False)
  monkeypatch.delenv("SGLANG_SRC", raising=False)
  monkeypatch.setattr(
    host_measures, "decode_microseconds_per_token", lambda: 0.25
  )
  monkeypatch.setattr(host_measures, "match_128k_milliseconds", lambda: 0.1)
  host_churn.run(config, tmp_path)
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["ratio_vs_vllm"] is None
  assert summary["ratio_vs_sglang_python"] is None
  assert summary["ratio_vs_sglang_rust"] is None
  assert summary["audit_findings"] == 0
  assert summary["requests_per_second"] > 0
  assert set(summary) >= {
    "hit_rate",
    "host_us_per_decoded_token_at_256",
    "match_128k_ms",
    "evict_64_pages_of_41k_leaves_ms",
    "evict_64_pages_of_41k_leaves_p99_ms",
    "million_page_slowdown",
    "rss_growth_bytes",
  }


def test_a_rival_that_is_not_where_it_should_be_is_named(
  config, tmp_path, monkeypatch
):
  monkeypatch.setenv("VLLM_SRC", str(tmp_path))
  with pytest.raises(common.ExperimentError, match="vllm cannot be run from"):
    host_churn.run(config, tmp_path)


def test_ours_finds_what_an_infinite_cache_would(config):
  trace = churn.shared_prefix_trace(30, output_tokens=3)
  config.num_pages = 4096
  outcome = churn.run_schedule(
    host_churn.KvjaxManager(config),
    trace,
    max_active=4,
    admissions_per_step=1,
  )
  seen, ideal = set(), 0
  for request in trace:
    prefixes = [tuple(request.prompt[:n]) for n in (1024, 1280)]
    ideal += max((len(p) for p in prefixes if p in seen), default=0)
    seen.update(prefixes)
  # A tail may share a token or two with another by chance.
  assert ideal <= outcome.matched_tokens <= ideal + 40


def test_small_measures_are_of_the_right_kind():
  assert (
    host_measures.decode_microseconds_per_token(num_sequences=2, steps=3) > 0
  )
  median, p99 = host_measures.evict_milliseconds(leaves=80, rounds=3)
  assert 0 < median <= p99


def write_trace(path, prompts):
  path.write_text(
    "".join(json.dumps({"hash_ids": blocks}) + "\n" for blocks in prompts)
  )
  return path


def lru_hits(prompts, capacity):
  """Block LRU the plain way: hits of contiguous prefixes."""
  order, hits = [], 0
  for blocks in prompts:
    contiguous = True
    for block in blocks:
      contiguous = contiguous and block in order
      hits += contiguous
    for block in reversed(blocks):
      if block in order:
        order.remove(block)
      order.append(block)
    order = order[-capacity:]
  return hits


@pytest.mark.parametrize("prefix_index", ["radix", "hash_chain"])
def test_replay_hits_as_often_as_a_plain_lru_of_blocks(prefix_index):
  rng = np.random.default_rng(0)
  prompts, chains = [], [[0]]
  for number in range(200):
    chain = chains[rng.integers(len(chains))][: rng.integers(1, 8)]
    chain = [*chain, *range(100 * number, 100 * number + rng.integers(1, 4))]
    chains.append(chain)
    prompts.append(np.array(chain, np.int32))
  blocks = sum(map(len, prompts))
  for capacity in (40, 200, 2000):
    rate = trace_replay.replay(
      prompts, num_pages=capacity, prefix_index=prefix_index
    )
    ideal = lru_hits([p.tolist() for p in prompts], capacity) / blocks
    assert rate >= ideal - 0.02


def test_trace_replay_reports_each_capacity(tmp_path):
  path = write_trace(tmp_path / "trace.jsonl", [[1, 2], [1, 2, 3], [1, 2, 3]])
  config = ml_collections.ConfigDict(
    {
      "trace": str(path),
      "limit": 0,
      "capacities": (2,),
      "prefix_index": "radix",
      "eviction": "lru",
    }
  )
  summary = trace_replay.run(config, tmp_path)
  assert summary["hit_rate_unlimited"] == 5 / 8
  assert summary["hit_rate_2"] == 4 / 8
  assert summary["distinct_blocks"] == 3


@pytest.mark.parametrize(
  ("text", "error"),
  [
    ("", "holds no request"),
    ("{}\n", "line 1 of"),
    ("[1]\n", "line 1 of"),
    ('{"hash_ids": [99999999999]}\n', "line 1 of"),
    ("no json\n", "line 1 of"),
  ],
)
def test_a_trace_that_is_none_is_refused(tmp_path, text, error):
  path = tmp_path / "trace.jsonl"
  path.write_text(text)
  with pytest.raises(common.ExperimentError, match=error):
    trace_replay.read_blocks(path)


def test_a_trace_that_is_not_there_is_named(tmp_path):
  config = ml_collections.ConfigDict({"trace": "nowhere.jsonl"})
  with pytest.raises(common.ExperimentError, match=r"'nowhere\.jsonl'"):
    trace_replay.run(config, tmp_path)
