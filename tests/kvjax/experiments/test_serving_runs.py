"""The quickstart and GSM8K runs, on a model that takes milliseconds."""

import json
import pathlib
import runpy

import pytest

from kvjax import errors
from kvjax import run
from kvjax import testing
from kvjax.experiments import common
from kvjax.experiments import dense_baseline
from kvjax.experiments import serving

ROOT = pathlib.Path(__file__).parents[3]
# What issue-trackers, CI and readers of summary.json rely on.
KEYS = {
  "requests",
  "prompt_tokens",
  "matched_tokens",
  "computed_tokens",
  "generated_tokens",
  "peak_pages",
  "compilations",
  "outputs_equal_without_reuse",
  "ttft_seconds_p50",
  "ttft_seconds_p50_without_reuse",
  "decode_tokens_per_second",
  "decode_ratio_vs_dense",
  "prefill_ratio_vs_dense",
  "reused_share_of_ideal",
  "audit_findings",
}


class ByteTokenizer:
  """A token for every byte."""

  eos_ids = ()
  vocab_size = 256

  def encode(self, text: str) -> list[int]:
    return list(text.encode())

  def decode(self, ids) -> str:
    return bytes(ids).decode(errors="replace")


@pytest.fixture(scope="module")
def loaded():
  """The model, unrolled and scanned, and its tokenizer.

  One for all tests: what an engine compiles stays with the model.
  """
  config = testing.tiny_config(vocab_size=256)
  return {
    scan_layers: (
      testing.random_decoder(config, scan_layers=scan_layers),
      ByteTokenizer(),
    )
    for scan_layers in (False, True)
  }


@pytest.fixture
def tiny_model(monkeypatch, loaded):
  monkeypatch.setattr(
    serving, "load_model", lambda config: loaded[config.scan_layers]
  )


def load_config(name: str, **changes):
  config = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["get_config"]()
  config.update(
    {
      "max_tokens": 6,
      "max_sequences": 2,
      "token_budget": 3,
      "page_size": 4,
      "scan_layers": True,
      **changes,
    }
  )
  return config


def test_the_quickstart_writes_every_key_and_its_pictures(
  tiny_model, tmp_path, capsys
):
  prompts = tmp_path / "mine.txt"
  prompts.write_text("one?\ntwo?\ntwelve?\n")
  (tmp_path / "mine.prefix.txt").write_text("a prefix of 30 characters ... ")
  config = load_config(
    "quickstart",
    prompts=str(prompts),
    baseline_batch=2,
    baseline_context=64,
    baseline_chunk=4,
    baseline_rounds=3,
  )
  summary = run.run_experiment(config, tmp_path / "out")
  assert summary.keys() >= KEYS
  assert None not in {summary[key] for key in KEYS}
  assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
  assert summary["requests"] == 3
  assert summary["prompt_tokens"] == 3 * 30 + 4 + 4 + 7
  # The second prompt shares the prefix, the third "tw" with the second too.
  assert summary["ideal_matched_tokens"] == 30 + 32
  assert 60 <= summary["matched_tokens"] <= 62
  reused = summary["matched_tokens"] + summary["computed_tokens"]
  assert reused == summary["prompt_tokens"] + 3 * 5  # the last is not computed
  assert summary["outputs_equal_without_reuse"] is True
  assert summary["generated_tokens"] == 3 * 6
  assert summary["audit_findings"] == 0
  assert 1 <= summary["compilations"] <= 16
  text = (tmp_path / "out" / "generated.txt").read_text()
  assert text.count("-->") == 3
  picture = (tmp_path / "out" / "pool_use.png").read_bytes()
  assert picture.startswith(b"\x89PNG")
  assert "first token s" in capsys.readouterr().out


def test_a_baseline_that_is_left_out_is_null(tiny_model, tmp_path):
  prompts = tmp_path / "mine.txt"
  prompts.write_text("one?\n")
  config = load_config("quickstart", prompts=str(prompts), baseline_rounds=0)
  summary = run.run_experiment(config, tmp_path)
  assert summary["decode_ratio_vs_dense"] is None
  assert summary["reused_share_of_ideal"] is None  # nothing can be reused


@pytest.mark.parametrize(
  ("batch", "match"), [(2, "is too short for"), (0, "batch=0, .* is none")]
)
def test_a_baseline_that_cannot_be_is_refused(loaded, batch, match):
  with pytest.raises(common.ExperimentError, match=match):
    dense_baseline.measure(
      loaded[False][0],
      batch=batch,
      context=36,
      chunk=16,
      rounds=3,
      sizes=dense_baseline.CacheSizes(4, 32, 2, 64, 8),
    )


def test_a_page_size_that_cannot_be_is_refused_by_the_library(
  tiny_model, tmp_path
):
  prompts = tmp_path / "mine.txt"
  prompts.write_text("one?\n")
  config = load_config("quickstart", prompts=str(prompts), page_size=0)
  with pytest.raises(errors.LayoutError, match="page_size"):
    run.run_experiment(config, tmp_path)


def test_gsm8k_reuses_what_an_infinite_cache_would(
  tiny_model, tmp_path, monkeypatch
):
  folder = tmp_path / "gsm8k"
  folder.mkdir()
  for name, count in (("train_first8.jsonl", 2), ("test.jsonl", 6)):
    rows = [
      {"question": f"{n} and {n}?", "answer": str(2 * n)} for n in range(count)
    ]
    text = "\n".join(json.dumps(row) for row in rows)
    (folder / name).write_text(text)
  monkeypatch.setenv("KVJAX_DATA", str(tmp_path))
  config = load_config("gsm8k", shots=2, questions=6, questions_without_reuse=2)
  summary = run.run_experiment(config, tmp_path / "out")
  assert summary["requests"] == 6
  assert summary["reused_share_of_ideal"] >= 0.99
  assert summary["outputs_equal_without_reuse"] is True
  assert summary["audit_findings"] == 0


def test_gsm8k_without_its_data_says_what_to_set(tmp_path, monkeypatch):
  monkeypatch.setenv("KVJAX_DATA", str(tmp_path))
  with pytest.raises(common.ExperimentError, match="set KVJAX_DATA"):
    run.run_experiment(load_config("gsm8k"), tmp_path)
