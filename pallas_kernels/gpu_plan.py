"""What `gpu_check` checks and times, in full and dry."""

import dataclasses
from typing import Any

from pallas_kernels import gpu_problems

Problem = gpu_problems.Problem
# Heads of a model of some eight billion weights.
LARGE: dict[str, Any] = {"q_heads": 32, "kv_heads": 8}


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is checked and timed.

  Attributes:
    implementation: of `paged_attention`: what is judged.
    checks: problems whose answers are compared.
    decode: problems that are timed.
    prefill: the same, ragged.
    prefixes: (sequences, shared rows, own rows) of shared-prefix decodes.
    rounds: how often each function is timed, in turn.
    steps: calls of one timing, one enqueued behind the other.
    budget_seconds: no section begins after this.
  """

  implementation: str
  checks: tuple[Problem, ...]
  decode: tuple[Problem, ...]
  prefill: tuple[Problem, ...]
  prefixes: tuple[tuple[int, int, int], ...]
  rounds: int = 7
  steps: int = 20
  budget_seconds: float = 270.0


def _checks() -> tuple[Problem, ...]:
  lengths = (0, 1, 15, 16, 17, 333, 1100)
  counts = (0, 1, 15, 1, 7, 200, 1)
  made = []
  for head_dim in (64, 128, 256):
    for kv_dtype in ("bfloat16", "int8", "float8_e4m3fn"):
      for phase, ragged in (("decode", None), ("ragged", counts)):
        made.append(
          Problem(
            f"{phase} d{head_dim} {kv_dtype}",
            lengths,
            ragged,
            head_dim=head_dim,
            kv_dtype=kv_dtype,
          )
        )
  plain = Problem("", lengths)
  changes: tuple[dict[str, Any], ...] = (
    {"page_size": 8},
    {"page_size": 64},
    {"page_size": 128},
    {"q_heads": 2},
    {"q_heads": 6},
    {"q_heads": 16},
    {"window": 100},
    {"soft_cap": 20.0},
  )
  for change in changes:
    name = " ".join(f"{key} {value}" for key, value in change.items())
    for phase, ragged in (("decode", None), ("ragged", counts)):
      made.append(
        dataclasses.replace(
          plain, name=f"{phase} {name}", counts=ragged, **change
        )
      )
  return tuple(made)


FULL = Plan(
  implementation="gpu",
  checks=_checks(),
  decode=(
    Problem("decode b64 4k", (4096,) * 64, **LARGE),
    Problem("decode b64 4k p128", (4096,) * 64, page_size=128, **LARGE),
    Problem("decode b64 4k int8", (4096,) * 64, kv_dtype="int8", **LARGE),
    Problem("decode b8 4k", (4096,) * 8, **LARGE),
    Problem("decode b1 32k", (32768,), **LARGE),
    Problem("decode b8 4k d64", (4096,) * 8, head_dim=64, **LARGE),
  ),
  prefill=(
    Problem("prefill 2k", (2048,), (2048,), **LARGE),
    Problem("prefill 512 behind 3.5k", (4096,), (512,), **LARGE),
    Problem(
      "prefill 512 and 32 decodes",
      (4096,) * 33,
      (512,) + (1,) * 32,
      **LARGE,
    ),
  ),
  prefixes=tuple(
    (sequences, shared, 128)
    for sequences in (4, 16, 64)
    for shared in (256, 1024, 4096)
  ),
)
DRY = Plan(
  implementation="xla",
  checks=(
    Problem("decode", (0, 1, 17), head_dim=64),
    Problem("ragged int8", (5, 17), (3, 2), head_dim=64, kv_dtype="int8"),
  ),
  decode=(Problem("decode b2 32", (32, 32), head_dim=64),),
  prefill=(Problem("prefill 8 behind 24", (32,), (8,), head_dim=64),),
  prefixes=((2, 32, 16),),
  rounds=1,
  steps=1,
)
