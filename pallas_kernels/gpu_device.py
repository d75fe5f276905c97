"""What GPU this is, and whether the Mosaic GPU kernels run on it."""

import jax

# `wgmma` is Hopper's alone: Blackwell multiplies by another instruction.
CAPABILITY = "9.0"


def why_unsupported() -> str | None:
  """Why this process's GPU cannot run them, or None.

  None too where there is no GPU: the call is then traced for one, to be
  interpreted or compiled ahead.
  """
  if jax.default_backend() not in ("gpu", "cuda"):
    return None
  device = jax.devices()[0]
  capability = getattr(device, "compute_capability", None)
  if capability == CAPABILITY:
    return None
  return (
    f"{device.device_kind} has compute capability {capability}, expected"
    f" {CAPABILITY}: the kernels use Hopper's WGMMA"
  )
