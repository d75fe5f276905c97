"""Kernels compiled for TPUs that are not here: what the compiler makes of them.

Needs libtpu; the skip says so.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels import aot_cases
from pallas_kernels import aot_tpu
from pallas_kernels import dispatch
from pallas_kernels import kv_update
from pallas_kernels import page_shape
from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import shapes
from tests.pallas_kernels import tpu_interpreter

pytestmark = [
  pytest.mark.aot,
  pytest.mark.skipif(
    aot_tpu.missing() is not None, reason=str(aot_tpu.missing())
  ),
  # The compiler's, and of JAX's own kernels.
  pytest.mark.filterwarnings("ignore"),
]

CASES = tuple(aot_cases.cases("tpu", subset=True))
LAYERS, PAGES, KV_HEADS, GROUP, PAGE_SIZE, WIDTH = 3, 500, 4, 4, 16, 32


@pytest.mark.parametrize("target", aot_tpu.TARGETS)
def test_what_is_accepted_compiles(target):
  # Every case for one target, every target for a share of them.
  share = CASES[aot_tpu.TARGETS.index(target) :: len(aot_tpu.TARGETS)]
  rows = [aot_tpu.compile_case(case, target) for case in share]
  assert [row for row in rows if row.status != aot_cases.COMPILED] == []
  assert all(row.vmem_bytes is not None for row in rows)


def _bundles(implementation, pages_per_block):
  """Bundles of decode with a number of pages to a block."""
  shape = shapes.AttentionShape(
    name="slope",
    sequences=8,
    queries=1,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    page_size=PAGE_SIZE,
    context=1024,
  )
  rows = pages_per_block * PAGE_SIZE
  with tpu_interpreter.tiles(FEWEST_ROWS=rows, MOST_ROWS=rows):
    if implementation == "tpu":
      case = aot_cases.Case("paged_attention", "tpu", shape)
      return aot_tpu.compile_case(case, "v5e").bundles
    run, operands = aot_tpu.decode_baseline(shape, pages_per_block)
    return aot_tpu.compile_function(run, operands, (), "v5e").bundles


def test_decode_takes_a_quarter_of_the_bundles_of_jax_s_own_kernel():
  # By slope, as a rolled loop counts once; JAX's copies one head at a time.
  ours = (_bundles("tpu", 16) - _bundles("tpu", 8)) / (8 * 8)
  theirs = (_bundles("jax", 16) - _bundles("jax", 8)) / 8
  assert 0 < ours <= theirs / 4


def _layer(x, pools, batch, layer):
  """Writes the rows of x as K and V, and attends with x as queries."""
  first = layer * PAGES
  rows = x[:, ::GROUP]
  pools = kv_update.write_kv(
    rows, rows, *pools, batch["slots"] + first * PAGE_SIZE, implementation="tpu"
  )
  out, _ = paged_attention.paged_attention(
    x,
    *pools,
    batch["page_table"] + first,
    batch["context_lens"],
    batch.get("query_starts"),
    implementation="tpu",
  )
  return out, pools


def _unrolled(pools, x, batch):
  for layer in range(LAYERS):
    x, pools = _layer(x, pools, batch, jnp.int32(layer))
  return x, pools


def _scanned(pools, x, batch):
  def body(carry, layer):
    return _layer(*carry, batch, layer), None

  layers = jnp.arange(LAYERS, dtype=jnp.int32)
  (x, pools), _ = lax.scan(body, (x, pools), layers)
  return x, pools


def _assert_in_place(compiled, pool, num_pools):
  size = math.prod(pool.shape)
  for line in compiled.text.splitlines():
    for dims in re.findall(
      r"= \(?\w+\[([\d,]*)\]\S* (?:copy|copy-start|transpose|convert)\(", line
    ):
      assert math.prod(int(n) for n in dims.split(",") if n) < size, line[:300]
  assert compiled.temporary_bytes < size * pool.dtype.itemsize
  assert (
    compiled.text.count("may-alias") + compiled.text.count("must-alias")
    >= num_pools
  )


@pytest.mark.parametrize("step", [_unrolled, _scanned])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("sequences", [8, 3], ids=["decode", "ragged"])
def test_a_step_holds_no_second_pool(step, head_dim, sequences):
  struct = jax.ShapeDtypeStruct
  tokens = 8
  shape = page_shape.page_shape(KV_HEADS, PAGE_SIZE, head_dim, platform="tpu")
  pool = struct((LAYERS * PAGES, *shape), jnp.bfloat16)
  batch = {
    "slots": struct((tokens,), jnp.int32),
    "page_table": struct((sequences, WIDTH), jnp.int32),
    "context_lens": struct((sequences,), jnp.int32),
  }
  if sequences != tokens:
    batch["query_starts"] = struct((sequences + 1,), jnp.int32)
  x = struct((tokens, KV_HEADS * GROUP, head_dim), jnp.bfloat16)
  with dispatch.tracing_for("tpu"):
    compiled = aot_tpu.compile_function(
      step, ((pool, pool), x, batch), (0,), "v5e"
    )
  _assert_in_place(compiled, pool, 2)


def test_row_copies_hold_no_second_pool():
  shape = page_shape.page_shape(KV_HEADS, PAGE_SIZE, 64, platform="tpu")
  pool = jax.ShapeDtypeStruct((PAGES, *shape), jnp.bfloat16)
  ids = jax.ShapeDtypeStruct((4,), jnp.int32)
  with dispatch.tracing_for("tpu"):
    compiled = aot_tpu.compile_function(
      lambda pages, ids: kv_update.copy_rows(
        pages, ids, ids, ids, head_dim=64, implementation="tpu"
      ),
      (pool, ids),
      (0,),
      "v5e",
    )
  _assert_in_place(compiled, pool, 1)


def test_the_check_sees_a_copied_pool():
  # Heads of 64 that do not share lane rows: XLA turns the pages axis.
  pool = jax.ShapeDtypeStruct((PAGES, KV_HEADS, PAGE_SIZE, 64), jnp.bfloat16)
  compiled = aot_tpu.compile_function(
    lambda pages: pages.swapaxes(1, 2).reshape(pages.shape) + pages,
    (pool,),
    (0,),
    "v5e",
  )
  with pytest.raises(AssertionError):
    _assert_in_place(compiled, pool, 1)
