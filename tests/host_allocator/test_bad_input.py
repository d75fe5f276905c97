"""What a caller may hand in by mistake is refused by name, and changes nothing.

`None`, fractions, words, bools and numbers beyond int32 where whole numbers
belong; NumPy's integers are whole numbers and do work.
"""

import numpy as np
import pytest

from host_allocator import allocator
from host_allocator import errors
from host_allocator import layout
from host_allocator import snapshots
from host_allocator import tables

LAYOUT = layout.CacheLayout.uniform(
  num_layers=1, num_kv_heads=1, head_dim=4, page_size=4
)
NAN = float("nan")
NOT_WHOLE = [1.5, NAN, None, "3", True, np.bool_(True), [3], np.array([3])]


# The allocator ---------------------------------------------------------------

PROMPT = list(range(10))


@pytest.mark.parametrize(
  ("options", "text"),
  [
    ({"num_pages": 1.5}, "num_pages=1.5 is not a whole number"),
    ({"num_pages": None}, "num_pages=None is not a whole number"),
    ({"num_pages": "8"}, "num_pages='8' is not a whole number"),
    ({"num_pages": True}, "num_pages=True is not a whole number"),
    ({"num_pages": [1.5]}, "num_pages=1.5 is not a whole number"),
    ({"num_pages": {8}}, "is not a whole number"),
    ({"num_pages": (8, 8)}, "not one number for each of 1 groups"),
    (
      {"num_pages": 2**62},
      r"num_pages=4611686018427387904 is not within 1\.\.",
    ),
    ({"max_sequences": 1.5}, "max_sequences=1.5 is not a whole number"),
    ({"max_sequences": 2**50}, "max_sequences=1125899906842624 is not within"),
    ({"max_length": None}, "max_length=None is not a whole number"),
    ({"max_length": 2**40}, "max_length=1099511627776 is not within"),
    ({"vocab_size": 1.5}, "vocab_size=1.5 is not a whole number"),
    ({"vocab_size": 2**40}, "vocab_size=1099511627776 is not within"),
    ({"prefix_index": [1]}, "prefix_index="),
    ({"eviction": ["lru"]}, "eviction policy"),
    ({"tail_policy": None}, "tail_policy=None"),
  ],
  ids=repr,
)
def test_options_that_cannot_be_are_refused(bench, options, text):
  with pytest.raises(errors.LayoutError, match=text):
    bench(**options)


def test_a_layout_that_is_none_is_refused():
  with pytest.raises(errors.LayoutError, match="'kv' is not a CacheLayout"):
    allocator.KVAllocator("kv", num_pages=8, max_sequences=1, max_length=8)


@pytest.mark.parametrize(
  "num_pages", [np.int64(8), [np.int32(8)], np.array([8])]
)
def test_numpy_integers_are_as_good_as_ints_for_pools(bench, num_pages):
  cache = bench(
    num_pages=num_pages, max_sequences=np.int8(2), max_length=np.int64(16)
  ).cache
  assert cache.usage()[0].total == 8
  assert cache.max_length == 16


@pytest.mark.parametrize("page_size", [1, 3, 16, 2**20, 2**31])
def test_a_pool_whose_slots_would_wrap_is_refused(page_size):
  """The last slot is that of the last row of page `num_pages`."""
  group = layout.CacheGroup("wide", 1, 1, 1, page_size)
  most = 2**31 // page_size - 1
  assert (most + 1) * page_size - 1 <= 2**31 - 1
  both = layout.CacheLayout((group, layout.CacheGroup("small", 1, 1, 1, 1)))
  with pytest.raises(errors.LayoutError, match="group 'wide'") as caught:
    allocator.KVAllocator(
      both, num_pages=(most + 1, 1), max_sequences=1, max_length=1
    )
  assert f"num_pages={most + 1} is not within 1..{most}" in str(caught.value)


def test_the_last_slot_of_the_largest_pool_is_a_positive_int32():
  group = layout.CacheGroup("wide", 1, 1, 1, 2**20)
  cache = allocator.KVAllocator(
    layout.CacheLayout((group,)), num_pages=2047, max_sequences=1, max_length=3
  )
  cache.pools[0].take(2046)  # As a busy pool would.
  plan = cache.plan([(cache.open([1, 2, 3]), 3)])
  packing = tables.Packing(tables.StepShape(4, 2), cache.table_widths)
  slots = packing.field(cache.pack(plan, packing), "slots", 0)
  assert slots.tolist() == [2047 * 2**20 + i for i in range(3)] + [0]


TOKENS = {
  "nothing": None,
  "a number": 5,
  "a set": {1, 2},
  "an iterator": iter([1, 2]),
  "a dict": {1: 2},
  "a word": "abc",
  "bools": np.ones(3, bool),
  "fractions": np.array([1.5]),
  "beyond int64": np.array([2**63], np.uint64),
  "an unknown number": [1, NAN],
}


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_that_are_none_are_refused(bench, name):
  refuses(
    bench(), lambda b, s: b.cache.open(TOKENS[name]), "token_out_of_range"
  )
  refuses(
    bench(),
    lambda b, s: b.cache.append([s], TOKENS[name]),
    "token_out_of_range",
  )


@pytest.mark.parametrize(
  "tokens", [(1, 2), range(1, 3), b"\1\2", np.array([1, 2], np.uint8)], ids=repr
)
def test_any_sequence_of_tokens_will_do(bench, tokens):
  assert bench().cache.open(tokens).tokens.tolist() == [1, 2]


def side(*parts):
  return lambda b, s: b.cache.open(PROMPT, side_inputs=[parts])


def opened(**options):
  return lambda b, s: b.cache.open(PROMPT, **options)


def planned(*counts):
  def call(b, sequence):
    members = [sequence, *(b.cache.fork(sequence) for _ in counts[1:])]
    b.digest = b.cache.state_digest()
    b.cache.plan(list(zip(members, counts, strict=True)))

  return call


CALLS = {
  "a priority in words": (opened(priority="hi"), "bad_argument"),
  "no priority": (opened(priority=None), "bad_argument"),
  "an unknown priority": (opened(priority=NAN), "bad_argument"),
  "priority true": (opened(priority=True), "bad_argument"),
  "logits wanted five times": (opened(want_logits=5), "bad_argument"),
  "logits wanted in words": (opened(want_logits="yes"), "bad_argument"),
  "a list of namespaces": (opened(namespace=["a"]), "bad_argument"),
  "a namespace by number": (opened(namespace=1), "bad_argument"),
  "a list of adapters": (opened(adapter=["a"]), "bad_argument"),
  "salt in bytes": (opened(salt=b"a"), "bad_argument"),
  "a side input of two parts": (side(0, 1), "bad_side_input"),
  "half an offset": (side(0.5, 1, "x"), "bad_side_input"),
  "an offset in words": (side("0", 1, "x"), "bad_side_input"),
  "length true": (side(0, True, "x"), "bad_side_input"),
  "a list of digests": (side(0, 1, ["x"]), "bad_side_input"),
  "a digest in bytes": (side(0, 1, b"x"), "bad_side_input"),
  "a side input by name": (opened(side_inputs=["x"]), "bad_side_input"),
  "side inputs by number": (opened(side_inputs=3), "bad_side_input"),
  "no tokens to find room for": (
    lambda b, s: b.cache.can_fit(-1),
    "bad_argument",
  ),
  "an unknown number to find room for": (
    lambda b, s: b.cache.can_fit(NAN),
    "bad_argument",
  ),
  "pages for less than nothing": (
    lambda b, s: b.cache.pages_needed(-5),
    "bad_argument",
  ),
  "pages for half a token": (
    lambda b, s: b.cache.pages_needed(1.5),
    "bad_argument",
  ),
  "revoking a list": (lambda b, s: b.cache.revoke(["a"]), "bad_argument"),
  "dropping a list": (lambda b, s: b.cache.drop_index(["a"]), "bad_argument"),
  "no model": (lambda b, s: b.cache.replace_model(None), "bad_argument"),
  "rows past int32": (planned(2**31 - 1), "bad_step"),
  "rows past int32 once they are added": (planned(2**31 - 5), "bad_step"),
  "rows past int64": (planned(2**70), "bad_step"),
  "many rows": (planned(2**40), "bad_step"),
  "half rows of one": (planned(1, 1.7), "bad_step"),
  "rows in words": (planned("1"), "bad_step"),
  "no rows": (planned(None), "bad_step"),
  "rows unknown": (planned(NAN), "bad_step"),
  "a list of rows": (planned([1]), "bad_step"),
  "lists of rows": (planned(1, [1]), "bad_step"),
  "rows true": (planned(True), "bad_step"),
  "a step of nothing": (lambda b, s: b.cache.plan(None), "bad_step"),
  "a step of sequences": (lambda b, s: b.cache.plan([s]), "bad_step"),
  "a step of threes": (lambda b, s: b.cache.plan([(s, 1, 1)]), "bad_step"),
  "a group that is not there": (lambda b, s: s.pages(5), "bad_handle"),
  "a group from the end": (lambda b, s: s.pages(-1), "bad_handle"),
  "a reservation for nobody": (
    lambda b, s: snapshots.ledger_of(b.cache, {}),
    "reservation_missing",
  ),
}


def refuses(b, call, reason):
  """The call must raise for `reason` and leave no trace."""
  sequence = b.open(PROMPT)
  b.cache.append([sequence], [5])
  b.digest, epoch = b.cache.state_digest(), b.cache.epoch
  free, names = b.cache.usage()[0].free, len(b.cache.side_input_keys)
  with pytest.raises(errors.KVError) as caught:
    call(b, sequence)
  assert caught.value.reason == reason
  assert b.cache.state_digest() == b.digest
  assert b.cache.audit() == ()
  assert b.cache.usage()[0].free == free
  assert b.cache.epoch - epoch == b.cache.rows.num_open - 1  # Forks, if any.
  assert len(b.cache.side_input_keys) == names
  assert b.cache.open_plan is None


@pytest.mark.parametrize("name", CALLS)
def test_a_malformed_call_is_refused_and_leaves_no_trace(indexed, name):
  call, reason = CALLS[name]
  refuses(indexed(), call, reason)


@pytest.mark.parametrize("length", NOT_WHOLE, ids=repr)
def test_a_truncation_to_no_length_is_refused(indexed, length):
  refuses(indexed(), lambda b, s: b.cache.truncate(s, length), "bad_truncation")


def test_a_refused_side_input_is_not_numbered(bench):
  cache = bench().cache
  for inputs in ([(0, 2, "a"), (1, 1, "b")], [(0, 2, "a"), (3, 1, None)]):
    with pytest.raises(errors.BadSideInput):
      cache.open(PROMPT, side_inputs=inputs)
  assert len(cache.side_input_keys) == 0


@pytest.mark.parametrize("one", [1, np.int64(1), np.uint8(1)], ids=repr)
def test_numpy_integers_are_as_good_as_ints_for_rows(bench, one):
  b = bench()
  sequence = b.open(PROMPT, priority=one, want_logits=np.bool_(True))
  b.cache.append([sequence], [5])
  b.run((sequence, one))
  b.cache.truncate(sequence, one)
  assert sequence.length == 1
  assert b.cache.can_fit(one)


def test_a_step_near_the_end_of_int32_does_not_wrap(bench):
  """`starts + counts` must not become negative and so pass for small."""
  b = bench()
  sequence = b.open(PROMPT)
  b.cache.append([sequence], [5])
  for count in (2**31 - 1, 2**31 - 5, 2**31, 2**63 - 1, 2**64 - 1):
    with pytest.raises(errors.BadStep, match=f"{count}"):
      b.cache.plan([(sequence, count)])
  assert b.cache.open_plan is None


# Tables ----------------------------------------------------------------------


@pytest.mark.parametrize(
  "bounds",
  [(1.5, 2), (NAN, 3), ("a", 1), (None, 1), (1, [2]), (2**40, 2), (True, 1)],
  ids=repr,
)
def test_shapes_of_no_whole_numbers_are_refused(bounds):
  with pytest.raises(errors.LayoutError, match="max_"):
    tables.step_shapes(*bounds)


@pytest.mark.parametrize("entries", [[0.5], [NAN], ["a"], [None], [True]])
def test_a_table_of_anything_but_page_ids_is_refused(entries):
  table = np.array(entries)
  with pytest.raises(errors.BadHandle, match="not whole numbers"):
    tables.check_page_ids(table, 7)
  with pytest.raises(errors.BadHandle, match="not whole numbers"):
    tables.expand_to_kernel_pages(table, 8, 4)


@pytest.mark.parametrize("page", [2**26, 2**30, -3])
def test_kernel_pages_whose_ids_would_wrap_are_refused(page):
  table = np.array([[page]], np.int32)
  with pytest.raises(errors.BadHandle, match=f"names page {page}"):
    tables.expand_to_kernel_pages(table, 64, 1)
  last = np.array([[2**25 - 1]], np.int32)
  assert tables.expand_to_kernel_pages(last, 64, 1).max() == 2**31 - 1


@pytest.mark.parametrize("size", [2.0, None, "4", True])
def test_kernel_pages_of_no_whole_size_are_refused(size):
  table = np.zeros((1, 2), np.int32)
  with pytest.raises(errors.LayoutError, match="not a whole number"):
    tables.expand_to_kernel_pages(table, 12, size)
