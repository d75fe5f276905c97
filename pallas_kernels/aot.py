"""Compiles every op for TPUs and GPUs that are not there.

    python -m pallas_kernels.aot --out=FILE [--targets=v5e,h200] [--subset]

Lowering is not enough: a kernel can lower and interpret well, and still be
refused by the compiler, run out of on-chip memory, or spill.  This prints a
table and writes a list of `aot_cases.Row` as JSON.  TPU targets need libtpu,
GPU targets what `aot_gpu` says; without `--targets` it compiles for all that
this environment can.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

# Nothing here looks for a device.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from pallas_kernels import aot_cases
from pallas_kernels import aot_gpu
from pallas_kernels import aot_tpu

_COMPILERS = (aot_tpu, aot_gpu)
TARGETS = tuple(target for m in _COMPILERS for target in m.TARGETS)
# A run takes an hour: what a stopped one may lose of it.
_ROWS_AT_RISK = 20
_COLUMNS = (
  "op",
  "implementation",
  "target",
  "shape",
  "status",
  "registers",
  "spill_bytes",
  "vmem_bytes",
  "bundles",
)


def rows(targets: Sequence[str], *, subset: bool) -> Iterator[aot_cases.Row]:
  """Compiles for each target in turn.

  Args:
    targets: of `TARGETS`.
    subset: only what CI compiles.
  """
  for target, case in _work(targets, subset=subset):
    yield _compiler(target).compile_case(case, target)


def _work(
  targets: Sequence[str], *, subset: bool
) -> Iterator[tuple[str, aot_cases.Case]]:
  for target in targets:
    compiler = _compiler(target)
    for case in aot_cases.cases(compiler.PLATFORM, subset=subset):
      yield target, case
    for case in compiler.baselines(subset=subset):
      yield target, case


def _compiler(target: str) -> Any:
  return next(m for m in _COMPILERS if target in m.TARGETS)


def table(found: Sequence[aot_cases.Row]) -> str:
  """Rows as aligned text, then the reasons, each with how many it stopped."""
  lines: list[tuple[str, ...]] = [_COLUMNS]
  for row in found:
    values = [getattr(row, name) for name in _COLUMNS]
    lines.append(tuple("" if x is None else str(x) for x in values))
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  text = [
    "  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip()
    for line in lines
  ]
  reasons = collections.Counter(
    (row.status, row.implementation, row.reason)
    for row in found
    if row.reason is not None
  )
  for (status, implementation, reason), count in reasons.most_common():
    text.append(f"{count:4d} x {implementation} {status}: {reason}")
  return "\n".join(text)


def summary(found: Sequence[aot_cases.Row]) -> str:
  """How each target fared, one line an implementation."""
  counts = collections.Counter(
    (row.target, row.implementation, row.status) for row in found
  )
  lines = [
    f"{target} {implementation}: {count} {status}"
    for (target, implementation, status), count in sorted(counts.items())
  ]
  return "\n".join(lines)


def broken(found: Sequence[aot_cases.Row]) -> list[aot_cases.Row]:
  """Rows of ours that neither compiled nor were refused beforehand."""
  return [
    row
    for row in found
    if row.status == aot_cases.FAILED and row.implementation != "jax"
  ]


def main(arguments: Sequence[str] | None = None) -> int:
  """The command; returns how many cases of ours failed, at most 1."""
  parser = argparse.ArgumentParser(
    prog="python -m pallas_kernels.aot", description=__doc__.split("\n")[0]
  )
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--targets", help=f"some of {','.join(TARGETS)}")
  parser.add_argument("--subset", action="store_true")
  given = parser.parse_args(arguments)
  targets = given.targets.split(",") if given.targets else _available()
  for target in targets:
    if target not in TARGETS:
      parser.error(f"{target!r} is not one of {', '.join(TARGETS)}")
    absent = _compiler(target).missing()
    if absent is not None:
      parser.error(f"cannot compile for {target}: {absent}")
  found = _compile_all(targets, given.out, subset=given.subset)
  sys.stdout.write(f"{table(found)}\n\n{summary(found)}\n")
  return min(1, len(broken(found)))


def _compile_all(
  targets: Sequence[str], out: pathlib.Path, *, subset: bool
) -> list[aot_cases.Row]:
  """Compiles, says how far it is, and writes what there is now and then."""
  total = sum(1 for _ in _work(targets, subset=subset))
  found: list[aot_cases.Row] = []
  try:
    for row in rows(targets, subset=subset):
      found.append(row)
      sys.stderr.write(
        f"{len(found)}/{total} {row.target} {row.implementation} {row.op}"
        f" {row.shape}: {row.status}\n"
      )
      if len(found) % _ROWS_AT_RISK == 0:
        _write(out, found)
  finally:
    _write(out, found)
  return found


def _write(out: pathlib.Path, found: Sequence[aot_cases.Row]) -> None:
  text = json.dumps([dataclasses.asdict(row) for row in found], indent=1)
  out.write_text(text + "\n")


def _available() -> list[str]:
  return [t for t in TARGETS if _compiler(t).missing() is None]


if __name__ == "__main__":
  sys.exit(main())
