"""The TPU interpreter as tests use it: races and leftovers are failures."""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _compat
from pallas_kernels.paged_attention import tpu_tiles
from tests.pallas_kernels import conformance

# A copy may run when it is issued, or as late as its wait: a kernel that never
# waits is right under one of them.
MODES = ("eager", "on_wait")


# Interpreted programs are as long as their blocks have pages: two of them, so
# that sequences of a few pages have several blocks.
SMALL = {"FEWEST_ROWS": 16, "MOST_ROWS": 16, "QUERY_ROWS": 16}


@contextlib.contextmanager
def interpreted(mode: str) -> Iterator[None]:
  """Calls of TPU kernels inside are interpreted, with race detection."""
  pltpu.reset_tpu_interpret_mode_state()
  params = pltpu.InterpretParams(
    detect_races=True, vector_clock_size=64, dma_execution_mode=mode
  )
  with pltpu.force_tpu_interpret_mode(params), compiled_quickly():
    yield


@contextlib.contextmanager
def compiled_quickly() -> Iterator[None]:
  """An interpreted program runs once: optimising it takes longest."""
  jax.config.update("jax_disable_most_optimizations", True)
  try:
    yield
  finally:
    jax.config.update("jax_disable_most_optimizations", False)


@contextlib.contextmanager
def tiles(**limits: int) -> Iterator[None]:
  """Other tiles than the heuristic's, by its limits."""
  with contextlib.ExitStack() as stack:
    for name, value in limits.items():
      stack.enter_context(mock.patch.object(tpu_tiles, name, value))
    yield


def assert_no_races() -> None:
  """0.10 only prints a race; 0.12 has raised by now."""
  assert not _compat.tpu_races_found()


@contextlib.contextmanager
def small(mode: str) -> Iterator[None]:
  """As `interpreted`, in small tiles."""
  with interpreted(mode), tiles(**SMALL):
    yield


def implementation(mode: str) -> conformance.Implementation:
  """The TPU kernels, interpreted."""
  return conformance.Implementation(
    "tpu",
    platform="tpu",
    context=functools.partial(small, mode),
    after=assert_no_races,
    tilings=(
      functools.partial(tiles, FEWEST_ROWS=16, MOST_ROWS=16, QUERY_ROWS=16),
      functools.partial(tiles, FEWEST_ROWS=64, MOST_ROWS=64, QUERY_ROWS=64),
    ),
    long=100,
  )
