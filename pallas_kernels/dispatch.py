"""One selector for every op: which implementation runs this call.

    for each of tpu, gpu, xla, reference:
      written?  made for this platform?  why_unsupported(...) is None?  -> run

An implementation is a module of the op's package, named after its backend.  It
has the op's function, taking `(operands, options)`, and a `why_unsupported`
of the same two arguments that returns None or one sentence.  A package without
that module has not got that implementation, and says so.  Nothing is tried and
caught: that would hide a kernel's bug.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.util
import types
from collections.abc import Generator

import jax
from absl import logging

from pallas_kernels import errors

# In order of preference.  None: every platform.
PLATFORM_OF: dict[str, str | None] = {
  "tpu": "tpu",
  "gpu": "gpu",
  "xla": None,
  "reference": None,
}
IMPLEMENTATIONS = tuple(PLATFORM_OF)

_target: contextvars.ContextVar[str | None] = contextvars.ContextVar(
  "kernel_target", default=None
)


@contextlib.contextmanager
def tracing_for(platform: str) -> Generator[None]:
  """Traces for a platform that is not here: to interpret, or compile ahead.

  Args:
    platform: "cpu", "gpu" or "tpu"; calls inside pick as if they ran there.
  """
  token = _target.set(platform)
  try:
    yield
  finally:
    _target.reset(token)


def target_platform() -> str:
  """The platform that ops are selected for."""
  return _target.get() or _canonical(jax.default_backend())


def _canonical(backend: str) -> str:
  return "gpu" if backend in ("cuda", "rocm") else backend


@dataclasses.dataclass(frozen=True)
class Op:
  """An op and where its implementations are.

  Attributes:
    package: the package whose modules are the implementations.
    name: the function that each of them has.
    predicate: the function that says why one cannot run a call.
  """

  package: str
  name: str
  predicate: str = "why_unsupported"

  def why_unsupported(
    self, implementation: str, operands: object, options: object
  ) -> str | None:
    """Why an implementation cannot run this call here, or None.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      operands: the op's operands: arrays or `jax.ShapeDtypeStruct`s.
      options: the op's static options.

    Raises:
      KernelArgumentError: there is no such implementation.
    """
    if implementation not in PLATFORM_OF:
      raise errors.KernelArgumentError(
        f"{implementation=}, expected one of {', '.join(IMPLEMENTATIONS)}"
      )
    module = _module(self.package, implementation)
    if module is None or not hasattr(module, self.name):
      return f"{self.name} has no {implementation} implementation"
    platform = PLATFORM_OF[implementation]
    if platform is not None and platform != target_platform():
      return f"needs a {platform.upper()}; this is {target_platform()}"
    return getattr(module, self.predicate)(operands, options)

  def select(
    self, implementation: str | None, operands: object, options: object
  ) -> types.ModuleType:
    """The module that runs this call.

    Args:
      implementation: its name, or None for the first that can.
      operands: the op's operands.
      options: the op's static options.

    Raises:
      KernelUnsupported: the named implementation cannot run this call, or none
        can; with the reason.
    """
    if implementation is not None:
      reason = self.why_unsupported(implementation, operands, options)
      if reason is not None:
        raise errors.KernelUnsupported(
          f"{self.name} with {implementation=}: {reason}"
        )
      return _found(self.package, implementation)
    reasons = {}
    for name, platform in PLATFORM_OF.items():
      reason = self.why_unsupported(name, operands, options)
      if reason is None:
        return _found(self.package, name)
      reasons[name] = reason
      if platform == target_platform():
        _say_once(self.name, name, reason)
    raise errors.KernelUnsupported(f"no {self.name} can run this: {reasons}")


@functools.cache
def _module(package: str, name: str) -> types.ModuleType | None:
  path = f"{package}.{name}"
  if importlib.util.find_spec(path) is None:
    return None
  return importlib.import_module(path)


def _found(package: str, name: str) -> types.ModuleType:
  module = _module(package, name)
  assert module is not None
  return module


@functools.cache
def _say_once(op: str, name: str, reason: str) -> None:
  logging.info("%s does not run on its %s kernel: %s", op, name, reason)
