"""The only branches on JAX's version, platform tools included."""

import contextlib
import contextvars
from collections.abc import Iterator
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


_gpu_interpreter: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "gpu_interpreter", default=None
)


def gpu_interpreter() -> Any:
  """What `plgpu.kernel(interpret=...)` takes, or None to compile."""
  return _gpu_interpreter.get()


@contextlib.contextmanager
def interpreting_gpu(*, detect_races: bool) -> Iterator[None]:
  """Mosaic GPU kernels traced inside run on the CPU, interpreted."""
  from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
  from jax._src.pallas.mosaic_gpu.interpret import params

  # What an error left behind would hang the next call.
  interpret_pallas_call.reset_gpu_interpret_mode_state()
  chosen = params.InterpretGPUParams(detect_races=detect_races)
  token = _gpu_interpreter.set(chosen)
  try:
    yield
  finally:
    _gpu_interpreter.reset(token)


def gpu_races_found() -> bool:
  """Whether the GPU interpreter's last call raced; from 0.12 on it raises."""
  from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

  races = interpret_pallas_call.get_races()
  return getattr(races, "races_found", False)


def tpu_races_found() -> bool:
  """Whether the TPU interpreter's last call raced; from 0.12 on it raises."""
  from jax._src.pallas.mosaic.interpret import interpret_pallas_call

  races = getattr(interpret_pallas_call, "races", None)
  return races is not None and races.races_found
