"""Numbers and records beside the allocator that cannot be are refused by name."""

import functools

import numpy as np
import pytest

from host_allocator import address
from host_allocator import arguments
from host_allocator import errors
from host_allocator import fragmentation
from host_allocator import identity
from host_allocator import layout
from host_allocator import ledger
from host_allocator import metadata
from host_allocator import planner

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
