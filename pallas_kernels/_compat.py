"""The only branches on JAX's version, platform tools included."""

from typing import Any

import jax

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3])


def gpu_transposed(ref: Any) -> Any:
  """A Mosaic GPU reference of rank 2 with its axes exchanged."""
  from jax.experimental.pallas import mosaic_gpu as plgpu

  if JAX_VERSION < (0, 11):
    return plgpu.transpose_ref(ref, (1, 0))
  return ref.transpose((1, 0))


# JAX 0.10 interprets no WGMMA of a transposed reference.
GPU_INTERPRETS_TRANSPOSED = JAX_VERSION >= (0, 11)


def gpu_interpret_params(*, detect_races: bool) -> Any:
  """What `plgpu.kernel(interpret=...)` takes."""
  from jax._src.pallas.mosaic_gpu.interpret import params

  return params.InterpretGPUParams(detect_races=detect_races)


def tpu_races_found() -> bool:
  """Whether the TPU interpreter's last call raced; from 0.12 on it raises."""
  from jax._src.pallas.mosaic.interpret import interpret_pallas_call

  races = getattr(interpret_pallas_call, "races", None)
  return races is not None and races.races_found
