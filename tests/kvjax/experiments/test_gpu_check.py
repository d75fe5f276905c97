"""The GPU check as an experiment."""

import dataclasses
import json

import pytest

from configs import gpu_check as config_file
from kvjax import run
from kvjax.experiments import common
from pallas_kernels import gpu_plan


def test_a_dry_run_writes_a_flat_summary_and_every_problem(
  tmp_path, monkeypatch
):
  short = dataclasses.replace(gpu_plan.DRY, decode=(), prefill=(), prefixes=())
  monkeypatch.setattr(gpu_plan, "DRY", short)
  config = config_file.get_config()
  config.dry_run = True
  summary = run.run_experiment(config, tmp_path)
  assert summary == json.loads((tmp_path / "summary.json").read_text())
  assert summary["wrong"] == 0
  assert summary["max_relative_error"] < 2e-2
  record = json.loads((tmp_path / "gpu_check.json").read_text())
  assert [x["status"] for x in record["checks"]] == ["ok", "ok"]


def test_without_a_gpu_it_says_what_to_do(tmp_path):
  with pytest.raises(common.ExperimentError, match=r"need a GPU.*dry_run=True"):
    run.run_experiment(config_file.get_config(), tmp_path)
