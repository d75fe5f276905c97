"""The worked ledger, as the command prints, draws and summarises it."""

import json
import pathlib
import runpy

import pytest

from kvjax.experiments import common
from kvjax.experiments import ledger

ROOT = pathlib.Path(__file__).parents[3]
MIB = 1 << 20


@pytest.fixture
def config():
  return runpy.run_path(str(ROOT / "configs" / "ledger.py"))["get_config"]()


def test_the_default_is_the_worked_ledger(config, tmp_path, capsys):
  summary = ledger.run(config, tmp_path)
  assert summary == json.loads((tmp_path / "summary.json").read_text())
  assert summary["audit_findings"] == 0
  expected = {
    "logical_bytes": 4.625,
    "reserved_bytes": 9,
    "slack_bytes": 4.375,
    "reference_capacity_bytes": 6,
    "reference_tail_bytes": 1.375,
    "materialized_bytes": 2.0625,
    "capacity_bytes": 3,
    "tail_bytes": 0.9375,
    "deduplicated_bytes": 2.5625,
    "avoided_capacity_bytes": 3,
    "pool_bytes": 8,
    "live_bytes": 3,
    "idle_bytes": 5,
  }
  assert {name: summary[name] / MIB for name in expected} == expected
  assert summary["metadata_bytes"] == 482
  printed = capsys.readouterr().out
  for figure in ("4.625", "2.0625", "0.9375", "482", "6 page references"):
    assert figure in printed
  for picture in ("ledger.png", "page_tables.png"):
    assert (tmp_path / picture).stat().st_size > 1000


def test_quantised_rows_carry_their_scales(config, tmp_path):
  config.quantization = "int8"
  config.lengths, config.reserved = (5,), (5,)
  config.budget_gib = 1.0
  summary = ledger.run(config, tmp_path)
  assert summary["row_bytes"] == 32 * 4 * (2 * 128 + 2 * 4)
  assert summary["logical_bytes"] == 5 * summary["row_bytes"]
  assert summary["slack_bytes"] == 0


@pytest.mark.parametrize(
  ("name", "value", "match"),
  [
    ("reserved", (64, 48), "as many"),
    ("lengths", (), "as many"),
    ("budget_gib", 0.0001, "budget_gib"),
  ],
)
def test_what_does_not_go_together_is_answered(
  config, tmp_path, name, value, match
):
  with config.ignore_type():
    config[name] = value
  with pytest.raises(common.ExperimentError, match=match):
    ledger.run(config, tmp_path)
