"""What one allocator handed out is refused by every other (R1, R14)."""

import dataclasses

import pytest

from host_allocator import errors
from host_allocator import pages
from host_allocator import tables

PROMPT = list(range(10))


class Twins:
  """Two allocators alike, each with a sequence in row 0 and a step to plan."""

  def __init__(self, bench, **options):
    self.mine, self.other = bench(**options), bench(**options)
    self.sequences = [each.open(PROMPT) for each in (self.mine, self.other)]
    for twin, sequence in zip(
      (self.mine, self.other), self.sequences, strict=True
    ):
      twin.cache.append([sequence], [5])
    self.stranger = self.sequences[1]

  def digests(self):
    return [twin.cache.state_digest() for twin in (self.mine, self.other)]

  def refuses(self, call, error=errors.BadHandle, match="another allocator"):
    """`call(mine, stranger)` must raise and change neither allocator."""
    before = self.digests()
    with pytest.raises(error, match=match) as caught:
      call(self.mine.cache, self.stranger)
    assert caught.value.reason == error.reason
    assert self.digests() == before
    for twin, sequence in zip(
      (self.mine, self.other), self.sequences, strict=True
    ):
      assert twin.cache.audit() == ()
      assert sequence.is_open
      assert sequence.tokens.tolist() == [*PROMPT, 5]
      assert sequence.length == 10


@pytest.fixture
def twins(bench):
  return Twins(bench)


OF_A_SEQUENCE = {
  "close": lambda cache, sequence: cache.close(sequence),
  "cancel": lambda cache, sequence: cache.cancel(sequence),
  "fork": lambda cache, sequence: cache.fork(sequence),
  "truncate": lambda cache, sequence: cache.truncate(sequence, 3),
  "rematch": lambda cache, sequence: cache.rematch(sequence),
  "lease": lambda cache, sequence: cache.lease(sequence),
  "handles": lambda cache, sequence: cache.handles(sequence),
  "batch": lambda cache, sequence: cache.batch([sequence]),
  "append": lambda cache, sequence: cache.append([sequence], [1]),
  "plan": lambda cache, sequence: cache.plan([(sequence, 1)]),
}


@pytest.mark.parametrize("name", OF_A_SEQUENCE)
def test_a_sequence_of_another_allocator_is_refused(twins, name):
  twins.refuses(OF_A_SEQUENCE[name])


@pytest.mark.parametrize("name", OF_A_SEQUENCE)
@pytest.mark.parametrize("other", [None, "x", 0, 1.5, [1]], ids=repr)
def test_what_is_no_sequence_is_refused(twins, name, other):
  call = OF_A_SEQUENCE[name]
  twins.refuses(lambda cache, _: call(cache, other), match="is not a sequence")


@pytest.mark.parametrize("name", OF_A_SEQUENCE)
def test_a_closed_stranger_is_refused_too(twins, name):
  closed = twins.other.open([7, 8])
  twins.other.cache.close(closed)
  call = OF_A_SEQUENCE[name]
  twins.refuses(lambda cache, _: call(cache, closed))


@pytest.mark.parametrize("name", ["batch", "append", "plan"])
def test_one_stranger_among_many_is_refused(twins, name):
  own = twins.sequences[0]
  fork = twins.mine.cache.fork(own)
  calls = {
    "batch": lambda cache, other: cache.batch([own, other, fork]),
    "append": lambda cache, other: cache.append([fork, own, other], [1, 2, 3]),
    "plan": lambda cache, other: cache.plan([(fork, 1), (other, 1)]),
  }
  twins.refuses(calls[name])


@pytest.mark.parametrize("is_aged", [False, True])
@pytest.mark.parametrize("use", ["append", "plan"])
def test_a_kept_batch_of_another_allocator_is_refused(twins, use, is_aged):
  kept = twins.other.cache.batch([twins.stranger])
  if is_aged:  # Checked anew since something was closed.
    for twin in (twins.mine, twins.other):
      twin.store([9, 9])
  calls = {
    "append": lambda cache, _: cache.append(kept, [1]),
    "plan": lambda cache, _: cache.plan(kept),
  }
  twins.refuses(calls[use])


@pytest.mark.parametrize("other", [None, 5, 1.5], ids=repr)
def test_what_is_no_batch_is_refused(twins, other):
  twins.refuses(lambda cache, _: cache.batch(other), match="is not a batch")
  twins.refuses(
    lambda cache, _: cache.append(other, [1]), match="is not a batch"
  )
  twins.refuses(
    lambda cache, _: cache.plan(other), errors.BadStep, "pairs or a Batch"
  )


def test_a_sequence_is_not_a_batch_of_itself(twins):
  own = twins.sequences[0]
  twins.refuses(lambda cache, _: cache.append(own, [1]), match="not a batch")


def test_a_page_handle_of_another_allocator_is_refused(twins):
  ((mine, *_),) = twins.mine.cache.handles(twins.sequences[0])
  ((other, *_),) = twins.other.cache.handles(twins.stranger)
  alike = dataclasses.replace(other, pool=mine.pool)
  assert alike == mine, "they differ in nothing but their pool"
  twins.mine.cache.check_handle(mine)
  twins.refuses(
    lambda cache, _: cache.check_handle(other), match="of allocator"
  )


@pytest.mark.parametrize(
  "changes",
  [
    {"group": "x"},
    {"group": 0.0},
    {"page": 1.5},
    {"page": float("nan")},
    {"page": True},
    {"generation": None},
  ],
  ids=repr,
)
def test_a_malformed_page_handle_is_refused(twins, changes):
  cache = twins.mine.cache
  bad = dataclasses.replace(pages.PageHandle(cache.number, 0, 1, 1), **changes)
  twins.refuses(lambda cache, _: cache.check_handle(bad), match="whole number")
  twins.refuses(lambda cache, _: cache.check_handle("x"), match="PageHandle")


def test_a_lease_of_another_allocator_is_refused(twins):
  mine = twins.mine.cache.lease(twins.sequences[0])
  other = twins.other.cache.lease(twins.stranger)
  assert mine.number == other.number
  twins.refuses(lambda cache, _: cache.release(other), match="of allocator")
  for none in ("x", None, 1):
    twins.refuses(
      lambda cache, _, x=none: cache.release(x), match="not a Lease"
    )
  forged = dataclasses.replace(other, pool=mine.pool)
  twins.refuses(
    lambda cache, _: cache.release(forged), errors.DoubleFree, "is not held"
  )
  twins.mine.cache.release(mine)
  twins.other.cache.release(other)


def test_a_lease_that_ended_with_the_device_says_so(bench):
  b = bench()
  before = b.cache.lease(b.open(PROMPT))
  b.cache.poison()
  with pytest.raises(errors.DeviceLost, match="lease 1 ended when the device"):
    b.cache.release(before)
  after = b.cache.lease(b.open(PROMPT))
  b.cache.release(after)
  with pytest.raises(errors.DoubleFree, match="lease 2 is not held"):
    b.cache.release(after)
  assert b.cache.audit() == ()


def test_a_plan_of_another_allocator_is_refused(twins):
  theirs = twins.other.cache.plan([(twins.stranger, 1)])
  packing = tables.Packing(
    tables.StepShape(1, 1), twins.mine.cache.table_widths
  )
  calls = (
    lambda cache, _: cache.commit(theirs),
    lambda cache, _: cache.abort(theirs),
    lambda cache, _: cache.pack(theirs, packing),
    lambda cache, _: cache.commit(None),
    lambda cache, _: cache.abort(None),
    lambda cache, _: cache.pack(None, None),
  )
  for call in calls:
    twins.refuses(call, errors.StepClosed, "not the open step")
  own = twins.mine.cache.plan([(twins.sequences[0], 1)])
  for call in calls:
    twins.refuses(call, errors.StepClosed, "not the open step")
  twins.mine.cache.abort(own)
  twins.other.cache.abort(theirs)


def test_a_step_is_not_packed_by_what_is_no_packing(twins):
  plan = twins.mine.cache.plan([(twins.sequences[0], 1)])
  twins.refuses(
    lambda cache, _: cache.pack(plan, None),
    errors.LayoutError,
    "None is not a Packing",
  )


# Receipts --------------------------------------------------------------------


def receipt_of(bench_, **options):
  """The receipt of a match of six of eight tokens, and its sequence closed."""
  bench_.store([1, 2, 3, 4, 5, 6, 7, 8], **options)
  found = bench_.cache.open([1, 2, 3, 4, 5, 6], **options)
  assert found.matched_tokens == 5
  bench_.cache.close(found)
  return found.receipt


def refuses_receipt(cache, receipt, error, match, **options):
  before = cache.state_digest()
  with pytest.raises(error, match=match) as caught:
    cache.open([1, 2, 3], receipt=receipt, **options)
  assert caught.value.reason == error.reason
  assert cache.state_digest() == before
  assert cache.audit() == ()


def test_a_receipt_of_another_allocator_is_refused(indexed):
  one, two = indexed(num_pages=1000), indexed(num_pages=8)
  one.store(list(range(50, 90)))  # Takes pages that the other does not have.
  receipt = receipt_of(one)
  assert receipt.group_pages[0].max() > 8
  match = "PrefixMatchReceipt is of allocator"
  refuses_receipt(two.cache, receipt, errors.BadHandle, match)
  with pytest.raises(errors.BadHandle, match=match):
    two.cache.check_receipt(receipt)
  alike = indexed(num_pages=1000)
  receipt_of(alike)
  refuses_receipt(alike.cache, receipt, errors.BadHandle, match)


@pytest.mark.parametrize("other", ["x", None, 3, ()], ids=repr)
def test_what_is_no_receipt_is_refused(bench, other):
  cache = bench().cache
  with pytest.raises(errors.BadHandle, match="is not a PrefixMatchReceipt"):
    cache.check_receipt(other)
  if other is not None:
    refuses_receipt(cache, other, errors.BadHandle, "PrefixMatchReceipt")


@pytest.mark.parametrize(
  ("mine", "theirs"),
  [
    ({"namespace": "a"}, {"namespace": "b"}),
    ({"adapter": "a"}, {"adapter": "b"}),
    ({"salt": "a"}, {}),
    ({"adapter": "a"}, {"salt": "a"}),
  ],
)
def test_a_receipt_of_another_namespace_is_refused(indexed, mine, theirs):
  b = indexed()
  receipt = receipt_of(b, **mine)
  refuses_receipt(
    b.cache, receipt, errors.BadHandle, "the receipt is of", **theirs
  )
  b.cache.close(b.cache.open([1, 2, 3], receipt=receipt, **mine))


FORGET = {
  "the index dropped": lambda cache: cache.drop_index(),
  "the namespace dropped": lambda cache: cache.drop_index("a"),
  "the namespace revoked": lambda cache: cache.revoke("a"),
  "the model replaced": lambda cache: cache.replace_model("next"),
}


@pytest.mark.parametrize("name", FORGET)
def test_a_receipt_of_an_index_left_behind_is_refused(indexed, name):
  """Its pages need not have been recycled: somebody holds them still."""
  b = indexed()
  holder = b.open([1, 2, 3, 4, 5, 6, 7, 8], namespace="a")
  receipt = receipt_of(b, namespace="a")
  FORGET[name](b.cache)
  with pytest.raises(errors.StaleReceipt, match="'a' was left behind after"):
    b.cache.check_receipt(receipt)
  b.cache.namespaces.restore("a")
  refuses_receipt(
    b.cache, receipt, errors.StaleReceipt, "left behind", namespace="a"
  )
  b.decode(holder, 9)


def test_a_receipt_outlives_what_is_dropped_of_others(indexed):
  b = indexed()
  receipt = receipt_of(b, namespace="a")
  b.cache.drop_index("b")
  b.cache.check_receipt(receipt)


def test_namespaces_that_were_left_behind_do_not_pile_up(indexed):
  b = indexed(num_pages=16)
  lasting = b.open(PROMPT, namespace="lasting")
  receipt = b.cache.open([*PROMPT, 1], namespace="lasting").receipt
  first = None
  for i in range(400):
    b.store([1, 2, 3], namespace=f"tenant {i}")
    if first is None:
      first = b.cache.namespaces.authorize("tenant 0")
    b.cache.drop_index(f"tenant {i}")
  assert len(b.cache.namespaces) < 70
  assert not b.cache.namespaces.is_current(first)
  again = b.cache.namespaces.authorize("tenant 0")
  assert again.namespace_generation > first.namespace_generation
  assert b.matched([1, 2, 3], namespace="tenant 0") == 0
  b.cache.check_receipt(receipt)
  assert b.matched([*PROMPT, 1], namespace="lasting") == 10
  assert lasting.is_open
