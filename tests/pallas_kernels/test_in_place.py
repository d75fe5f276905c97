"""A compiled step updates its pools in place: no copy, no temporary as large.

Only compiled, never run: the text and the memory analysis tell.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels import bits
from pallas_kernels import kv_update
from pallas_kernels import page_shape
from pallas_kernels import paged_attention

LAYERS, PAGES, KV_HEADS, GROUP, PAGE_SIZE, WIDTH = 3, 4000, 2, 2, 16, 40
# What makes a second array: a copy, or another dtype's worth of one.
COPY = re.compile(
  r"= \w+\[([\d,]*)\]\S* (?:copy|copy-start|convert|bitcast-convert)\("
)


def _struct(shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def _pools(head_dim, dtype):
  """K and V slabs of all layers, and their scales where quantised."""
  shape = page_shape.page_shape(
    KV_HEADS, PAGE_SIZE, head_dim, platform=jax.default_backend()
  )
  dtype = bits.storage_dtype(dtype, platform=jax.default_backend())
  pages = _struct((LAYERS * PAGES, *shape), dtype)
  pools = {"k_pages": pages, "v_pages": pages}
  if pages.dtype.itemsize == 1:
    scales = page_shape.scales_shape(KV_HEADS, PAGE_SIZE)
    scales = _struct((LAYERS * PAGES, *scales))
    pools |= {"k_scales": scales, "v_scales": scales}
  return pools


def _layer(x, pools, batch, layer):
  """Writes the rows of x as K and V, and attends with x as queries."""
  first = layer * PAGES
  rows = x[:, ::GROUP]
  slots = batch["slots"] + first * PAGE_SIZE
  successors = kv_update.write_kv(
    rows, rows, slots=slots, implementation="xla", **pools
  )
  names = ("k_pages", "v_pages", "k_scales", "v_scales")[: len(successors)]
  pools = dict(zip(names, successors, strict=True))
  out, _ = paged_attention.paged_attention(
    x,
    page_table=batch["page_table"] + first,
    context_lens=batch["context_lens"],
    query_starts=batch.get("query_starts"),
    implementation="xla",
    **pools,
  )
  return out, pools


def _unrolled(x, pools, batch):
  for layer in range(LAYERS):
    x, pools = _layer(x, pools, batch, jnp.int32(layer))
  return x, pools


def _scanned(x, pools, batch):
  def body(carry, layer):
    return _layer(*carry, batch, layer), None

  layers = jnp.arange(LAYERS, dtype=jnp.int32)
  (x, pools), _ = lax.scan(body, (x, pools), layers)
  return x, pools


def assert_in_place(compiled, pools):
  """No pool copied or converted, no temporary as large, outputs aliased."""
  pools = jax.tree.leaves(pools)
  smallest = min(math.prod(pool.shape) for pool in pools)
  for line in compiled.as_text().splitlines():
    for dims in COPY.findall(line):
      size = math.prod(int(n) for n in dims.split(",") if n)
      assert size < smallest, line
  memory = compiled.memory_analysis()
  num_bytes = [math.prod(p.shape) * p.dtype.itemsize for p in pools]
  assert memory.temp_size_in_bytes < min(num_bytes)
  assert memory.alias_size_in_bytes >= sum(num_bytes)


@pytest.mark.parametrize("step", [_unrolled, _scanned])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
  ("tokens", "dtype"),
  [
    (4, jnp.float32),
    (24, jnp.float32),
    (4, jnp.bfloat16),
    (24, jnp.int8),
    (4, jnp.float8_e4m3fn),
  ],
)
def test_a_step_holds_no_second_pool(step, head_dim, tokens, dtype):
  sequences = 4
  batch = {
    "slots": _struct((tokens,), jnp.int32),
    "page_table": _struct((sequences, WIDTH), jnp.int32),
    "context_lens": _struct((sequences,), jnp.int32),
  }
  if tokens > sequences:
    batch["query_starts"] = _struct((sequences + 1,), jnp.int32)
  x = _struct((tokens, KV_HEADS * GROUP, head_dim))
  pools = _pools(head_dim, dtype)
  compiled = jax.jit(step, donate_argnums=1).lower(x, pools, batch).compile()
  assert_in_place(compiled, pools)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_row_copies_hold_no_second_pool(head_dim, dtype):
  pages = _pools(head_dim, dtype)["k_pages"]
  copies = _struct((8,), jnp.int32)

  def run(pages, source, destination, counts):
    return kv_update.copy_rows(
      pages,
      source,
      destination,
      counts,
      head_dim=head_dim,
      implementation="xla",
    )

  lowered = jax.jit(run, donate_argnums=0).lower(pages, copies, copies, copies)
  assert_in_place(lowered.compile(), pages)


def test_the_check_sees_a_copied_pool():
  pools = _pools(64, jnp.float32)

  def sliced(pools):
    def body(carry, layer):
      return carry, {name: pool + layer for name, pool in pools.items()}

    layers = jnp.arange(LAYERS, dtype=jnp.float32)
    return lax.scan(body, None, layers)[1]

  compiled = jax.jit(sliced).lower(pools).compile()
  with pytest.raises(AssertionError):
    assert_in_place(compiled, pools)
