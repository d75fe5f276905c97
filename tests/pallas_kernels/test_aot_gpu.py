"""The GPU kernels assemble for Hopper, on a machine without a GPU."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

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


LAYERS = 3


def _layer(carry, pools, batch, layer):
  """Writes rows, then attends, in one layer's share of the pools."""
  page_size = pools["k_pages"].shape[2]
  first = layer * (pools["k_pages"].shape[0] // LAYERS)
  rows = carry[:, : pools["k_pages"].shape[1]]
  slots = batch["slots"] + first * page_size
  written = kv_update.write_kv(
    rows, rows, slots=slots, implementation="gpu", **pools
  )
  pools = dict(zip(WRITTEN, written, strict=False))
  out, _ = paged_attention.paged_attention(
    carry,
    page_table=batch["page_table"] + first,
    context_lens=batch["slots"],
    implementation="gpu",
    **pools,
  )
  return out, pools


def _unrolled(pools, q, batch):
  for layer in range(LAYERS):
    q, pools = _layer(q, pools, batch, jnp.int32(layer))
  return q, pools


def _scanned(pools, q, batch):
  def body(carry, layer):
    return _layer(*carry, batch, layer), None

  layers = jnp.arange(LAYERS, dtype=jnp.int32)
  (q, pools), _ = lax.scan(body, (q, pools), layers)
  return q, pools


def _assert_in_place(compiled, pages):
  pool_bytes = pages.size * pages.dtype.itemsize
  assert compiled.memory_analysis().temp_size_in_bytes < pool_bytes / 4
  dims = ",".join(map(str, pages.shape))
  assert not re.search(rf"\[{dims}\]\S* copy\(", compiled.as_text())


def _compiled(step, arguments):
  with dispatch.tracing_for("gpu"), aot_gpu.uncached():
    return aot_gpu.lower(step, arguments, "h200", donated=(0,)).compile()


@pytest.mark.parametrize("step", [_unrolled, _scanned])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_a_step_copies_no_pool(step, kv_dtype):
  """With the pages donated: in place, whatever walks the layers."""
  name = f"decode_d128_g4_p16_bfloat16_{kv_dtype}"
  shape = next(c.shape for c in CASES if c.shape.name == name)
  attention = aot_cases.Case("paged_attention", "gpu", shape)
  x = aot_cases.call_of(attention, "gpu").operands

  def layers_of(pages):
    return jax.ShapeDtypeStruct(
      (LAYERS * pages.shape[0], *pages.shape[1:]), pages.dtype
    )

  names = WRITTEN if x.k_scales is not None else WRITTEN[:2]
  pools = {name: layers_of(getattr(x, name)) for name in names}
  batch = {"slots": x.context_lens, "page_table": x.page_table}
  _assert_in_place(_compiled(step, (pools, x.q, batch)), pools["k_pages"])


def test_row_copies_copy_no_pool():
  case = next(c for c in CASES if c.op == "copy_rows")
  x = aot_cases.call_of(case, "gpu").operands

  def step(pages, ids):
    return kv_update.copy_rows(
      pages,
      ids,
      ids,
      ids,
      head_dim=case.shape.head_dim,
      implementation="gpu",
    )

  _assert_in_place(_compiled(step, (x.pages, x.row_counts)), x.pages)
