"""Checks and times the GPU kernels on this machine's GPU; needs no network.

    python -m kvjax.run --config=configs/gpu_check.py --workdir=out/gpu_check

Where kvjax's own dependencies are missing, JAX, NumPy and absl are enough for

    python -m pallas_kernels.gpu_check --out=FILE
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the configuration of the check."""
  return ml_collections.ConfigDict(
    {
      "experiment": "gpu_check",
      # Takes the same steps on any machine, on tiny shapes, through XLA.
      "dry_run": False,
    }
  )
