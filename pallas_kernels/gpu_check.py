"""Checks and times the kernels on this machine's GPU; needs no network.

    python -m pallas_kernels.gpu_check --out=FILE [--dry-run]

First correctness, against float64 on the host, with NaN in every row that
nobody owns, and five times over: a race that changes a bit is a failure.  Then
decode and prefill beside XLA's dense attention, JAX's own kernel and a stream
read of the same bytes, and where a shared prefix begins to pay.  At most five
minutes: what no time is left for is listed as skipped.  `--dry-run` takes the
same steps on any machine, on tiny shapes through `xla`.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import errors
from pallas_kernels import gpu_device
from pallas_kernels import gpu_plan
from pallas_kernels import gpu_problems
from pallas_kernels import gpu_timing

TOLERANCE = 2e-2
REPEATS = 5


def check(plan: gpu_plan.Plan, begun: float) -> list[dict[str, Any]]:
  """Compares answers with float64, and repeats with themselves.

  Args:
    plan: what to check.
    begun: when the run began, of `time.monotonic`.

  Returns:
    One record a problem: `name`, `status` ("ok", "wrong", "unsupported" or
    "skipped"), `relative_error` and `reason`.
  """
  return [
    _skipped(problem.name) if _late(plan, begun) else _check(problem, plan)
    for problem in plan.checks
  ]


def _late(plan: gpu_plan.Plan, begun: float) -> bool:
  return time.monotonic() - begun > plan.budget_seconds


def _skipped(name: str) -> dict[str, Any]:
  return {"name": name, "status": "skipped", "reason": "no time was left"}


def _check(
  problem: gpu_problems.Problem, plan: gpu_plan.Plan
) -> dict[str, Any]:
  operands, (want, want_lse) = gpu_problems.poisoned_operands(problem)

  @jax.jit
  def run(x: gpu_problems.Operands) -> tuple[jax.Array, jax.Array]:
    return gpu_problems.call(plan.implementation, problem, x)

  try:
    found = [run(operands) for _ in range(REPEATS)]
  except errors.KernelUnsupported as refusal:
    return {
      "name": problem.name,
      "status": "unsupported",
      "reason": str(refusal),
    }
  out, lse = (np.asarray(x, np.float64) for x in found[0])
  error = np.abs(out - want).max() / np.abs(want).max()
  empty = np.isneginf(want_lse)
  lse_error = np.abs(lse[~empty] - want_lse[~empty]).max()
  reason = None
  if not (np.isneginf(lse) == empty).all():
    reason = "an LSE is -inf where rows are seen, or finite where none is"
  elif not max(error, lse_error) <= TOLERANCE:
    reason = f"out is off by {error:.1e} and LSE by {lse_error:.1e}"
  elif not all(_same(found[0], other) for other in found[1:]):
    reason = "answers change from call to call: a race"
  return {
    "name": problem.name,
    "status": "wrong" if reason else "ok",
    "relative_error": float(error),
    "reason": reason,
  }


def _same(one: Sequence[jax.Array], other: Sequence[jax.Array]) -> bool:
  return all(
    np.asarray(x).tobytes() == np.asarray(y).tobytes()
    for x, y in zip(one, other, strict=True)
  )


def run(plan: gpu_plan.Plan) -> dict[str, Any]:
  """Takes every section in turn, and stops beginning new ones when late.

  Args:
    plan: what to check and time.

  Returns:
    A record that JSON can hold: the device, the JAX version, `checks`,
    `decode`, `prefill`, `shared_prefix`, `seconds`, and what `summarize` adds.
  """
  begun = time.monotonic()
  record: dict[str, Any] = {
    "device": jax.devices()[0].device_kind,
    "jax_version": jax.__version__,
    "implementation": plan.implementation,
    "checks": check(plan, begun),
  }
  for section, problems in (("decode", plan.decode), ("prefill", plan.prefill)):
    record[section] = [
      _skipped(problem.name)
      if _late(plan, begun)
      else gpu_timing.time_problem(problem, plan)
      for problem in problems
    ]
  record["shared_prefix"] = [
    _skipped(f"prefix {shared} of {sequences}")
    if _late(plan, begun)
    else gpu_timing.time_prefix(sequences, shared, own, plan)
    for sequences, shared, own in plan.prefixes
  ]
  record["seconds"] = time.monotonic() - begun
  return record | summarize(record)


def summarize(record: Mapping[str, Any]) -> dict[str, Any]:
  """The few figures that say how it went."""
  timed = [*record["decode"], *record["prefill"]]
  everything = [*record["checks"], *timed, *record["shared_prefix"]]
  count = lambda status: sum(x["status"] == status for x in everything)
  errors_found = [
    x["relative_error"] for x in record["checks"] if "relative_error" in x
  ]
  first: Mapping[str, Any] = next(iter(record["decode"]), {})
  ragged: Mapping[str, Any] = next(iter(record["prefill"]), {})
  return {
    "wrong": count("wrong"),
    "skipped": count("skipped"),
    "max_relative_error": max(errors_found, default=None),
    "share_of_stream_read": first.get("share_of_stream_read"),
    "decode_ratio_vs_dense": first.get("ratio_vs_dense"),
    "decode_ratio_vs_jax": first.get("ratio_vs_jax"),
    "prefill_ratio_vs_dense": ragged.get("ratio_vs_dense"),
    "shared_prefix_pays_from_rows": _crossover(record["shared_prefix"]),
  }


def _crossover(records: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
  """For each batch size, the shortest prefix that is faster read once."""
  found: dict[str, int | None] = {}
  for record in records:
    if record.get("speedup") is None:
      continue
    key = str(record["sequences"])
    found.setdefault(key, None)
    if found[key] is None and record["speedup"] > 1:
      found[key] = record["shared_rows"]
  return found


def table(record: Mapping[str, Any]) -> str:
  """The record as a few lines for a person."""
  lines = [f"{record['device']}, JAX {record['jax_version']}"]
  bad = [x for x in record["checks"] if x["status"] != "ok"]
  right = len(record["checks"]) - len(bad)
  lines.append(
    f"{right} of {len(record['checks'])} checks agree with float64, largest"
    f" relative error {record['max_relative_error']}"
  )
  lines += [f"  {x['name']}: {x['status']}, {x['reason']}" for x in bad]
  for section in ("decode", "prefill", "shared_prefix"):
    for entry in record[section]:
      if entry["status"] == "skipped":
        lines.append(f"{entry['name']:28s} skipped")
        continue
      times = "  ".join(
        f"{name} {value:.1f}" if isinstance(value, float) else f"{name} -"
        for name, value in entry["microseconds"].items()
      )
      share = entry.get("share_of_stream_read")
      tail = "" if share is None else f"  ({share:.0%} of a stream read)"
      lines.append(f"{entry['name']:28s} us: {times}{tail}")
  lines.append(f"{record['seconds']:.0f} s")
  return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
  """The command; returns 1 where an answer is wrong, 2 where it cannot run."""
  parser = argparse.ArgumentParser(
    prog="python -m pallas_kernels.gpu_check",
    description=__doc__.split("\n")[0],
  )
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--dry-run", action="store_true")
  given = parser.parse_args(arguments)
  plan = gpu_plan.DRY if given.dry_run else gpu_plan.FULL
  reason = unable(plan)
  if reason is not None:
    sys.stderr.write(f"{reason}\n")
    return 2
  record = run(plan)
  given.out.parent.mkdir(parents=True, exist_ok=True)
  given.out.write_text(json.dumps(record, indent=1) + "\n")
  sys.stdout.write(f"{table(record)}\n")
  return min(1, record["wrong"])


def unable(plan: gpu_plan.Plan) -> str | None:
  """Why this machine cannot run a plan, or None."""
  if plan.implementation != "gpu":
    return None
  backend = jax.default_backend()
  if backend not in ("gpu", "cuda"):
    return f"the kernels need a GPU, and JAX runs on {backend} here"
  return gpu_device.why_unsupported()


if __name__ == "__main__":
  sys.exit(main())
