"""The GPU kernels pass what every implementation passes, interpreted.

Interpreting is slow: a selection runs always, and the shared classes when asked
(`-m slow`).
"""

import dataclasses
import functools
import re
from unittest import mock

import jax
import numpy as np
import pytest

from pallas_kernels import _compat
from pallas_kernels import aot_cases
from pallas_kernels import dispatch
from pallas_kernels import gpu_device
from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention import gpu
from pallas_kernels.paged_attention import gpu_prefill
from pallas_kernels.paged_attention import gpu_ragged
from pallas_kernels.paged_attention import gpu_tiles
from pallas_kernels.paged_attention import shapes
from tests.pallas_kernels import batches
from tests.pallas_kernels import conformance
from tests.pallas_kernels import gpu_interpreter
from tests.pallas_kernels import harness

# The interpreter multiplies poison by NumPy before the kernel masks it.
pytestmark = pytest.mark.filterwarnings(
  "ignore:invalid value encountered in matmul:RuntimeWarning"
)
IMPLEMENTATION = gpu_interpreter.IMPLEMENTATION


@pytest.fixture(autouse=True)
def bfloat16():
  """The kernels read bfloat16 queries only."""
  with gpu_interpreter.bfloat16_by_default():
    yield


@pytest.fixture(autouse=True)
def patience():
  """JAX 0.10 takes a minute to interpret three warpgroups once."""
  if _compat.JAX_VERSION >= (0, 11):
    yield
    return
  reason = "JAX 0.10 interprets several warpgroups too slowly"
  with mock.patch.object(
    gpu_prefill, "prefill", side_effect=lambda *_: pytest.skip(reason)
  ):
    yield


@pytest.mark.slow
class TestAttention(conformance.AttentionConformance):
  implementation = IMPLEMENTATION


@pytest.mark.slow
class TestMasks(conformance.MaskConformance):
  implementation = IMPLEMENTATION

  @pytest.mark.parametrize("counts", [None, [1, 13, 2]])
  def test_queries_of_zero_see_the_mean_of_valid_values(self, counts):
    """As the shared one, which wants float32's precision of the output."""
    batch = batches.make([5, 41, 60], counts)
    batch.q[:] = 0
    _, lse = harness.check(IMPLEMENTATION, batch, causal=False)
    owners = np.repeat(batch.lengths, batch.counts)
    np.testing.assert_allclose(
      lse, np.log(np.repeat(owners[:, None], 4, axis=1)), rtol=1e-6
    )


@pytest.mark.interpreted
class TestUpdates(conformance.UpdateConformance):
  implementation = IMPLEMENTATION
  # A program for each width and dtype; `TestAllUpdates` has them.
  test_rows_land_in_their_slots_and_nothing_else_moves = None
  test_copies_take_the_first_rows_of_a_page = None

  def test_a_page_and_parts_of_pages_are_copied(self):
    class_ = conformance.UpdateConformance
    class_.test_copies_take_the_first_rows_of_a_page(self, 64, "int8")

  def test_padded_rows_go_to_the_null_page_only(self):
    """As the shared one: padded rows race for slots that nobody reads."""
    class_ = conformance.UpdateConformance
    unchecked = dataclasses.replace(
      IMPLEMENTATION, context=gpu_interpreter.interpreted_without_races
    )
    with mock.patch.object(type(self), "implementation", unchecked):
      class_.test_padded_rows_go_to_the_null_page_only(self)


@pytest.mark.slow
class TestAllUpdates(conformance.UpdateConformance):
  implementation = IMPLEMENTATION
  # It races on purpose: see `TestUpdates`.
  test_padded_rows_go_to_the_null_page_only = None


@pytest.mark.interpreted
class TestSelection:
  """NaN lies in every row that nobody owns, in all of these."""

  def test_split_decode_of_lengths_around_pages_and_tiles(self):
    batch = batches.make([0, 1, 8, 65, 150], q_heads=3, kv_heads=1)
    with gpu_interpreter.tiles(LEAST_SPLIT_ROWS=64, MOST_SPLITS=3):
      arrays = batches.paged(batch, "gpu")
      assert arrays["page_table"].shape[1] * batch.page_size > 128
      harness.check(IMPLEMENTATION, batch)

  def test_ragged_prefill_beside_decode_and_padding(self):
    batch = batches.make(
      [0, 1, 70, 23], [0, 1, 66, 0], q_heads=3, kv_heads=1, padding=2
    )
    out, lse = harness.check(IMPLEMENTATION, batch)
    assert (out[-2:] == 0).all()
    assert (lse[-2:] == -np.inf).all()

  @pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
  @pytest.mark.parametrize("counts", [None, [2, 0]])
  def test_quantised_pages_with_tables_of_their_own(self, counts, kv_dtype):
    batch = batches.make(
      [70, 5], counts, kv_dtype=kv_dtype, page_size=16, kv_heads=1
    )
    harness.check(IMPLEMENTATION, batch, paging={"own_v_table": True})

  @pytest.mark.parametrize("counts", [None, [3, 1]])
  def test_window_cap_and_sinks_together(self, counts):
    batch = batches.make([90, 20], counts, kv_heads=1)
    sinks = np.asarray([0.5, -1.0, 3.0, 0.0], np.float32)
    harness.check(IMPLEMENTATION, batch, window=70, soft_cap=2.0, sinks=sinks)

  def test_pages_larger_than_a_tile(self):
    batch = batches.make([130, 300], head_dim=128, page_size=256, kv_heads=1)
    harness.check(IMPLEMENTATION, batch)


class TestRefusals:
  @pytest.mark.parametrize(
    ("change", "reason"),
    [
      ({"dtype": "float32", "kv_dtype": "float32"}, "queries are float32"),
      ({"head_dim": 80}, "K has head_dim 80, expected a multiple of 64"),
      ({"head_dim": 320}, "K has head_dim 320, expected .* up to 256"),
      ({"page_size": 4}, "page_size 4, expected a multiple of 8"),
      ({"page_size": 24}, "page_size 24, expected .* divides 64"),
      ({"q_heads": 65, "kv_heads": 1}, "65 query heads share a KV head"),
    ],
  )
  def test_say_what_was_expected(self, change, reason):
    shape = dataclasses.replace(_shape("decode_d128_window"), **change)
    case = aot_cases.Case("paged_attention", "gpu", shape)
    with pytest.raises(AssertionError, match=reason):
      raise AssertionError(aot_cases.why_unsupported(case, "gpu"))

  def test_every_named_shape_runs_but_float32_attention_and_merges(self):
    for case in aot_cases.cases("gpu", subset=False):
      reason = aot_cases.why_unsupported(case, "gpu")
      attention = case.op == "paged_attention"
      if case.op == "merge_states" or (
        attention and case.shape.dtype == "float32"
      ):
        assert reason
      else:
        assert reason is None

  def test_a_blackwell_gpu_is_named(self, monkeypatch):
    device = mock.Mock(device_kind="NVIDIA B200", compute_capability="10.0")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert "B200 has compute capability 10.0" in gpu_device.why_unsupported()

  def test_an_old_gpu_runs_attention_through_xla(self, monkeypatch):
    monkeypatch.setattr(gpu_device, "why_unsupported", lambda: "too old")
    batch = batches.make([5])
    arrays = batches.paged(batch, "gpu")
    given = {name: x for name, x in arrays.items() if x is not None}
    with dispatch.tracing_for("gpu"):
      out, _ = jax.eval_shape(lambda x: api.paged_attention(**x), given)
    assert out.shape == batch.q.shape

  def test_what_xla_does_as_well_has_a_reason(self):
    cases = aot_cases.cases("gpu", subset=True)
    case = next(c for c in cases if c.op == "merge_states")
    assert "XLA" in aot_cases.why_unsupported(case, "gpu")

  @pytest.mark.parametrize("op", ["write_kv", "copy_rows"])
  @pytest.mark.parametrize(
    ("change", "reason"),
    [
      ({"head_dim": 72, "kv_dtype": "int8"}, "72 bytes, expected a multiple"),
      ({"head_dim": 320}, "has head_dim 320, expected at most 256"),
      ({"kv_heads": 300}, "has kv_heads 300, expected at most 256"),
    ],
  )
  def test_updates_say_what_was_expected(self, op, change, reason):
    cases = aot_cases.cases("gpu", subset=True)
    case = next(c for c in cases if c.op == op)
    shape = dataclasses.replace(case.shape, dtype="bfloat16", **change)
    said = aot_cases.why_unsupported(aot_cases.Case(op, "gpu", shape), "gpu")
    assert said is not None
    assert re.search(reason, said)

  def test_rows_that_fit_no_shared_memory_are_named(self):
    shape = aot_cases.UpdateShape("", 4, 256, 256, 16, 9, *["float32"] * 2)
    case = aot_cases.Case("write_kv", "gpu", shape)
    said = aot_cases.why_unsupported(case, "gpu")
    assert "524288 bytes of shared memory" in said


def _shape(name: str) -> shapes.AttentionShape:
  return next(s for s in shapes.compile_shapes() if s.name == name)


class TestTiles:
  @pytest.mark.parametrize(
    ("sequences", "context", "splits"),
    [(1, 32768, 32), (8, 4096, 8), (64, 4096, 2), (256, 4096, 1), (1, 64, 1)],
  )
  def test_splits_fill_the_multiprocessors_and_no_more(
    self, sequences, context, splits
  ):
    shape = dataclasses.replace(
      _shape("decode_d128_window"), sequences=sequences, context=context
    )
    case = aot_cases.Case("paged_attention", "gpu", shape)
    call = aot_cases.call_of(case, "gpu")
    tiles = gpu_tiles.decode_tiles(call.operands, call.options)
    assert tiles.splits == splits

  def test_every_named_shape_fits_shared_memory(self):
    for case in aot_cases.cases("gpu", subset=False):
      if case.op != "paged_attention":
        continue
      if aot_cases.why_unsupported(case, "gpu") is None:
        call = aot_cases.call_of(case, "gpu")
        taken = gpu.shared_bytes(call.operands, call.options)
        assert taken <= 232_448, case.shape.name


class TestRagged:
  @pytest.mark.parametrize(
    ("counts", "group"),
    [([0, 0], 1), ([1, 1, 1], 8), ([70, 0, 3, 64, 1], 3), ([129, 200], 1)],
  )
  def test_tiles_cover_each_token_once_and_mix_no_sequences(
    self, counts, group
  ):
    starts = np.cumsum([0, *counts]).astype(np.int32)
    tokens = int(starts[-1]) + 3
    at = np.arange(tokens, dtype=np.int32)
    plan = functools.partial(gpu_ragged.plan, rows=128, group=group)
    plan = jax.jit(plan)(starts, at, at + 1000)
    owner = np.repeat(np.arange(len(counts)), counts)
    per_tile = plan.token_of_slot.shape[1]
    assert per_tile * plan.padded_group == 128
    slots = np.asarray(plan.slot_of_token)[: len(owner)]
    assert len(set(slots)) == len(owner)
    flat = np.asarray(plan.token_of_slot).reshape(-1)
    np.testing.assert_array_equal(flat[slots], at[: len(owner)])
    facts = np.asarray(plan.facts)
    for tile in set(slots // per_tile):
      mine = at[: len(owner)][slots // per_tile == tile]
      sequence, low, high, full_low, full_high = facts[tile]
      assert set(owner[mine]) == {sequence}
      assert (low, high) == (mine[0], mine[-1] + 1000)
      assert (full_low, full_high) == (mine[-1], mine[0] + 1000)
    empty = set(range(plan.num_tiles)) - set(slots // per_tile)
    assert all(facts[tile, 2] == 0 for tile in empty)
