"""Bundles of TPU decode for each page and KV head, beside JAX's own kernel.

    python -m pallas_kernels.aot_slopes [--targets=v5e,7x]

A rolled loop counts once, so a kernel's bundles say little; what a page adds to
them says how long a page takes to issue:

    slope = (bundles at 16 pages a block - bundles at 8) / (8 * heads a copy)

A page of ours is one copy of all heads; JAX's kernel copies a head at a time.
Ours is compiled without bounds checks (`tpu_calls.COMPILER_PARAMS`), which is
part of its gain: the last column gives JAX's kernel the same.
"""

import argparse
import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax

from pallas_kernels import aot_cases
from pallas_kernels import aot_tpu
from pallas_kernels import dispatch
from pallas_kernels.paged_attention import operands as operands_lib
from pallas_kernels.paged_attention import shapes
from pallas_kernels.paged_attention import tpu_decode
from pallas_kernels.paged_attention import tpu_tiles

HEAD_DIMS = (64, 128, 256)
KV_HEADS = (1, 2, 4, 8)
GROUP = 4
PAGE_SIZE = 16
_PAGES = (8, 16)
# JAX's own kernel compiles for no narrower head.
_WIDTH_OF_JAX = 128


@dataclasses.dataclass(frozen=True)
class Slopes:
  """Bundles for each page and KV head.

  Attributes:
    target: one of `aot_tpu.TARGETS`.
    head_dim: elements of a head.
    kv_heads: KV heads.
    ours: of our kernel.
    jax: of JAX's own; None where it takes no such heads.
    jax_unchecked: of JAX's own without bounds checks.
  """

  target: str
  head_dim: int
  kv_heads: int
  ours: float
  jax: float | None
  jax_unchecked: float | None = None


def measure(target: str, head_dim: int, kv_heads: int) -> Slopes:
  """Compiles both kernels in bfloat16, as users call them.

  Args:
    target: one of `aot_tpu.TARGETS`.
    head_dim: of `HEAD_DIMS`.
    kv_heads: of `KV_HEADS`.
  """
  shape = _shape(head_dim, kv_heads)
  ours = _slope([_ours(shape, pages, target) for pages in _PAGES], kv_heads)
  if head_dim < _WIDTH_OF_JAX:
    return Slopes(target, head_dim, kv_heads, ours, None)
  theirs = _slope([_theirs(shape, pages, target) for pages in _PAGES], 1)
  return Slopes(target, head_dim, kv_heads, ours, theirs)


def measure_unchecked(slopes: Slopes) -> Slopes:
  """The same, with JAX's own kernel compiled without bounds checks too."""
  if slopes.jax is None:
    return slopes
  shape = _shape(slopes.head_dim, slopes.kv_heads)
  with _unchecked():
    theirs = [_theirs(shape, pages, slopes.target) for pages in _PAGES]
  return dataclasses.replace(slopes, jax_unchecked=_slope(theirs, 1))


def table(found: Sequence[Slopes]) -> str:
  """Slopes as aligned text, ratios beside them."""
  lines = [
    f"{'target':6} {'head_dim':>8} {'kv_heads':>8} {'ours':>6}"
    f" {'jax':>6} {'ratio':>6} {'unchecked':>9} {'ratio':>6}"
  ]
  lines += [
    f"{x.target:6} {x.head_dim:8} {x.kv_heads:8} {x.ours:6.2f}"
    f" {_text(x.jax):>6} {_ratio(x.jax, x.ours):>6}"
    f" {_text(x.jax_unchecked):>9} {_ratio(x.jax_unchecked, x.ours):>6}"
    for x in found
  ]
  return "\n".join(lines)


def _text(slope: float | None) -> str:
  return "-" if slope is None else f"{slope:.2f}"


def _ratio(theirs: float | None, ours: float) -> str:
  return "-" if theirs is None else f"{theirs / ours:.1f}"


def _shape(head_dim: int, kv_heads: int) -> shapes.AttentionShape:
  return shapes.in_a_real_pool(
    shapes.AttentionShape(
      name="slope",
      sequences=8,
      queries=1,
      q_heads=GROUP * kv_heads,
      kv_heads=kv_heads,
      head_dim=head_dim,
      page_size=PAGE_SIZE,
      context=1024,
    )
  )


def _slope(bundles: Sequence[int], heads: int) -> float:
  return (bundles[1] - bundles[0]) / ((_PAGES[1] - _PAGES[0]) * heads)


def _ours(shape: shapes.AttentionShape, pages: int, target: str) -> int:
  case = aot_cases.Case("paged_attention", "tpu", shape)
  call = aot_cases.call_of(case, "tpu")
  tiles = tpu_tiles.DecodeTiles(pages_per_block=pages)

  def run(operands: operands_lib.Operands) -> tuple[jax.Array, jax.Array]:
    return tpu_decode.decode(operands, call.options, tiles)

  with dispatch.tracing_for("tpu"):
    bundles = aot_tpu.compile_function(
      run, (call.operands,), (), target
    ).bundles
  assert bundles is not None
  return bundles


def _theirs(shape: shapes.AttentionShape, pages: int, target: str) -> int:
  run, operands = aot_tpu.decode_baseline(shape, pages)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    bundles = aot_tpu.compile_function(run, operands, (), target).bundles
  assert bundles is not None
  return bundles


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
  """JAX's own kernel is traced anew, for a compiler that checks no bounds."""
  from jax.experimental.pallas.ops.tpu.paged_attention import (
    paged_attention_kernel as kernel,
  )

  checked = kernel.pltpu.CompilerParams

  def unchecked(**params: Any) -> Any:
    return checked(**params, disable_bounds_checks=True)

  jax.clear_caches()
  with mock.patch.object(kernel.pltpu, "CompilerParams", unchecked):
    yield
  jax.clear_caches()


def main(arguments: Sequence[str] | None = None) -> int:
  """The command; returns 0."""
  parser = argparse.ArgumentParser(
    prog="python -m pallas_kernels.aot_slopes",
    description=__doc__.split("\n")[0],
  )
  parser.add_argument("--targets", default=",".join(aot_tpu.TARGETS))
  given = parser.parse_args(arguments)
  found = [
    measure_unchecked(measure(target, head_dim, kv_heads))
    for target in given.targets.split(",")
    for head_dim in HEAD_DIMS
    for kv_heads in KV_HEADS
  ]
  sys.stdout.write(f"{table(found)}\n")
  return 0


if __name__ == "__main__":
  sys.exit(main())
