"""What the public ops refuse, whom they select, and what they check."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import checks
from pallas_kernels import dispatch
from pallas_kernels import errors
from pallas_kernels import kv_update
from pallas_kernels import merge_states
from pallas_kernels import page_shape
from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import api
from tests.pallas_kernels import batches


def _struct(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def _ints(*shape):
  return _struct(*shape, dtype=jnp.int32)


def _attention(**changes):
  arguments = {
    "q": _struct(3, 4, 64),
    "k_pages": _struct(9, 2, 16, 64),
    "v_pages": _struct(9, 2, 16, 64),
    "page_table": _ints(3, 5),
    "context_lens": _ints(3),
  }
  arguments |= changes
  static = {
    name: arguments.pop(name)
    for name in ("soft_cap", "scale", "window", "v_head_dim", "implementation")
    if name in arguments
  }
  return jax.eval_shape(
    lambda arrays: paged_attention.paged_attention(**arrays, **static),
    arguments,
  )


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    (
      {"q": _struct(3, 4)},
      r"q has shape \(3, 4\), expected \[tokens, q_heads, head_dim\]",
    ),
    ({"q": _struct(3, 5, 64)}, r"5 heads to be a multiple of the pages' 2 KV"),
    (
      {"q": _struct(4, 4, 64)},
      r"q has shape \(4, 4, 64\), expected one row for each of the 3 seq",
    ),
    (
      {"q": _struct(3, 4, 64, dtype=jnp.int32)},
      "q has dtype int32, expected one of float32, bfloat16, float16",
    ),
    (
      {"k_pages": _struct(9, 2, 64)},
      r"k_pages has shape \(9, 2, 64\), expected \[num_pages, kv_heads",
    ),
    ({"k_pages": _struct(9, 2, 16, 96)}, "last axis is 96; expected head_dim="),
    ({"v_pages": _struct(9, 2, 8, 64)}, "expected equal kv_heads and page_siz"),
    (
      {"v_pages": _struct(9, 2, 16, 64, dtype=jnp.bfloat16)},
      "k_pages has dtype float32 and v_pages bfloat16, expected the same",
    ),
    (
      {
        "k_pages": _struct(9, 2, 16, 64, dtype=jnp.int32),
        "v_pages": _struct(9, 2, 16, 64, dtype=jnp.int32),
      },
      "k_pages has dtype int32, expected one of",
    ),
    (
      {"page_table": _ints(15)},
      r"page_table has shape \(15,\), expected \[sequences, width\]",
    ),
    (
      {"page_table": _struct(3, 5)},
      "page_table has dtype float32, expected int32",
    ),
    (
      {"context_lens": _ints(4)},
      r"context_lens has shape \(4,\), expected \[sequences\] = \[3\]",
    ),
    (
      {"query_starts": _ints(3)},
      r"query_starts has shape \(3,\), expected \[sequences \+ 1\] = \[4\]",
    ),
    ({"query_positions": _ints(4)}, r"query_positions has shape \(4,\)"),
    ({"key_starts": _ints(4)}, r"key_starts has shape \(4,\)"),
    ({"v_page_table": _ints(3, 6)}, r"v_page_table has shape \(3, 6\)"),
    ({"sinks": _struct(3)}, r"sinks has shape \(3,\), expected \[q_heads\]"),
    ({"soft_cap": 0.0}, "soft_cap=0.0, expected above 0 or None"),
    ({"window": 0}, "window=0, expected at least 1"),
    ({"k_scales": _struct(9, 1, 128)}, "k_scales is given, expected scales"),
    (
      {
        "k_pages": _struct(9, 2, 16, 64, dtype=jnp.int8),
        "v_pages": _struct(9, 2, 16, 64, dtype=jnp.int8),
      },
      "k_scales is missing, expected scales exactly where pages are int8",
    ),
    ({"implementation": "cuda"}, "implementation='cuda', expected one of tpu"),
  ],
)
def test_attention_names_what_does_not_fit(changes, text):
  with pytest.raises(errors.KernelArgumentError, match=text):
    _attention(**changes)


def _write(**changes):
  arguments = {
    "k": _struct(3, 2, 64),
    "v": _struct(3, 2, 64),
    "k_pages": _struct(9, 2, 16, 64),
    "v_pages": _struct(9, 2, 16, 64),
    "slots": _ints(3),
  }
  return jax.eval_shape(
    lambda arrays: kv_update.write_kv(**arrays), arguments | changes
  )


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"k": _struct(3, 2)}, r"k has shape \(3, 2\)"),
    ({"v": _struct(4, 2, 64)}, r"v has shape \(4, 2, 64\), expected"),
    ({"slots": _ints(4)}, r"slots has shape \(4,\), expected \[tokens\]"),
    ({"slots": _struct(3)}, "slots has dtype float32, expected int32"),
    ({"k_pages": _struct(9, 3, 16, 64)}, "expected the 2 KV heads of k"),
    ({"v_pages": _struct(9, 2, 8, 64)}, "expected equal page sizes"),
    (
      {
        "k_pages": _struct(9, 2, 16, 64, dtype=jnp.int8),
        "v_pages": _struct(9, 2, 16, 64, dtype=jnp.int8),
      },
      "k_scales is missing, expected scales",
    ),
    (
      {"k_pages": _struct(9, 2, 16, 64, dtype=jnp.int8)},
      "k_pages has dtype int8 and v_pages float32, expected the same",
    ),
    (
      {
        "k_pages": _struct(9, 2, 16, 64, dtype=jnp.int16),
        "v_pages": _struct(9, 2, 16, 64, dtype=jnp.int16),
      },
      "k_pages has dtype int16, expected one of float32",
    ),
    (
      {
        "k_pages": _struct(9, 2, 16, 64, dtype=jnp.int8),
        "v_pages": _struct(9, 2, 16, 64, dtype=jnp.int8),
        "k_scales": _struct(9, 1, 128, dtype=jnp.bfloat16),
        "v_scales": _struct(9, 1, 128, dtype=jnp.bfloat16),
      },
      "k_scales has dtype bfloat16, expected float32",
    ),
    ({"v_pages": _struct(8, 2, 16, 64)}, "9 pages and v_pages 8, expected the"),
    ({"k_pages": _struct(9, 2, 0, 64)}, "each 1 or more"),
  ],
)
def test_writes_name_what_does_not_fit(changes, text):
  with pytest.raises(errors.KernelArgumentError, match=text):
    _write(**changes)


def test_what_is_no_array_is_named():
  array = np.zeros((1, 2, 16), np.float32)
  pages = np.zeros((2, 2, 4, 16), np.float32)
  ids = np.zeros(1, np.int32)
  with pytest.raises(errors.KernelArgumentError, match="context_lens is of ty"):
    paged_attention.paged_attention(array, pages, pages, ids[None], [3])
  with pytest.raises(errors.KernelArgumentError, match="q is of type NoneType"):
    paged_attention.paged_attention(None, pages, pages, ids[None], ids)
  with pytest.raises(errors.KernelArgumentError, match="slots is of type list"):
    kv_update.write_kv(array, array, pages, pages, [4])
  with pytest.raises(errors.KernelArgumentError, match="pages is of type list"):
    kv_update.copy_rows(pages.tolist(), ids, ids, ids, head_dim=16)
  with pytest.raises(errors.KernelArgumentError, match="lses is of type list"):
    merge_states.merge_states(array[None], [0.0])


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"soft_cap": float("inf")}, "soft_cap=inf, expected a number within"),
    ({"soft_cap": 1e39}, r"soft_cap=1e\+39, expected a number within float32"),
    ({"soft_cap": "30"}, "soft_cap='30', expected a number"),
    ({"scale": float("nan")}, "scale=nan, expected a number within float32"),
    ({"window": 1.5}, "window=1.5, expected an integer, an int32 array"),
    ({"window": jnp.float32(2)}, "window has dtype float32, expected int32"),
    ({"window": np.array(2**40)}, "window has dtype int64, expected int32"),
    ({"v_head_dim": 0}, "v_pages has shape"),
    ({"v_head_dim": 64.0}, "v_pages of head_dim=64.0, expected an integer"),
    ({"v_pages": _struct(8, 2, 16, 64)}, "9 pages and v_pages 8, expected the"),
    (
      {"page_table": _ints(3, 0)},
      r"page_table has shape \(3, 0\), .*1 or more",
    ),
    ({"q": _struct(0, 4, 64)}, r"q has shape \(0, 4, 64\), .* 1 or more"),
  ],
)
def test_attention_names_values_that_cannot_be(changes, text):
  with pytest.raises(errors.KernelArgumentError, match=text):
    _attention(**changes)


def test_writing_or_copying_nothing_changes_nothing():
  pages = jnp.ones((2, 2, 4, 16))
  rows, slots = jnp.ones((0, 2, 16)), jnp.zeros(0, jnp.int32)
  k_pages, v_pages = kv_update.write_kv(rows, rows, pages, 2 * pages, slots)
  np.testing.assert_array_equal(k_pages, pages)
  np.testing.assert_array_equal(v_pages, 2 * pages)
  none = jnp.zeros(0, jnp.int32)
  assert kv_update.copy_rows(pages, none, none, none, head_dim=16) is pages


def test_copies_name_what_does_not_fit():
  with pytest.raises(
    errors.KernelArgumentError, match=r"row_counts has shape \(3,\), expected"
  ):
    jax.eval_shape(
      lambda *arrays: kv_update.copy_rows(*arrays, head_dim=64),
      _struct(9, 2, 16, 64),
      _ints(2),
      _ints(2),
      _ints(3),
    )


@pytest.mark.parametrize(
  ("outs", "lses", "text"),
  [
    (_struct(2, 3, 4), _struct(2, 3, 4), r"outs has shape \(2, 3, 4\)"),
    (_struct(2, 3, 4, 8), _struct(2, 3), r"lses has shape \(2, 3\), expected"),
    (_struct(0, 3, 4, 8), _struct(0, 3, 4), r"\(0, 3, 4, 8\), .* 1 or more"),
    (
      _struct(2, 3, 4, 8),
      _struct(2, 3, 4, dtype=jnp.bfloat16),
      "lses has dtype bfloat16, expected float32",
    ),
  ],
)
def test_merges_name_what_does_not_fit(outs, lses, text):
  with pytest.raises(errors.KernelArgumentError, match=text):
    jax.eval_shape(merge_states.merge_states, outs, lses)


def test_differentiating_says_inference_only():
  batch = batches.paged(batches.make([5, 9]), "cpu")
  arrays = {name: x for name, x in batch.items() if x is not None}
  q = arrays.pop("q")

  def total(q):
    return paged_attention.paged_attention(q, **arrays)[0].sum()

  for transform in (jax.grad(total), jax.jit(jax.grad(total))):
    with pytest.raises(errors.InferenceOnly, match="paged_attention is infer"):
      transform(q)
  outs, lses = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 3, 4))
  with pytest.raises(errors.InferenceOnly, match="merge_states is inference"):
    jax.grad(lambda x: merge_states.merge_states(x, lses)[0].sum())(outs)
  x, pages = jnp.ones((1, 2, 16)), jnp.ones((2, 2, 4, 16))
  one = jnp.ones(1, jnp.int32)
  with pytest.raises(errors.InferenceOnly, match="write_kv is inference only"):
    jax.grad(lambda x: kv_update.write_kv(x, x, pages, pages, one)[0].sum())(x)
  with pytest.raises(errors.InferenceOnly, match="copy_rows is inference only"):
    jax.grad(
      lambda x: kv_update.copy_rows(x, one, one, one, head_dim=16).sum()
    )(pages)


def test_gradients_around_a_cache_read_are_not_in_the_way():
  batch = batches.paged(batches.make([5, 9]), "cpu")
  arrays = {name: x for name, x in batch.items() if x is not None}

  def total(x):
    out, _ = paged_attention.paged_attention(**arrays)
    return (x * out).sum()

  assert jnp.isfinite(jax.grad(total)(jnp.float32(2)))


def _operands():
  batch = batches.paged(batches.make([5, 9]), "cpu")
  operands = api.operands_lib.Operands(
    **{name: x for name, x in batch.items() if x is not None}
  )
  return operands, api.resolve(operands)


def test_the_first_implementation_that_can_run_is_selected():
  operands, options = _operands()
  chosen = api.OP.select(None, operands, options)
  assert chosen.__name__ == "pallas_kernels.paged_attention.xla"


def test_a_named_implementation_runs_or_raises_with_its_reason():
  operands, options = _operands()
  chosen = api.OP.select("reference", operands, options)
  assert chosen.__name__.endswith(".reference")
  with pytest.raises(
    errors.KernelUnsupported, match="'tpu': needs a TPU; this is cpu"
  ):
    api.OP.select("tpu", operands, options)


def test_an_op_without_a_module_for_a_backend_says_so():
  op = dispatch.Op("pallas_kernels.merge_states", "unheard_of")
  assert "has no xla implementation" in op.why_unsupported("xla", None, None)
  with pytest.raises(errors.KernelUnsupported, match="no unheard_of can run"):
    op.select(None, None, None)


def test_tracing_for_a_platform_lasts_as_long_as_its_block():
  with dispatch.tracing_for("tpu"):
    assert dispatch.target_platform() == "tpu"
  assert dispatch.target_platform() == "cpu"


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"context_lens": [5, 33]}, r"context_lens\[1\]=33, expected 0 to 32"),
    ({"context_lens": [-1, 3]}, r"context_lens\[0\]=-1, expected 0 to 32"),
    ({"context_lens": [5]}, "expected \\[sequences, width\\]"),
    (
      {"page_table": [[1, 2], [3, 9]]},
      r"page_table\[1, 1\]=9, expected 0 to 8",
    ),
    ({"page_table": [[-1, 2], [3, 4]]}, r"page_table\[0, 0\]=-1, expected"),
    ({"query_starts": [0, 2]}, r"query_starts has shape \(2,\), expected"),
    ({"query_starts": [1, 2, 3]}, "expected it to begin at 0 and not fall"),
    ({"query_starts": [0, 2, 1]}, "expected it to begin at 0 and not fall"),
    ({"query_starts": [0, 2, 7]}, "ends at 7, expected at most num_tokens=6"),
  ],
)
def test_values_are_checked_on_the_host(changes, text):
  values = {
    "page_table": [[1, 2], [3, 0]],
    "context_lens": [32, 3],
    "query_starts": [0, 5, 6],
  }
  fixed = {"page_size": 16, "num_pages": 9, "num_tokens": 6}
  arrays = {name: np.asarray(x, np.int32) for name, x in values.items()}
  checks.check_tables(**arrays, **fixed)
  arrays |= {name: np.asarray(x, np.int32) for name, x in changes.items()}
  with pytest.raises(errors.KernelArgumentError, match=text):
    checks.check_tables(**arrays, **fixed)


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"context_lens": np.array([np.nan, 3])}, "context_lens has dtype float64"),
    ({"page_table": np.ones((2, 2), bool)}, "page_table has dtype bool"),
    ({"query_starts": np.array([0, 1.5, 2])}, "query_starts has dtype float64"),
    ({"page_size": 0}, "page_size=0, expected an integer from 1 on"),
    ({"num_pages": float("nan")}, "num_pages=nan, expected an integer"),
  ],
)
def test_values_that_are_no_integers_are_refused_on_the_host(changes, text):
  given = {
    "page_table": np.asarray([[1, 2], [3, 0]]),
    "context_lens": np.asarray([32, 3]),
    "page_size": 16,
    "num_pages": 9,
  }
  checks.check_tables(**given)
  with pytest.raises(errors.KernelArgumentError, match=text):
    checks.check_tables(**(given | changes))


def test_slots_are_checked_on_the_host():
  sizes = {"page_size": 16, "num_pages": 9}
  checks.check_slots(np.asarray([0, 143]), **sizes)
  with pytest.raises(
    errors.KernelArgumentError, match=r"slots\[1\]=144, expected 0 to 143"
  ):
    checks.check_slots(np.asarray([0, 144]), **sizes)
  with pytest.raises(errors.KernelArgumentError, match=r"slots\[0\]=-1"):
    checks.check_slots(np.asarray([-1, 144]), **sizes)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("page_size", [8, 16, 128])
def test_geometry_reads_back_what_page_shape_lays_out(
  platform, head_dim, page_size
):
  geometry = page_shape.page_geometry(3, page_size, head_dim, platform=platform)
  pages = _struct(5, *geometry.shape)
  assert page_shape.geometry_of("pages", pages, head_dim) == geometry


def test_page_shapes_that_cannot_be_are_refused():
  with pytest.raises(errors.KernelArgumentError, match="page_size=0, expected"):
    page_shape.page_shape(2, 0, 64, platform="cpu")
  with pytest.raises(errors.KernelArgumentError, match="an even page size"):
    page_shape.page_shape(2, 1, 64, platform="tpu")


@pytest.mark.slow
def test_rows_beyond_two_gibibytes_are_written_and_read():
  page_size, head_dim = 16, 128
  num_pages = 2**31 // (page_size * head_dim) + 9
  pages = jnp.zeros((num_pages, 1, page_size, head_dim), jnp.int8)
  scales = jnp.ones((num_pages, *page_shape.scales_shape(1, page_size)))
  rng = np.random.default_rng(0)
  rows = jnp.asarray(rng.standard_normal((2, 1, head_dim)), jnp.float32)
  first = (num_pages - 1) * page_size
  slots = jnp.asarray([first, first + 1], jnp.int32)

  @jax.jit
  def run(pages, scales):
    # One pool for both: there is not the memory for two.
    pages, _, scales, _ = kv_update.write_kv(
      rows, rows, pages, pages, slots, k_scales=scales, v_scales=scales
    )
    table = jnp.full((1, 1), num_pages - 1, jnp.int32)
    return paged_attention.paged_attention(
      rows[:1],
      pages,
      pages,
      table,
      jnp.asarray([2], jnp.int32),
      k_scales=scales,
      v_scales=scales,
    )[0]

  out = np.asarray(run(pages, scales))[0, 0]
  values = np.asarray(rows)[:, 0]
  logits = values @ values[0] / np.sqrt(head_dim)
  weights = np.exp(logits - logits.max())
  want = weights @ values / weights.sum()
  np.testing.assert_allclose(out, want, atol=0.03)
