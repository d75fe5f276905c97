"""What a kernel refuses, and why."""


class KernelError(Exception):
  """Anything that an op of this package refuses; `.reason` is stable."""

  reason = "kernel"


class KernelArgumentError(KernelError, ValueError):
  """An argument has the wrong shape, dtype or value; names what it expected."""

  reason = "kernel_argument"


class KernelUnsupported(KernelError, NotImplementedError):  # noqa: N818
  """An implementation asked for by name cannot run this call."""

  reason = "kernel_unsupported"


class InferenceOnly(KernelError, NotImplementedError):  # noqa: N818
  """Something differentiates through an op that has no gradient."""

  reason = "inference_only"
