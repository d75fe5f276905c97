"""The TPU kernels pass what every implementation passes, interpreted.

Interpretation is slow, so CI leaves out the tests that compile most, and runs
the others with copies as late as they may come (attention, updates) or as early
(masks).  All tests of both kinds:

    pytest -m slow tests/pallas_kernels/test_tpu.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels import errors
from pallas_kernels import kv_update
from pallas_kernels import merge_states
from pallas_kernels import page_shape
from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import tpu_stream
from tests.pallas_kernels import batches
from tests.pallas_kernels import conformance
from tests.pallas_kernels import harness
from tests.pallas_kernels import mask_conformance
from tests.pallas_kernels import tpu_interpreter

EAGER = tpu_interpreter.implementation("eager")
ON_WAIT = tpu_interpreter.implementation("on_wait")


@pytest.fixture(autouse=True)
def nothing_left_behind(capfd):
  """A copy that nobody waited for is printed when the kernel ends."""
  yield
  said = "".join(capfd.readouterr())
  assert "non-zero count" not in said
  assert "RACE" not in said


@pytest.mark.interpreted
class TestAttention(conformance.FewerCases):
  implementation = ON_WAIT
  # Several programs each.
  test_answers_do_not_depend_on_page_size = None
  test_answers_do_not_depend_on_tiles = None
  test_lengths_short_of_a_page_equal_each_alone = None
  test_a_split_at_any_page_merges_to_the_whole = None
  test_windows_that_end_inside_and_across_a_shared_prefix = None
  test_sinks_count_once_whether_split_or_not = None


@pytest.mark.interpreted
class TestMasks(conformance.MaskConformance):
  implementation = EAGER
  test_everything_at_once = None

  @pytest.mark.parametrize("counts", mask_conformance.RAGGED)
  def test_soft_cap_comes_after_scale_and_before_the_mask(self, counts):
    super().test_soft_cap_comes_after_scale_and_before_the_mask(counts, 30.0, 3)


@pytest.mark.interpreted
class TestUpdate(conformance.UpdateConformance):
  implementation = ON_WAIT


@pytest.mark.interpreted
class TestMerge(conformance.MergeConformance):
  implementation = EAGER


@pytest.mark.slow
class TestAllAttentionEager(conformance.AttentionConformance):
  implementation = EAGER


@pytest.mark.slow
class TestAllAttentionOnWait(conformance.AttentionConformance):
  implementation = ON_WAIT


@pytest.mark.slow
class TestAllMasksEager(conformance.MaskConformance):
  implementation = EAGER


@pytest.mark.slow
class TestAllMasksOnWait(conformance.MaskConformance):
  implementation = ON_WAIT


@pytest.mark.slow
class TestAllUpdatesEager(conformance.UpdateConformance):
  implementation = EAGER


@pytest.mark.interpreted
def test_tiles_of_the_heuristic_give_the_same_answer():
  lengths, counts = [5, 90, 41], [1, 13, 2]
  batch = batches.make(lengths, counts, page_size=32, head_dim=128)
  want = harness.check(EAGER, batch)
  arrays = batches.paged(batch, "tpu")
  with tpu_interpreter.tiles(FEWEST_ROWS=64, MOST_ROWS=64, QUERY_ROWS=64):
    harness.assert_close(EAGER.attend(arrays, fresh=True), want)


@pytest.mark.interpreted
def test_rows_of_two_lane_tiles_land_in_their_slots():
  rng = np.random.default_rng(0)
  pages = rng.standard_normal((5, 2, 16, 256)).astype(np.float32)
  k = rng.standard_normal((20, 2, 256)).astype(np.float32)
  slots = np.asarray([19, *range(40, 59)], np.int32)
  got = ON_WAIT.write(
    {"k": k, "v": -k, "k_pages": pages, "v_pages": pages, "slots": slots}
  )
  want = pages.copy()
  want[slots // 16, :, slots % 16] = k
  np.testing.assert_array_equal(got[0], want)
  want[slots // 16, :, slots % 16] = -k
  np.testing.assert_array_equal(got[1], want)


class NeverWaits(tpu_stream.Stream):
  """The mutant "a copy not waited for": V's."""

  def _wait_block(self, half):
    keep = self.sources
    object.__setattr__(self, "sources", keep[:1])
    super()._wait_block(half)
    object.__setattr__(self, "sources", keep)


class OneBuffer(tpu_stream.Stream):
  """The mutant "both blocks in one buffer", with `IntoOneBuffer`."""

  def walk(self, item, compute, carry):
    first = lambda row, half, carry: compute(row, half * 0, carry)
    return super().walk(item, first, carry)


class IntoOneBuffer(tpu_stream.Source):
  def destination(self, half, page):
    return super().destination(0, page)


@pytest.mark.interpreted
@pytest.mark.parametrize("mode", tpu_interpreter.MODES)
@pytest.mark.parametrize(
  "mutant",
  [
    {"Stream": NeverWaits},
    {"Stream": OneBuffer, "Source": IntoOneBuffer},
  ],
  ids=["a copy not waited for", "both blocks in one buffer"],
)
class TestMutants:
  @pytest.fixture(autouse=True)
  def nothing_left_behind(self):
    """Much is left behind: it is what these tests look for."""

  def test_a_stream_that_races_fails_the_conformance_tests(
    self, mutant, mode, monkeypatch, capfd
  ):
    for name, broken in mutant.items():
      monkeypatch.setattr(tpu_stream, name, broken)
    # An `after` of its own keeps its compiled functions apart.
    implementation = dataclasses.replace(
      tpu_interpreter.implementation(mode),
      after=lambda: tpu_interpreter.assert_no_races(),
    )
    caught = []
    try:
      harness.check(implementation, batches.make([5, 41, 60]))
    except (AssertionError, jax.errors.JaxRuntimeError) as error:
      caught.append(error)
    said = "".join(capfd.readouterr())
    assert caught or "RACE" in said or "non-zero count" in said


def _pages(num_pages=9, kv_heads=2, size=16, dim=64, dtype="float32"):
  shape = page_shape.page_shape(kv_heads, size, dim, platform="tpu")
  return jnp.zeros((num_pages, *shape), dtype)


def _attend(q, k, v, **more):
  width = more.pop("width", 4)
  with dispatch.tracing_for("tpu"):
    return jax.eval_shape(
      lambda: paged_attention.paged_attention(
        q,
        k,
        v,
        jnp.zeros((len(q), width), jnp.int32),
        jnp.zeros(len(q), jnp.int32),
        implementation="tpu",
        **more,
      )
    )


class TestRefusals:
  """`why_unsupported` names what a TPU kernel does not take."""

  def test_float16(self):
    pages = _pages(dtype="float16")
    q = jnp.zeros((2, 2, 64), jnp.float16)
    with pytest.raises(errors.KernelUnsupported, match="float16"):
      _attend(q, pages, pages)
    with (
      dispatch.tracing_for("tpu"),
      pytest.raises(errors.KernelUnsupported, match="float16"),
    ):
      slots = jnp.zeros(2, jnp.int32)
      kv_update.write_kv(q, q, pages, pages, slots, implementation="tpu")
    with (
      dispatch.tracing_for("tpu"),
      pytest.raises(errors.KernelUnsupported, match="float16"),
    ):
      merge_states.merge_states(
        q[None], jnp.zeros((1, 2, 2)), implementation="tpu"
      )

  def test_pages_laid_out_for_another_platform(self):
    pages = jnp.zeros((9, 2, 16, 64))
    with pytest.raises(errors.KernelUnsupported, match="another platform"):
      _attend(jnp.zeros((2, 2, 64)), pages, pages)

  def test_k_and_v_that_fold_differently(self):
    with pytest.raises(errors.KernelUnsupported, match="v_head_dim=128"):
      _attend(jnp.zeros((2, 2, 64)), _pages(), _pages(dim=128), v_head_dim=128)

  def test_pages_of_no_whole_tiles(self):
    pages = _pages(size=12)
    with pytest.raises(errors.KernelUnsupported, match="page_size=12"):
      _attend(jnp.zeros((2, 2, 64)), pages, pages)

  def test_pages_that_do_not_fit_twice(self):
    pages = _pages(kv_heads=32, size=256, dim=256, num_pages=2)
    with pytest.raises(errors.KernelUnsupported, match="smaller page_size"):
      _attend(jnp.zeros((2, 32, 256)), pages, pages)

  def test_tables_that_do_not_fit_smem(self):
    pages = _pages()
    with pytest.raises(errors.KernelUnsupported, match="bytes of SMEM"):
      _attend(jnp.zeros((2, 2, 64)), pages, pages, width=200_000)

  def test_scales_that_straddle_lane_rows(self):
    pages = _pages(size=24, dtype="int8")
    scales = jnp.zeros((9, *page_shape.scales_shape(2, 24)))
    with pytest.raises(errors.KernelUnsupported, match="power of two"):
      _attend(
        jnp.zeros((2, 2, 64)), pages, pages, k_scales=scales, v_scales=scales
      )

  def test_copies_of_pages_that_do_not_fit(self):
    pages = _pages(kv_heads=32, size=256, dim=256, num_pages=2)
    ids = jnp.zeros(2, jnp.int32)
    with (
      dispatch.tracing_for("tpu"),
      pytest.raises(errors.KernelUnsupported, match="smaller page_size"),
    ):
      kv_update.copy_rows(
        pages, ids, ids, ids, head_dim=256, implementation="tpu"
      )

  def test_merges_of_parts_that_do_not_fit(self):
    outs = jnp.zeros((600, 1, 8, 128))
    with (
      dispatch.tracing_for("tpu"),
      pytest.raises(errors.KernelUnsupported, match="merge fewer"),
    ):
      merge_states.merge_states(outs, outs[..., 0], implementation="tpu")


@pytest.mark.parametrize("counts", [None, [1, 2]])
def test_float32_products_keep_all_their_bits(counts):
  # Interpretation does not see it missing: a TPU would multiply in bfloat16.
  batch = batches.make([5, 20], counts)
  arrays = {
    k: v for k, v in batches.paged(batch, "tpu").items() if v is not None
  }
  with dispatch.tracing_for("tpu"):
    text = str(
      jax.make_jaxpr(
        lambda x: paged_attention.paged_attention(**x, implementation="tpu")
      )(arrays)
    )
  products = text.split("dot_general[")[1:]
  assert len(products) == 2
  for product in products:
    assert "HIGHEST" in product.split("preferred_element_type")[0]
