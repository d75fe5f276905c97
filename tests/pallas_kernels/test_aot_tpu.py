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
from pallas_kernels import aot_slopes
from pallas_kernels import aot_tpu
from pallas_kernels import dispatch
from pallas_kernels import kv_update
from pallas_kernels import page_shape
from pallas_kernels import paged_attention

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


# JAX's own kernel takes no heads of 64. The fewest and the most KV heads are the
# ends between which the others lie.
CELLS = [
  pytest.param(
    target,
    head_dim,
    kv_heads,
    marks=[] if kv_heads in (1, 8) else pytest.mark.slow,
  )
  for target in aot_tpu.TARGETS
  for head_dim in (128, 256)
  for kv_heads in aot_slopes.KV_HEADS
]


@pytest.mark.parametrize(("target", "head_dim", "kv_heads"), CELLS)
def test_decode_takes_a_quarter_of_the_bundles_of_jax_s_own_kernel(
  target, head_dim, kv_heads
):
  slopes = aot_slopes.measure(target, head_dim, kv_heads)
  assert 0 < slopes.ours <= slopes.jax / 4, aot_slopes.table([slopes])


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
