"""The only branches on JAX's version, platform tools included."""

from typing import Any

import jax

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3])


def gpu_load(ref: Any, layout: Any) -> jax.Array:
  """Loads a whole Mosaic GPU reference into registers in a layout."""
  from jax.experimental.pallas import mosaic_gpu as plgpu

  if JAX_VERSION < (0, 11):
    return plgpu.load(ref, (), layout=layout)
  return plgpu.load(ref, layout=layout)


def gpu_transposed(ref: Any) -> Any:
  """A Mosaic GPU reference of rank 2 with its axes exchanged."""
  from jax.experimental.pallas import mosaic_gpu as plgpu

  if JAX_VERSION < (0, 11):
    return plgpu.transpose_ref(ref, (1, 0))
  return ref.transpose((1, 0))


def gpu_interpret_params(*, detect_races: bool) -> Any:
  """What `plgpu.kernel(interpret=...)` takes."""
  from jax._src.pallas.mosaic_gpu.interpret import params

  return params.InterpretGPUParams(detect_races=detect_races)
