"""The GPU kernels assemble for Hopper, on a machine without a GPU."""

import pytest

from pallas_kernels import aot_cases
from pallas_kernels import aot_gpu

pytestmark = [
  pytest.mark.aot,
  pytest.mark.skipif(
    aot_gpu.missing() is not None, reason=str(aot_gpu.missing())
  ),
]
CASES = [*aot_cases.cases("gpu", subset=True)]
# ptxas keeps a few of 255 registers in memory where a head of 256 is widened
# from one byte: 128 of them hold the output alone.
MOST_SPILLED = 128


def _id(case):
  return f"{case.op}-{case.shape.name}"


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_the_subset_compiles_or_is_refused_beforehand(case):
  row = aot_gpu.compile_case(case, "h200")
  assert row.reason == aot_cases.why_unsupported(case, "gpu")
  if row.reason is not None:
    assert row.status == aot_cases.UNSUPPORTED
    return
  assert row.status == aot_cases.COMPILED
  assert 0 < row.registers <= 255
  assert 0 < row.vmem_bytes <= 232_448
  wide = case.shape.head_dim == 256 and case.shape.kv_dtype != "bfloat16"
  assert row.spill_bytes <= (MOST_SPILLED if wide else 0)


def test_what_ptxas_said_holds_for_the_other_target():
  case = next(c for c in CASES if c.shape.name == "decode_d128_window")
  rows = [aot_gpu.compile_case(case, target) for target in ("h200", "h100")]
  assert rows[0].registers == rows[1].registers


def test_jax_own_kernel_compiles_beside_ours():
  case = next(
    case
    for case in aot_gpu.baselines(subset=True)
    if case.shape.name == "decode_d128_g4_p16_bfloat16_bfloat16"
  )
  row = aot_gpu.compile_case(case, "h200")
  assert (row.status, row.reason) == (aot_cases.COMPILED, None)
