"""A gate that turns differentiation into an error one can read."""

import functools
from typing import NoReturn

import jax

from pallas_kernels import errors


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def inference_only(op: str, x: jax.Array) -> jax.Array:
  """Returns x; raises when something differentiates through it.

  Args:
    op: the op's name, for the error.
    x: any array; no copy is made.

  Raises:
    InferenceOnly: under `jax.grad`, `jax.jvp` and their relatives.
  """
  del op
  return x


@inference_only.defjvp
def _inference_only_jvp(
  op: str, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> NoReturn:
  del primals, tangents
  raise errors.InferenceOnly(
    f"{op} is inference only: it reads a cache and has no gradient"
  )
