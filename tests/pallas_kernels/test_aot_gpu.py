"""The GPU kernels assemble for Hopper, on a machine without a GPU."""

import re

import jax
import pytest

from pallas_kernels import aot_cases
from pallas_kernels import aot_gpu
from pallas_kernels import dispatch
from pallas_kernels import kv_update
from pallas_kernels import paged_attention

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
WRITTEN = ("k_pages", "v_pages", "k_scales", "v_scales")


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


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_a_step_copies_no_pool(kv_dtype):
  """Writes rows, then attends, with the pages donated: in place, no copies."""
  name = f"decode_d128_g4_p16_bfloat16_{kv_dtype}"
  shape = next(c.shape for c in CASES if c.shape.name == name)
  attention = aot_cases.Case("paged_attention", "gpu", shape)
  x = aot_cases.call_of(attention, "gpu").operands
  pools = {"k_pages": x.k_pages, "v_pages": x.v_pages}
  if x.k_scales is not None:
    pools |= {"k_scales": x.k_scales, "v_scales": x.v_scales}
  rows = jax.ShapeDtypeStruct(
    (shape.sequences, shape.kv_heads, shape.head_dim), x.q.dtype
  )

  def step(pools, q, k, v, slots, table, lengths):
    written = kv_update.write_kv(k, v, slots=slots, **pools)
    pools = dict(zip(WRITTEN, written, strict=False))
    out, _ = paged_attention.paged_attention(
      q, page_table=table, context_lens=lengths, **pools
    )
    return out, pools

  lengths = x.context_lens
  arguments = (pools, x.q, rows, rows, lengths, x.page_table, lengths)
  with dispatch.tracing_for("gpu"), aot_gpu.uncached():
    compiled = aot_gpu.lower(step, arguments, "h200", donated=(0,)).compile()
  pool_bytes = x.k_pages.size * x.k_pages.dtype.itemsize
  assert compiled.memory_analysis().temp_size_in_bytes < pool_bytes / 4
  dims = ",".join(map(str, x.k_pages.shape))
  assert not re.search(rf"\[{dims}\]\S* copy\(", compiled.as_text())
