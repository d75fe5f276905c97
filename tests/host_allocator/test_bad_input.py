"""What a caller may hand in by mistake is refused by name, and changes nothing.

`None`, fractions, words, bools and numbers beyond int32 where whole numbers
belong; NumPy's integers are whole numbers and do work.
"""

import functools

import numpy as np
import pytest

from host_allocator import address
from host_allocator import allocator
from host_allocator import arguments
from host_allocator import errors
from host_allocator import fragmentation
from host_allocator import identity
from host_allocator import layout
from host_allocator import ledger
from host_allocator import metadata
from host_allocator import planner
from host_allocator import snapshots
from host_allocator import tables

LAYOUT = layout.CacheLayout.uniform(
  num_layers=1, num_kv_heads=1, head_dim=4, page_size=4
)
NAN = float("nan")
NOT_WHOLE = [1.5, NAN, None, "3", True, np.bool_(True), [3], np.array([3])]


# Numbers ---------------------------------------------------------------------


@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
def test_what_is_no_whole_number_is_refused_with_its_value(value):
  with pytest.raises(errors.BadArgument) as caught:
    arguments.whole("count", value, 0, 9)
  assert caught.value.reason == "bad_argument"
  assert str(caught.value) == f"count={value!r} is not a whole number"


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)], ids=repr)
def test_whole_numbers_of_any_type_come_back_as_int(value):
  assert type(arguments.whole("count", value, 0, 9)) is int


@pytest.mark.parametrize(
  ("value", "low", "high", "text"),
  [
    (-1, 0, 9, r"count=-1 is not within 0\.\.9"),
    (10, 0, 9, r"count=10 is not within 0\.\.9"),
    (2**70, 0, 9, "count=1180591620717411303424"),
    (0, 1, None, "count=0 is below 1"),
    (8, None, 7, "count=8 is above 7"),
  ],
)
def test_a_whole_number_past_its_limits_is_refused(value, low, high, text):
  with pytest.raises(errors.BadArgument, match=text):
    arguments.whole("count", value, low, high)


# Records beside the allocator ------------------------------------------------

GROUP = functools.partial(layout.CacheGroup, "kv", 1, 1, 4, 4)
SNAPSHOT = address.AddressSnapshot(
  LAYOUT,
  (
    address.PoolSnapshot(
      4, {"k": 0, "v": 1000}, {1: address.PageRecord(1, 1, 4)}
    ),
  ),
  {"A": address.RequestSnapshot(3, ((address.TableEntry(1, 1),),))},
)
PLACE = {"token": 1, "layer": 0, "kind": "k", "head": 0, "lane": 0}


def locate(request="A", **changes):
  return address.translate(SNAPSHOT, request, **{**PLACE, **changes})


def capacity(**changes):
  bounds = {"budget_bytes": 10**6, "max_sequences": 2, "max_length": 16}
  return planner.plan_capacity(LAYOUT, **{**bounds, **changes})


def measured(num_tokens=3, pages=(1,), reserved_tokens=None, **pool):
  counts = {"total": 8, "live": 3, "evictable": 0, "reserved": 0, "free": 5}
  request = ledger.RequestPages(num_tokens, pages, reserved_tokens)
  record = ledger.PoolPages(**{**counts, "valid_rows": {1: 4}, **pool})
  return ledger.measure(LAYOUT, ((request,),), (record,))


RECORDS = {
  "half a layer": (lambda: GROUP(layers=(0.0,)), "layout_error"),
  "layers that are none": (lambda: GROUP(layers=3), "layout_error"),
  "no axes": (lambda: GROUP(axis_order=None), "layout_error"),
  "axes of two kinds": (lambda: GROUP(axis_order=("k", 1)), "layout_error"),
  "a list as dtype": (lambda: GROUP(dtype=["float32"]), "layout_error"),
  "half a lane": (lambda: GROUP(lane_multiple=1.5), "layout_error"),
  "groups that are none": (
    lambda: layout.CacheLayout(("kv",)),
    "layout_error",
  ),
  "no groups": (lambda: layout.CacheLayout(None), "layout_error"),
  "half a worker": (
    lambda: identity.CacheLayoutManifest(layout=LAYOUT, world_size=1.5),
    "layout_error",
  ),
  "a budget of nothing known": (
    lambda: capacity(budget_bytes=NAN),
    "ledger_error",
  ),
  "a budget in floats": (lambda: capacity(budget_bytes=1e6), "ledger_error"),
  "half a length": (lambda: capacity(max_length=1.5), "ledger_error"),
  "true sequences": (lambda: capacity(max_sequences=True), "ledger_error"),
  "sequences of half a token": (
    lambda: capacity().sequences_of(1.5),
    "ledger_error",
  ),
  "half a shared token": (
    lambda: capacity().sequences_of(2, shared_tokens=0.5),
    "ledger_error",
  ),
  "half a token": (lambda: locate(token=1.5), "token_not_visible"),
  "token true": (lambda: locate(token=True), "token_not_visible"),
  "layer zero point zero": (lambda: locate(layer=0.0), "unknown_layer"),
  "a list of layers": (lambda: locate(layer=[0]), "unknown_layer"),
  "a head in words": (lambda: locate(head="0"), "head_out_of_range"),
  "half a lane of a head": (lambda: locate(lane=2.5), "lane_out_of_range"),
  "no kind": (lambda: locate(kind=None), "unknown_kind"),
  "a list of kinds": (lambda: locate(kind=["k"]), "unknown_kind"),
  "a list of requests": (lambda: locate(["A"]), "unknown_request"),
  "an arena of nothing known": (
    lambda: fragmentation.Arena(NAN, (1,)),
    "ledger_error",
  ),
  "half a byte free": (lambda: fragmentation.Arena(9, (1.5,)), "ledger_error"),
  "half a byte wanted": (
    lambda: fragmentation.Arena(9, (2,)).fits(1.5),
    "ledger_error",
  ),
  "pages of half a byte": (
    lambda: fragmentation.pages_for_bytes(10, 2.5),
    "ledger_error",
  ),
  "a page of half a row": (
    lambda: fragmentation.expected_tail_rows(1.5),
    "ledger_error",
  ),
  "a length of half a token": (
    lambda: fragmentation.mean_tail_rows([2.5], 4),
    "ledger_error",
  ),
  "a ledger of half a token": (lambda: measured(2.5), "not_a_whole_number"),
  "a ledger of unknown tokens": (lambda: measured(NAN), "not_a_whole_number"),
  "a page by name": (lambda: measured(pages=("1",)), "not_a_whole_number"),
  "half a row reserved": (
    lambda: measured(reserved_tokens=3.5),
    "not_a_whole_number",
  ),
  "half a live page": (
    lambda: measured(live=2.5, free=5.5),
    "not_a_whole_number",
  ),
  "half a valid row": (
    lambda: measured(valid_rows={1: 3.5}),
    "not_a_whole_number",
  ),
  "half a record": (
    lambda: metadata.RecordBytes(1, 1, 1, 1, 0.5),
    "record_size",
  ),
  "a true count": (
    lambda: metadata.RecordCounts(1, 1, 1, 1, True),
    "record_count",
  ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_malformed_record_is_refused_by_name(name):
  call, reason = RECORDS[name]
  with pytest.raises(errors.KVError) as caught:
    call()
  assert caught.value.reason == reason


def test_numpy_integers_are_as_good_as_ints_in_records():
  four = np.int64(4)
  plain = layout.CacheLayout((GROUP(layers=(0,)),))
  group = layout.CacheGroup("kv", np.int8(1), 1, four, four, layers=[np.int8()])
  assert layout.CacheLayout((group,)).digest == plain.digest
  assert locate(token=np.int32(1)) == locate()
  assert capacity(max_length=np.int16(16)) == capacity()
  assert measured(np.int64(3)).groups == measured().groups


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
