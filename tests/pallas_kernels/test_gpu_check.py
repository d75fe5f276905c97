"""The GPU check takes its steps on a CPU, and tells right from wrong."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from pallas_kernels import gpu_check
from pallas_kernels import gpu_plan
from pallas_kernels import gpu_problems
from tests.pallas_kernels import batches
from tests.pallas_kernels import oracle

CHECKS_ONLY = dataclasses.replace(
  gpu_plan.DRY, decode=(), prefill=(), prefixes=()
)


@pytest.mark.interpreted
def test_the_dry_run_answers_right_and_writes_every_section(tmp_path, capsys):
  out = tmp_path / "there" / "check.json"
  assert gpu_check.main([f"--out={out}", "--dry-run"]) == 0
  record = json.loads(out.read_text())
  assert record["wrong"] == record["skipped"] == 0
  assert 0 < record["max_relative_error"] < 2e-2
  assert record["decode"][0]["ratio_vs_dense"] > 0
  assert record["prefill"][0]["microseconds"]["ours"] > 0
  assert record["shared_prefix"][0]["speedup"] > 0
  assert record["share_of_stream_read"] > 0
  printed = capsys.readouterr().out
  assert "2 of 2 checks agree with float64" in printed
  assert "% of a stream read" in printed


def test_without_a_gpu_the_full_run_says_so(tmp_path, capsys):
  assert gpu_check.main([f"--out={tmp_path / 'x.json'}"]) == 2
  assert "need a GPU, and JAX runs on cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("fault", "reason"),
  [
    (lambda out, lse: (out * 1.2, lse), "out is off by"),
    (lambda out, lse: (out, lse / np.log(2)), "LSE by"),
    (lambda out, lse: (out * np.nan, lse), "out is off by"),
    (lambda out, lse: (out, lse.at[0].set(0.0)), "an LSE is -inf where"),
  ],
)
def test_a_planted_fault_is_called_wrong(monkeypatch, fault, reason):
  right = gpu_problems.call
  monkeypatch.setattr(
    gpu_problems,
    "call",
    lambda *args: fault(*right(*args)),
  )
  plan = dataclasses.replace(CHECKS_ONLY, checks=CHECKS_ONLY.checks[:1])
  (found,) = gpu_check.check(plan, begun=float("inf"))
  assert found["status"] == "wrong"
  assert reason in found["reason"]


def test_answers_that_change_from_call_to_call_are_called_a_race(monkeypatch):
  noise = iter(range(100))
  right = gpu_problems.call

  def racing(*args):
    out, lse = right(*args)
    shift = jax.pure_callback(
      lambda: np.float32(next(noise) * 1e-3),
      jax.ShapeDtypeStruct((), np.float32),
    )
    return out, lse + shift

  monkeypatch.setattr(gpu_problems, "call", racing)
  plan = dataclasses.replace(CHECKS_ONLY, checks=CHECKS_ONLY.checks[:1])
  (found,) = gpu_check.check(plan, begun=float("inf"))
  assert found["reason"] == "answers change from call to call: a race"


def test_what_no_time_is_left_for_is_skipped():
  plan = dataclasses.replace(gpu_plan.DRY, budget_seconds=-1.0)
  record = gpu_check.run(plan)
  assert record["skipped"] == 5
  assert record["wrong"] == 0
  assert record["max_relative_error"] is None
  assert "skipped" in gpu_check.table(record)


def test_the_oracle_agrees_with_the_tests_own():
  problem = gpu_problems.Problem(
    "", (5, 17), (3, 2), head_dim=64, window=4, soft_cap=2.0
  )
  operands = gpu_problems.random_operands(problem)
  out, lse = gpu_problems.attend(problem, operands)
  rows = lambda side: [
    np.concatenate(
      [np.asarray(operands[f"{side}_pages"][p], np.float32) for p in table],
      axis=1,
    ).transpose(1, 0, 2)[:length]
    for table, length in zip(
      np.asarray(operands["page_table"]), problem.lengths, strict=True
    )
  ]
  batch = batches.Batch(
    q=np.asarray(operands["q"], np.float32),
    keys=rows("k"),
    values=rows("v"),
    counts=[3, 2],
    page_size=16,
  )
  want = oracle.attention(batch, window=4, soft_cap=2.0)
  assert oracle.relative_error(out, lse, want) < 1e-12
