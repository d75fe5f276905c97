"""The Mosaic GPU interpreter as tests use it: races are failures.

It covers what JAX interprets: grids, warpgroups, barriers, bulk copies, masks
and softmax.  Products of registers with shared memory, and on JAX 0.10 all
products, are computed in their place by `jnp.dot`.
"""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

from pallas_kernels import _compat
from pallas_kernels.paged_attention import gpu_tiles
from tests.pallas_kernels import batches
from tests.pallas_kernels import conformance
from tests.pallas_kernels import harness

# What two roundings of bfloat16 may differ by.
BFLOAT16_TOLERANCE = 1.6e-2


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
  """Calls of GPU kernels inside are interpreted, with race detection."""
  with _compat.interpreting_gpu(detect_races=True):
    yield


@contextlib.contextmanager
def interpreted_without_races() -> Iterator[None]:
  """For a call whose contract lets writers race."""
  with _compat.interpreting_gpu(detect_races=False):
    yield


@contextlib.contextmanager
def tiles(**limits: int) -> Iterator[None]:
  """Interpreted, with other tiles than the heuristic's, by its limits."""
  with contextlib.ExitStack() as stack:
    for name, value in limits.items():
      stack.enter_context(mock.patch.object(gpu_tiles, name, value))
    yield


@contextlib.contextmanager
def bfloat16_by_default() -> Iterator[None]:
  """Batches are bfloat16 where a test does not say: the GPU has no other."""
  defaults = batches.make.__kwdefaults__ | {"dtype": "bfloat16"}
  close = functools.partial(harness.assert_close, tolerance=BFLOAT16_TOLERANCE)
  with (
    mock.patch.object(batches.make, "__kwdefaults__", defaults),
    mock.patch.object(harness, "assert_close", close),
  ):
    yield


def assert_no_races() -> None:
  """0.10 only prints a race; 0.12 has raised by now."""
  assert not _compat.gpu_races_found()


IMPLEMENTATION = conformance.Implementation(
  "gpu",
  platform="gpu",
  context=interpreted,
  after=assert_no_races,
  tilings=(
    functools.partial(tiles, MOST_SPLITS=1),
    functools.partial(tiles, LEAST_SPLIT_ROWS=64, MOST_SPLITS=3),
  ),
  long=150,
)
