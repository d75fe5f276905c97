"""The life of sequences and steps, executed on rows that remember prefixes."""

import dataclasses
import itertools
import threading

import numpy as np
import pytest

from host_allocator import errors
from host_allocator import tables

PROMPT = list(range(10))


# Copy on write -----------------------------------------------------------------


def test_a_shared_last_page_is_copied_once_and_its_last_owner_keeps_it(bench):
  b = bench()
  parent = b.open(PROMPT)
  child = b.cache.fork(parent)
  assert child.pages().tolist() == parent.pages().tolist()
  b.cache.append([child], [50])
  plan = b.cache.plan([(child, 1)])
  ((sources, destinations, rows),) = plan.copies
  assert sources.tolist() == [parent.pages()[2]]
  assert rows.tolist() == [2]
  b.device.run(plan)
  receipt = b.cache.commit(plan)
  assert receipt.copied_rows == (2,)
  assert child.pages()[2] == destinations[0] != parent.pages()[2]
  assert b.decode(parent, 60).pages()[2] == sources[0]
  b.device.check_all()


def test_every_order_of_closing_forks_gives_the_pool_back(bench):
  for order in itertools.permutations(range(4)):
    b = bench(prefix_index=None)
    family = [b.open(PROMPT)]
    family += [b.cache.fork(family[0]), b.cache.fork(family[0])]
    b.decode(family[1], 1, 2)
    family.append(b.cache.fork(family[1]))
    for place in order:
      b.cache.close(family[place])
      b.device.check_all()
    assert b.cache.usage()[0].free == 32


def test_forks_decode_side_by_side_in_one_batch(bench):
  b = bench()
  family = [b.open(PROMPT)]
  family += [b.cache.fork(family[0]) for _ in range(3)]
  for step in range(8):
    b.cache.append(family, [20 + step + i for i in range(4)])
    b.run(*family)
  assert len({tuple(s.tokens.tolist()) for s in family}) == 4


def test_truncating_a_private_tail_lets_it_be_written_again_in_place(bench):
  b = bench(prefix_index=None)
  sequence = b.decode(b.open(PROMPT), 1)
  page = sequence.pages()[2]
  b.cache.truncate(sequence, 9)
  assert b.decode(sequence, 2, 3).pages()[2] == page


def test_truncating_into_a_published_page_makes_the_next_append_copy(bench):
  b = bench()
  sequence = b.open(PROMPT)
  pages = sequence.pages()
  b.cache.truncate(sequence, 6)
  b.decode(sequence, 70)
  assert sequence.pages()[1] != pages[1]
  assert b.matched([*PROMPT, 11]) == 10


@pytest.mark.parametrize("length", [-1, 11])
def test_a_truncation_that_is_none_is_refused(bench, length):
  b = bench()
  sequence = b.open(PROMPT)
  with pytest.raises(errors.BadTruncation, match=r"is not within 0\.\.10"):
    b.cache.truncate(sequence, length)
  assert sequence.length == 10


def test_truncating_known_tokens_keeps_the_computed_rows(bench):
  b = bench()
  sequence = b.cache.open(PROMPT)
  b.run((sequence, 6))
  b.cache.truncate(sequence, 8)
  assert (sequence.length, sequence.num_tokens) == (6, 8)
  b.run(sequence)


# Steps -------------------------------------------------------------------------


def test_an_aborted_step_restores_its_predecessor(bench):
  b = bench()
  stored = b.open(PROMPT)
  sequence = b.cache.open([*PROMPT[:6], 90, 91])
  before = b.cache.state_digest()
  plan = b.cache.plan([(sequence, 2)])
  assert b.cache.state_digest() == before
  receipt = b.cache.abort(plan)
  assert receipt.outcome == "aborted"
  assert b.cache.state_digest() == before
  assert b.cache.usage()[0].reserved == 0
  b.run(sequence)
  b.cache.close(stored)


def test_nothing_of_a_step_can_be_matched_before_it_is_committed(indexed):
  b = indexed()
  first = b.cache.open(PROMPT)
  plan = b.cache.plan([(first, 10)])
  assert b.cache.open(PROMPT).matched_tokens == 0
  b.device.run(plan)
  b.cache.commit(plan)
  assert b.cache.open(PROMPT).matched_tokens == 9


def test_what_was_cancelled_in_mid_prefill_matches_only_as_far_as_committed(
  indexed,
):
  b = indexed()
  sequence = b.cache.open(list(range(30)))
  b.run((sequence, 13))
  plan = b.cache.plan([(sequence, 12)])
  receipt = b.cache.cancel(sequence)
  assert receipt.outcome == "cancel_pending"
  assert b.cache.usage()[0].pending == 4
  b.cache.abort(plan)
  assert not sequence.is_open
  assert b.cache.usage()[0].pending == 0
  assert b.matched(list(range(30))) == 13
  assert b.cache.usage()[0].live == 0


def test_a_cancelled_member_is_closed_by_the_commit(bench):
  b = bench()
  one, two = b.cache.open(PROMPT), b.cache.open([3] * 5)
  plan = b.cache.plan([(one, 10), (two, 5)])
  b.cache.cancel(one)
  b.cache.cancel(one)
  b.device.run(plan)
  b.cache.commit(plan)
  assert not one.is_open
  assert two.length == 5
  b.device.check_all()


def test_running_out_of_pages_is_refused_before_anything_is_touched(bench):
  b = bench(num_pages=6)
  held = b.open(list(range(16)))
  b.store([40, 41, 42, 43])
  late = b.cache.open([50] * 12)
  before, epoch = b.cache.state_digest(), b.cache.epoch
  with pytest.raises(errors.OutOfPages, match="needed=3 pages") as caught:
    b.cache.plan([(late, 12)])
  assert caught.value.by_group == {"g0": (3, 2)}
  assert (caught.value.needed, caught.value.available) == (3, 2)
  assert b.cache.state_digest() == before
  assert b.cache.epoch == epoch
  b.cache.close(held)
  b.run(late)


def test_all_groups_are_reserved_or_none(bench):
  b = bench((4, 8), num_pages=(9, 2))
  one, two = b.cache.open([1] * 16), b.cache.open([2] * 8)
  b.run(one)
  before = b.cache.state_digest()
  with pytest.raises(errors.OutOfPages) as caught:
    b.cache.plan([(two, 8)])
  assert caught.value.by_group == {"g0": (2, 5), "g1": (1, 0)}
  assert b.cache.state_digest() == before


def test_epochs_rise_with_every_commit_and_only_eviction_is_kept(bench):
  b = bench(num_pages=4)
  b.store(list(range(16)))
  sequence, epoch = b.cache.open([60] * 8), b.cache.epoch
  plan = b.cache.plan([(sequence, 8)])
  assert b.cache.epoch == epoch + 1
  evicted = b.cache.usage()[0].evictable
  b.cache.abort(plan)
  assert b.cache.usage()[0].evictable == evicted == 2


def test_a_whole_prompt_hit_computes_one_row_into_the_null_page(indexed):
  b = indexed()
  for prompt in ([*range(12)], [*range(20, 33)]):
    b.store(prompt)
    sequence = b.cache.open(prompt)
    assert sequence.matched_tokens == len(prompt) - 1
    plan = b.cache.plan([(sequence, 1)])
    assert not any(len(part.pages) for part in plan.groups)
    packing = tables.Packing(tables.StepShape(1, 1), b.cache.table_widths)
    buffer = b.cache.pack(plan, packing)
    assert packing.field(buffer, "slots", 0).tolist() == [0]
    assert packing.field(buffer, "context_lens").tolist() == [len(prompt)]
    b.device.run(plan)
    b.cache.commit(plan)
    b.decode(sequence, 77, 78, 79, 80, 81)
    b.cache.close(sequence)


def test_without_logits_a_whole_prompt_needs_no_row(indexed):
  b = indexed()
  b.store(PROMPT)
  assert b.matched(PROMPT, want_logits=False) == 10


def test_decode_packs_the_same_as_a_ragged_step(bench):
  buffers = []
  for as_batch in (False, True):
    b = bench((4, 8))
    members = [b.open([i] * (3 + i)) for i in range(4)]
    b.cache.append(members, [9, 8, 7, 6])
    batch = b.cache.batch(members)
    plan = b.cache.plan(batch if as_batch else [(s, 1) for s in members])
    shape = tables.StepShape(8, 8) if as_batch else tables.StepShape(9, 8)
    packing = tables.Packing(shape, b.cache.table_widths)
    buffer = b.cache.pack(plan, packing)
    buffers.append(
      {
        (name, group): packing.field(buffer, name, group)
        for name, group in packing.offsets
      }
    )
  for key, field in buffers[1].items():
    rows = len(field)
    np.testing.assert_array_equal(field, buffers[0][key][:rows], str(key))


# Leases, handles, receipts -------------------------------------------------------


def test_a_reader_keeps_its_rows_while_their_owner_appends(bench):
  b = bench()
  sequence = b.open(PROMPT)
  lease = b.cache.lease(sequence)
  page = sequence.pages()[2]
  assert b.decode(sequence, 5).pages()[2] == page
  b.cache.truncate(sequence, 9)
  assert b.decode(sequence, 6).pages()[2] != page
  b.cache.close(sequence)
  assert b.cache.usage()[0].live == 3
  b.cache.release(lease)
  with pytest.raises(errors.DoubleFree, match="lease 1 is not held"):
    b.cache.release(lease)
  assert b.cache.usage()[0].live == 0


def test_leased_pages_survive_eviction_pressure(indexed):
  b = indexed(num_pages=8)
  saved = b.open(PROMPT)
  lease = b.cache.lease(saved)
  b.cache.close(saved)
  for token in range(40, 60):
    b.store([token] * 17)
  for pool, pages, generations in zip(
    b.cache.pools, lease.group_pages, lease.group_generations, strict=True
  ):
    np.testing.assert_array_equal(pool.generations[pages], generations)
  assert b.matched([*PROMPT, 1]) >= 8
  b.cache.release(lease)
  b.store([70] * 32)
  assert b.matched([*PROMPT, 1]) == 0
  assert b.cache.audit() == ()


def test_a_recycled_page_makes_handles_and_receipts_stale(indexed):
  b = indexed(num_pages=4)
  b.store(PROMPT)
  matched = b.cache.open(PROMPT)
  receipt, (handles,) = matched.receipt, b.cache.handles(matched)
  b.cache.close(matched)
  b.cache.check_receipt(receipt)
  assert receipt.handles() == (handles,)
  b.store([80] * 16)
  with pytest.raises(errors.StaleHandle, match="not 1"):
    b.cache.check_handle(handles[0])
  before = b.cache.state_digest()
  with pytest.raises(errors.StaleReceipt, match="recycled after epoch"):
    b.cache.open(PROMPT, receipt=receipt)
  assert b.cache.state_digest() == before


def test_handles_that_never_were_are_refused(bench):
  b = bench()
  ((handle, *_),) = b.cache.handles(b.open(PROMPT))
  for changes in (
    {"page": 0},
    {"page": 33},
    {"group": 1},
    {"group": -1},
    {"pool": handle.pool + 1},
  ):
    with pytest.raises(errors.BadHandle):
      b.cache.check_handle(dataclasses.replace(handle, **changes))
  with pytest.raises(errors.StaleHandle):
    b.cache.check_handle(
      dataclasses.replace(handle, generation=handle.generation + 1)
    )


def test_step_receipts_carry_digests_when_asked(bench):
  b = bench(record_digests=True)
  sequence = b.cache.open(PROMPT)
  before = b.cache.state_digest()
  receipt = b.run(sequence)
  assert receipt.predecessor_digest == before
  assert receipt.successor_digest == b.cache.state_digest() != before
  assert receipt.new_pages == (3,)
  assert receipt.num_tokens == 10


def test_a_match_receipt_tells_the_four_lengths_apart(bench):
  b = bench()
  b.store(PROMPT)
  receipt = b.cache.open([*PROMPT[:7], 99, 98]).receipt
  assert receipt.semantic_tokens == receipt.matched_tokens == 7
  assert receipt.recomputed_tokens == 2
  assert receipt.copied_rows == 3
  whole = b.cache.open(PROMPT).receipt
  assert (whole.semantic_tokens, whole.matched_tokens) == (10, 9)


# Loss and threads ----------------------------------------------------------------


def test_a_poisoned_cache_starts_again_and_old_sequences_say_so(indexed):
  b = indexed()
  old, _ = b.open(PROMPT), b.open([4] * 6)
  b.cache.plan([(b.cache.open([6] * 3), 3)])
  b.cache.poison()
  assert b.cache.usage()[0].free == 32
  with pytest.raises(errors.DeviceLost, match="are gone"):
    b.cache.fork(old)
  b.device.check_all()
  assert b.matched(PROMPT) == 0
  b.store(PROMPT)
  assert b.matched(PROMPT) == 9


FAULTS = (
  "open.matching",
  "open.matched",
  "plan.counted",
  "plan.evicted",
  "plan.reserving_0",
  "plan.reserving_1",
  "plan.reserved",
  "commit.ready",
)


@pytest.mark.parametrize("phase", FAULTS)
def test_a_fault_in_any_phase_restores_the_predecessor(indexed, phase):
  b = indexed((4, 8), num_pages=(8, 4))
  b.store(list(range(12)))
  if phase == "plan.evicted":
    b.store([33] * 20)
  digests = []

  def strike(name):
    if name == "plan.evicted" or not digests:
      digests[:] = [b.cache.state_digest()]
    if name == phase:
      raise KeyboardInterrupt(name)

  digests = [b.cache.state_digest()]
  b.cache.on_phase = strike
  plan = None
  with pytest.raises(KeyboardInterrupt, match=phase):
    sequence = b.cache.open([0, 1, 2, 3, 4, 5, *[44] * 20])
    digests = [b.cache.state_digest()]
    plan = b.cache.plan([(sequence, 20)])
    b.cache.commit(plan)
  b.cache.on_phase = None
  assert b.cache.state_digest() == digests[0]
  if plan is not None:
    b.cache.abort(plan)
    assert b.cache.state_digest() == digests[0]
  assert b.cache.audit() == ()
  assert b.cache.usage()[0].reserved == 0


def test_threads_see_whole_transactions_only(bench):
  cache = bench(num_pages=64, max_sequences=16).cache
  one_step = threading.Lock()
  failures: list[BaseException] = []

  def serve(rng):
    prompt = [1, 2, 3, 4, 5, *rng.integers(0, 3, rng.integers(1, 20)).tolist()]
    sequence = cache.open(prompt)
    with one_step:
      rows = sequence.num_tokens - sequence.length
      cache.commit(cache.plan([(sequence, rows)]))
    child = cache.fork(sequence)
    cache.truncate(child, 3)
    cache.close(sequence)
    cache.cancel(child)
    assert cache.audit() == ()

  def work(seed):
    rng = np.random.default_rng(seed)
    try:
      for _ in range(60):
        serve(rng)
    except BaseException as error:
      failures.append(error)

  threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not failures, failures[0]
  assert cache.usage()[0].live == 0
