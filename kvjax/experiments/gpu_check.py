"""Correctness and times of the GPU kernels on this machine's GPU."""

import json
import pathlib

import ml_collections

from kvjax.experiments import common
from pallas_kernels import gpu_check
from pallas_kernels import gpu_plan


def run(
  config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> dict[str, object]:
  """Checks the kernels against float64 and times them beside baselines.

  Args:
    config: see `configs/gpu_check.py`.
    workdir: gets `summary.json`, and `gpu_check.json` with every problem.

  Returns:
    The summary.

  Raises:
    ExperimentError: there is no GPU that the kernels run on.
  """
  plan = gpu_plan.DRY if config.dry_run else gpu_plan.FULL
  reason = gpu_check.unable(plan)
  if reason is not None:
    raise common.ExperimentError(
      f"{reason}; --config.dry_run=True takes the same steps on any machine"
    )
  record = gpu_check.run(plan)
  path = workdir / "gpu_check.json"
  path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
  print(gpu_check.table(record), flush=True)
  flat = {
    name: value
    for name, value in record.items()
    if not isinstance(value, list | dict)
  }
  for sequences, rows in record["shared_prefix_pays_from_rows"].items():
    flat[f"shared_prefix_pays_from_rows_{sequences}"] = rows
  return common.write_summary(workdir, flat)
