"""How a test calls an implementation: jitted, for its platform, checked."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels import errors
from pallas_kernels import kv_update
from pallas_kernels import merge_states
from pallas_kernels import paged_attention
from tests.pallas_kernels import batches
from tests.pallas_kernels import oracle

State = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Implementation:
  """One implementation under test.

  Attributes:
    name: as `dispatch.IMPLEMENTATIONS` has it.
    platform: whose page layout it reads, and for which it is traced.
    context: entered around every call: an interpreter, say.
    tilings: each entered around a call that must give the same answer with
      other tiles; none where the implementation has no choice.
    after: called after each call, to look for races it left behind.
    long: rows of a sequence that takes several blocks.
    jit: whether calls are jitted.
  """

  name: str
  platform: str = "cpu"
  context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
  tilings: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()
  after: Callable[[], None] = lambda: None
  long: int = 1100
  jit: bool = True

  def call(
    self,
    op: Callable[..., Any],
    arrays: dict[str, Any],
    *,
    fresh: bool = False,
    **static: Any,
  ) -> Any:
    """Runs an op on this implementation; skips what it refuses.

    Args:
      op: the public op.
      arrays: its arrays by name; None is passed on as absent.
      fresh: trace again even if these shapes were traced before.
      **static: its other arguments.
    """
    given = {name: x for name, x in arrays.items() if x is not None}
    run = _jitted(self, op, tuple(sorted(static.items())))
    if fresh or not self.jit:
      run = _call(self, op, static)
      run = jax.jit(run) if self.jit else run
    with dispatch.tracing_for(self.platform), self.context():
      try:
        result = jax.block_until_ready(run(given))
      except errors.KernelUnsupported as refusal:
        pytest.skip(str(refusal))
    self.after()
    return result

  def attend(self, arrays: dict[str, Any], **options: Any) -> State:
    """`paged_attention`, as float32 NumPy arrays."""
    out, lse = self.call(paged_attention.paged_attention, arrays, **options)
    assert out.dtype == arrays["q"].dtype
    assert lse.dtype == np.float32
    return np.asarray(out, np.float32), np.asarray(lse)

  def merge(self, outs: np.ndarray, lses: np.ndarray) -> State:
    """`merge_states`, as NumPy arrays."""
    out, lse = self.call(
      merge_states.merge_states, {"outs": outs, "lses": lses}
    )
    return np.asarray(out), np.asarray(lse)

  def write(self, arrays: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """`write_kv`, as NumPy arrays."""
    return tuple(map(np.asarray, self.call(kv_update.write_kv, arrays)))

  def copy(self, arrays: dict[str, Any], head_dim: int) -> np.ndarray:
    """`copy_rows`, as a NumPy array."""
    return np.asarray(self.call(kv_update.copy_rows, arrays, head_dim=head_dim))


def _call(
  implementation: Implementation, op: Callable[..., Any], static: dict
) -> Callable[[dict[str, Any]], Any]:
  return lambda arrays: op(
    **arrays, **static, implementation=implementation.name
  )


@functools.cache
def _jitted(
  implementation: Implementation, op: Callable[..., Any], static: tuple
) -> Callable[[dict[str, Any]], Any]:
  return jax.jit(_call(implementation, op, dict(static)))


def check(
  implementation: Implementation,
  batch: batches.Batch,
  *,
  paging: dict[str, Any] | None = None,
  sinks: np.ndarray | None = None,
  window: int | None = None,
  **options: Any,
) -> State:
  """Runs a batch and holds it to the oracle within the dtype's tolerance.

  The window is traced, so that several share a compiled function.
  """
  arrays = batches.paged(batch, implementation.platform, **(paging or {}))
  arrays["sinks"] = sinks
  arrays["window"] = None if window is None else np.int32(window)
  out, lse = implementation.attend(arrays, **options)
  want = oracle.attention(batch, sinks=sinks, window=window, **options)
  error = oracle.relative_error(out, lse, want)
  assert error <= oracle.TOLERANCE[batch.dtype], f"{error=}"
  return out, lse


def assert_same_bits(got: State, want: State) -> None:
  """Both the outputs and the LSEs, bit for bit."""
  np.testing.assert_array_equal(got[0], want[0])
  np.testing.assert_array_equal(got[1], want[1])


def assert_close(got: State, want: State, tolerance: float = 2e-6) -> None:
  """Equal but for the order of float32 sums."""
  np.testing.assert_allclose(got[0], want[0], atol=tolerance)
  np.testing.assert_allclose(got[1], want[1], rtol=tolerance, atol=tolerance)
