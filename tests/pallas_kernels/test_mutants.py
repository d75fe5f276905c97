"""Each of these faults makes a test of the conformance classes fail."""

import pytest

from pallas_kernels.kv_update import xla as update
from pallas_kernels.merge_states import xla as merge
from pallas_kernels.paged_attention import xla as attention
from tests.pallas_kernels import conformance
from tests.pallas_kernels import mutants


class Everything(
  conformance.AttentionConformance,
  conformance.MaskConformance,
  conformance.MergeConformance,
  conformance.UpdateConformance,
):
  """All tests of one implementation; not collected."""

  __test__ = False

  def __init__(self):
    # An `after` of its own keeps its compiled functions apart.
    self.implementation = conformance.Implementation(
      "xla", after=lambda: None, long=300
    )


def _decode(tests):
  tests.test_decode_of_every_length(9, 3, 64, "float32")


def _attention(name, old, new, caught_by):
  return mutants.Mutant(name, attention, "paged_attention", old, new, caught_by)


MUTANTS = [
  _attention(
    "scale off by 20%",
    "* options.scale\n",
    "* (1.2 * options.scale)\n",
    _decode,
  ),
  _attention(
    "mask off by one at the end",
    "key_row[:, None] < end[..., None]",
    "key_row[:, None] <= end[..., None]",
    _decode,
  ),
  _attention(
    "mask off by one at the window",
    "key_row[:, None] >= first[..., None]",
    "key_row[:, None] > first[..., None]",
    lambda tests: tests.test_windows([1, 13, 2], 8),
  ),
  _attention(
    "V unmasked",
    "  v = jnp.where(seen.any(1)[:, None, :, None], v, 0)\n",
    "",
    lambda tests: tests.test_poison_in_unowned_rows_changes_no_bit(None),
  ),
  _attention(
    "cap after mask",
    "  logits = jnp.where(shown, logits, _NOTHING)\n",
    "  logits = jnp.where(shown, logits, _NOTHING)\n"
    "  if options.soft_cap is not None:\n"
    "    logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)\n",
    lambda tests: tests.test_soft_cap_comes_after_scale_and_before_the_mask(
      [1, 13, 2], 1.0, None
    ),
  ),
  _attention(
    "LSE in base 2",
    "state.top + jnp.log(divisor)",
    "state.top + jnp.log2(divisor)",
    _decode,
  ),
  _attention(
    "a stale table tail read",
    "  k_table = blocked(operands.page_table)\n",
    "  end = end + options.page_size\n"
    "  k_table = blocked(operands.page_table)\n",
    lambda tests: tests.test_stale_table_tails_are_not_seen([1, 13, 2]),
  ),
  _attention(
    "one page skipped",
    "  shape = q.shape[:-1]\n",
    "  seen &= (key_row // call.options.page_size != 1)[:, None]\n"
    "  shape = q.shape[:-1]\n",
    _decode,
  ),
  _attention(
    "one block skipped",
    "lax.fori_loop(0, num_blocks[0], body, start)",
    "lax.fori_loop(1, num_blocks[0], body, start)",
    lambda tests: tests.test_ragged_prefill_and_decode_together(
      9, 3, 64, "float32"
    ),
  ),
  _attention(
    "sinks counted twice",
    "jnp.where(top == _NOTHING, 0.0, 1.0)",
    "jnp.where(top == _NOTHING, 0.0, 2.0)",
    lambda tests: tests.test_sinks_count_once_whether_split_or_not(24),
  ),
  _attention(
    "a block merged into the next sequence",
    "(pair[:, None] >= ends[None])",
    "(pair[:, None] >= ends[None] - 1)",
    _decode,
  ),
  _attention(
    "the last step's missing pairs seen",
    "jnp.where(real, end[member], 0)",
    "end[member]",
    _decode,
  ),
  _attention(
    "a merge that forgets to rescale",
    "out = state.out * old[..., None]",
    "out = state.out",
    _decode,
  ),
  _attention(
    "a tile that reaches into the next chunk",
    "mine = row < counts[member] - begin",
    "mine = row < size",
    lambda tests: tests.test_ragged_prefill_and_decode_together(
      9, 3, 64, "float32"
    ),
  ),
  _attention(
    "V read through K's table",
    "k_table if v_table is None else blocked(v_table)",
    "k_table",
    lambda tests: tests.test_keys_and_values_may_have_tables_of_their_own(None),
  ),
  _attention(
    "V's scales forgotten",
    "  if operands.v_scales is not None:\n",
    "  if False:\n",
    lambda tests: tests.test_quantised_pages(None, "float32", "int8"),
  ),
  _attention(
    "rows of no sequence left standing",
    "real = (token < operands.query_starts[-1])",
    "real = (token <= token)",
    lambda tests: (
      tests.test_sinks_alone_are_the_state_of_a_query_that_sees_nothing(
        [1, 13, 2]
      )
    ),
  ),
  mutants.Mutant(
    "a merge that averages",
    merge,
    "merge_states",
    "jnp.exp(lses - safe[None])",
    "jnp.where(lses == -jnp.inf, 0.0, 1.0)",
    lambda tests: tests.test_a_merge_weighs_parts_by_their_lse(2),
  ),
  mutants.Mutant(
    "a merge that multiplies an empty part by zero",
    merge,
    "merge_states",
    "seen = weights[..., None] != 0",
    "seen = weights[..., None] >= 0",
    lambda tests: tests.test_an_empty_part_is_the_identity_on_every_side(
      float("nan")
    ),
  ),
  mutants.Mutant(
    "a merge of nothing that is NaN",
    merge,
    "merge_states",
    "safe = jnp.where(top == -jnp.inf, 0, top)",
    "safe = top",
    lambda tests: tests.test_merging_nothing_gives_nothing(2),
  ),
  mutants.Mutant(
    "a row written one too far",
    update,
    "write_kv",
    "slots % page_size\n",
    "(slots + 1) % page_size\n",
    lambda tests: tests.test_rows_may_come_in_any_order(),
  ),
  mutants.Mutant(
    "a scale filed under the next head",
    update,
    "write_kv",
    "places = head[None, :] * page_size",
    "places = head[None, ::-1] * page_size",
    lambda tests: tests.test_quantised_rows_come_with_a_scale_per_row_and_head(
      "float32", "int8"
    ),
  ),
  mutants.Mutant(
    "one row too many copied",
    update,
    "copy_rows",
    "row < counts[copy]",
    "row <= counts[copy]",
    lambda tests: tests.test_copies_take_the_first_rows_of_a_page(
      64, "float32"
    ),
  ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_conformance_tests_catch(mutant):
  with mutants.planted(mutant), pytest.raises(AssertionError):
    mutant.caught_by(Everything())
