"""§0x04, §0x05: ownership moves in transactions, and a shared tail is copied.

Pages are numbered by our allocator; the article's block numbers are its own.
What it fixes is who holds what, at which version, and what moves.
"""

import dataclasses
import fractions

import pytest

from host_allocator import errors
from host_allocator import pages
from host_allocator import tables
from tests.article import driver

KIB, MIB = driver.KIB, driver.MIB


class FaultError(Exception):
  """Injected into a phase."""


@pytest.fixture(params=["radix", "hash_chain"])
def allocator(request):
  return driver.make(
    driver.two_groups(), 8, prefix_index=request.param, record_digests=True
  )


@pytest.fixture
def a(allocator):
  """A with 33 rows: two full pages and one row of a third, in both groups."""
  return driver.prefilled(allocator, range(33))


def states(allocator):
  return [
    (usage.free, usage.evictable, usage.live, usage.reserved)
    for usage in allocator.usage()
  ]


def references(allocator, page, group=0):
  return int(allocator.pools[group].references[page])


def decode(allocator, sequence, token=7):
  allocator.append([sequence], [token])
  plan = allocator.plan([(sequence, 1)])
  return plan, allocator.commit(plan)


def test_an_append_inside_a_private_page_writes_in_place(allocator, a):
  before, free = allocator.handles(a), states(allocator)
  plan, receipt = decode(allocator, a)
  assert a.length == 34
  assert driver.copied_rows(plan) == [0, 0]
  assert receipt.new_pages == (0, 0)
  assert allocator.handles(a) == before
  assert states(allocator) == free


def test_an_append_at_a_boundary_takes_a_page_of_every_group(allocator):
  c = driver.prefilled(allocator, range(16))
  _, receipt = decode(allocator, c)
  assert receipt.new_pages == (1, 1)
  taken = [
    count * group.page_bytes
    for count, group in zip(
      receipt.new_pages, allocator.layout.groups, strict=True
    )
  ]
  assert taken == [768 * KIB, 256 * KIB]
  assert sum(taken) == allocator.layout.bundle_bytes == MIB


def forked(allocator, a):
  decode(allocator, a)
  return allocator.fork(a)


def test_a_fork_references_every_page_again(allocator, a):
  d = forked(allocator, a)
  for group in range(2):
    assert d.pages(group).tolist() == a.pages(group).tolist()
    assert [references(allocator, p, group) for p in a.pages(group)] == [2] * 3


def test_the_copy_of_a_shared_tail(allocator, a):
  d = forked(allocator, a)
  tails = [int(a.pages(group)[-1]) for group in range(2)]
  version, epoch = d.table_version, allocator.epoch
  plan, receipt = decode(allocator, d)
  for group, tail in enumerate(tails):
    source, destination, rows = plan.copies[group]
    assert source.tolist() == [tail]
    assert rows.tolist() == [2]
    assert destination.tolist() == [d.pages(group)[-1]]
    assert references(allocator, tail, group) == 1
    assert references(allocator, d.pages(group)[-1], group) == 1
    assert d.pages(group)[:-1].tolist() == a.pages(group)[:-1].tolist()
  assert (a.length, d.length) == (34, 35)
  assert d.table_version == version + 1
  assert receipt.epoch == allocator.epoch == epoch + 1
  assert receipt.predecessor_digest != receipt.successor_digest


def test_what_the_copy_costs(allocator, a):
  d = forked(allocator, a)
  _, receipt = decode(allocator, d)
  row = allocator.layout.row_bytes
  assert receipt.copied_bytes == 128 * KIB
  read_and_written = 2 * receipt.copied_bytes
  assert read_and_written == 256 * KIB
  appended = receipt.num_tokens * row
  assert appended == 64 * KIB
  assert read_and_written + appended == 320 * KIB
  assert (read_and_written + appended) / appended == 5
  capacity = sum(
    count * group.page_bytes
    for count, group in zip(
      receipt.new_pages, allocator.layout.groups, strict=True
    )
  )
  assert capacity == MIB


def test_the_owner_left_alone_keeps_its_page(allocator, a):
  d = forked(allocator, a)
  decode(allocator, d)
  plan, receipt = decode(allocator, a)
  assert driver.copied_rows(plan) == [0, 0]
  assert receipt.new_pages == (0, 0)


@pytest.mark.parametrize("page_size", [4, 8, 16, 32, 64])
def test_a_branch_after_twenty_tokens(page_size):
  """§0x09C: useful bytes copied, and capacity taken for them."""
  allocator = driver.make(driver.one_group(page_size), 32)
  first = driver.prefilled(allocator, range(20))
  second = allocator.fork(first)
  plan, receipt = decode(allocator, second)
  rows = {4: 0, 8: 4, 16: 4, 32: 20, 64: 20}[page_size]
  assert driver.copied_rows(plan) == [rows]
  assert 2 * receipt.copied_bytes == {0: 0, 4: 512, 20: 2560}[rows] * KIB
  assert receipt.new_pages == (1,)
  capacity = allocator.layout.groups[0].page_bytes
  assert capacity == page_size * 64 * KIB
  amplification = {8: (2, 1), 16: (4, 1), 32: (8, 5), 64: (16, 5)}
  if rows:  # P / r: the page taken for the rows copied.
    found = fractions.Fraction(capacity, receipt.copied_bytes)
    assert found == fractions.Fraction(*amplification[page_size])


@pytest.mark.parametrize(
  "phase",
  ["plan.counted", "plan.reserving_0", "plan.reserving_1", "plan.reserved"],
)
def test_a_fault_before_publication_restores_the_predecessor(
  allocator, a, phase
):
  d = forked(allocator, a)
  allocator.append([d], [7])
  digest, epoch = allocator.state_digest(), allocator.epoch
  before = states(allocator)

  def strike(name):
    if name == phase:
      raise FaultError(name)

  allocator.on_phase = strike
  with pytest.raises(FaultError):
    allocator.plan([(d, 1)])
  allocator.on_phase = None
  assert allocator.state_digest() == digest
  assert allocator.epoch == epoch
  assert states(allocator) == before
  driver.compute(allocator, d)
  assert d.length == 35


def test_an_abort_restores_the_predecessor(allocator, a):
  d = forked(allocator, a)
  allocator.append([d], [7])
  digest, before = allocator.state_digest(), states(allocator)
  plan = allocator.plan([(d, 1)])
  assert [usage.reserved for usage in allocator.usage()] == [1, 1]
  allocator.abort(plan)
  assert allocator.state_digest() == digest
  assert states(allocator) == before


def test_a_truncated_suffix_is_free_and_reused_under_a_new_generation(
  allocator, a
):
  d = forked(allocator, a)
  decode(allocator, d)
  old = [handles[-1] for handles in allocator.handles(d)]
  allocator.truncate(d, 32)
  assert [int(d.pages(group).size) for group in range(2)] == [2, 2]
  free = [usage.free for usage in allocator.usage()]
  f = driver.prefilled(allocator, range(900, 916))
  new = [handles[0] for handles in allocator.handles(f)]
  assert [handle.page for handle in new] == [handle.page for handle in old]
  for before, after in zip(old, new, strict=True):
    assert after.generation == before.generation + 1
    allocator.check_handle(after)
    with pytest.raises(errors.StaleHandle, match="at generation"):
      allocator.check_handle(before)
  assert [usage.free + 1 for usage in allocator.usage()] == free


def test_what_is_released_is_evictable_touched_again_and_evicted(allocator, a):
  full = [a.pages(group)[:2].tolist() for group in range(2)]
  allocator.close(a)
  for usage in allocator.usage():
    assert (usage.evictable, usage.live) == (3, 0)
  g = allocator.open(list(range(16)), want_logits=False)
  for group in range(2):
    assert g.pages(group).tolist() == full[group][:1]
    assert references(allocator, full[group][0], group) == 1
    usage = allocator.usage()[group]
    assert (usage.evictable, usage.live) == (2, 1)
  # Seven more pages: everything that nobody holds has to go.
  driver.prefilled(allocator, range(500, 612))
  for usage in allocator.usage():
    assert (usage.evictable, usage.live) == (0, 8)
  assert g.pages(0).tolist() == full[0][:1]
  assert allocator.open(list(range(33))).matched_tokens == 16


@pytest.mark.parametrize("end", ["close", "cancel"])
def test_close_and_cancel_move_the_same_pages_and_say_why(allocator, a, end):
  receipt = getattr(allocator, end)(a)
  assert receipt.outcome == {"close": "closed", "cancel": "cancelled"}[end]
  assert receipt.dropped_pages == (3, 3)
  assert receipt.length == 33


def test_a_shared_page_is_not_counted_free_until_its_last_holder_goes(
  allocator, a
):
  d = allocator.fork(a)
  allocator.close(a)
  assert [usage.live for usage in allocator.usage()] == [3, 3]
  allocator.close(d)
  assert [usage.live for usage in allocator.usage()] == [0, 0]


def open_plan(allocator, a):
  allocator.append([a], [7])
  return allocator.plan([(a, 1)])


def closed(allocator, a):
  allocator.close(a)
  return a


def stale(allocator, a):
  """A handle of a page that has been given away since."""
  handle = allocator.handles(a)[0][-1]
  allocator.truncate(a, 16)
  allocator.drop_index()
  driver.prefilled(allocator, range(700, 716))
  driver.prefilled(allocator, range(800, 816))
  return handle


def ended_lease(allocator, a):
  lease = allocator.lease(a)
  allocator.release(lease)
  return lease


def step(allocator, a):
  """A member of the open step."""
  open_plan(allocator, a)
  return a


def nothing(allocator, a):
  return None


def handle(allocator, **changes):
  """A handle of the allocator's page 1, or of what the changes say."""
  found = pages.PageHandle(allocator.number, 0, 1, 1)
  return dataclasses.replace(found, **changes)


# What makes ready, what is then tried, and the reason for which it is refused.
MALFORMED = {
  "close twice": (closed, lambda c, a, s: c.close(a), "sequence_closed"),
  "cancel closed": (closed, lambda c, a, s: c.cancel(a), "sequence_closed"),
  "append closed": (
    closed,
    lambda c, a, s: c.append([a], [1]),
    "sequence_closed",
  ),
  "plan closed": (closed, lambda c, a, s: c.plan([(a, 1)]), "sequence_closed"),
  "fork closed": (closed, lambda c, a, s: c.fork(a), "sequence_closed"),
  "truncate closed": (
    closed,
    lambda c, a, s: c.truncate(a, 1),
    "sequence_closed",
  ),
  "lease closed": (closed, lambda c, a, s: c.lease(a), "sequence_closed"),
  "release twice": (ended_lease, lambda c, a, s: c.release(s), "double_free"),
  "stale handle": (stale, lambda c, a, s: c.check_handle(s), "stale_handle"),
  "no such group": (
    nothing,
    lambda c, a, s: c.check_handle(handle(c, group=2)),
    "bad_handle",
  ),
  "null page": (
    nothing,
    lambda c, a, s: c.check_handle(handle(c, page=0)),
    "bad_handle",
  ),
  "page past the pool": (
    nothing,
    lambda c, a, s: c.check_handle(handle(c, page=9)),
    "bad_handle",
  ),
  "generation to come": (
    nothing,
    lambda c, a, s: c.check_handle(handle(c, generation=99)),
    "stale_handle",
  ),
  "second step": (open_plan, lambda c, a, s: c.plan([(a, 1)]), "step_open"),
  "fork in a step": (step, lambda c, a, s: c.fork(a), "sequence_in_step"),
  "truncate in a step": (
    step,
    lambda c, a, s: c.truncate(a, 1),
    "sequence_in_step",
  ),
  "close in a step": (step, lambda c, a, s: c.close(a), "sequence_in_step"),
  "rematch in a step": (
    step,
    lambda c, a, s: c.rematch(a),
    "sequence_in_step",
  ),
  "no rows": (nothing, lambda c, a, s: c.plan([(a, 0)]), "bad_step"),
  "negative rows": (nothing, lambda c, a, s: c.plan([(a, -1)]), "bad_step"),
  "unknown rows": (nothing, lambda c, a, s: c.plan([(a, 1)]), "bad_step"),
  "empty step": (nothing, lambda c, a, s: c.plan([]), "bad_step"),
  "named twice": (
    nothing,
    lambda c, a, s: c.plan([(a, 1), (a, 1)]),
    "bad_step",
  ),
  "interior truncation": (
    nothing,
    lambda c, a, s: c.truncate(a, -1),
    "bad_truncation",
  ),
  "truncation past the end": (
    nothing,
    lambda c, a, s: c.truncate(a, 34),
    "bad_truncation",
  ),
  "tokens without sequences": (
    nothing,
    lambda c, a, s: c.append([a], [1, 2]),
    "bad_step",
  ),
  "packed too small": (
    open_plan,
    lambda c, a, s: c.pack(
      s, tables.Packing(tables.StepShape(0, 0), c.table_widths)
    ),
    "shape_overflow",
  ),
  "another cache's widths": (
    open_plan,
    lambda c, a, s: c.pack(s, tables.Packing(tables.StepShape(1, 1), (1, 1))),
    "layout_error",
  ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_transition_is_refused_by_name(allocator, a, name):
  prepare, attempt, reason = MALFORMED[name]
  subject = prepare(allocator, a)
  digest, epoch = allocator.state_digest(), allocator.epoch
  with pytest.raises(errors.KVError) as caught:
    attempt(allocator, a, subject)
  assert caught.value.reason == reason
  assert allocator.state_digest() == digest
  assert allocator.epoch == epoch
  assert allocator.audit() == ()


@pytest.mark.parametrize("end", ["commit", "abort", "pack"])
@pytest.mark.parametrize("first", ["commit", "abort"])
def test_an_ended_step_is_refused(allocator, a, first, end):
  plan = open_plan(allocator, a)
  getattr(allocator, first)(plan)
  digest = allocator.state_digest()
  packing = tables.Packing(tables.StepShape(1, 1), allocator.table_widths)
  arguments = (plan, packing) if end == "pack" else (plan,)
  with pytest.raises(errors.StepClosed):
    getattr(allocator, end)(*arguments)
  assert allocator.state_digest() == digest


def test_a_step_that_does_not_fit_names_what_it_lacks(allocator, a):
  other = allocator.open(list(range(100, 196)))
  digest = allocator.state_digest()
  with pytest.raises(errors.OutOfPages, match="needed=12") as caught:
    allocator.plan([(other, 96)])
  assert caught.value.by_group == {"g0": (6, 5), "g1": (6, 5)}
  assert allocator.state_digest() == digest
