"""Openings, appends and steps that cannot be are refused, and leave no trace."""

import numpy as np
import pytest

from host_allocator import errors
from host_allocator import tables

PROMPT = list(range(10))


@pytest.mark.parametrize(
  ("tokens", "error", "text"),
  [
    ([], errors.EmptyPrompt, "at least one token"),
    ([1, -1], errors.TokenOutOfRange, "token id -1 is not within 0..99"),
    ([100], errors.TokenOutOfRange, "token id 100 is not within 0..99"),
    ([2**40], errors.TokenOutOfRange, "token id 1099511627776"),
    ([1.5], errors.TokenOutOfRange, "flat list of whole numbers"),
    (["a"], errors.TokenOutOfRange, "flat list of whole numbers"),
    ([[1], [2]], errors.TokenOutOfRange, "flat list of whole numbers"),
    (np.ones((2, 2), int), errors.TokenOutOfRange, r"of shape \(2, 2\)"),
    (np.ones(2), errors.TokenOutOfRange, "not float64"),
    (np.array([7, 200]), errors.TokenOutOfRange, "token id 200"),
    (
      [1] * 65,
      errors.PromptTooLong,
      "num_tokens=65 is more than max_length=64",
    ),
    ([1] * 50, errors.NeverFits, r"needs \(13,\) pages of \(12,\)"),
  ],
)
def test_a_bad_prompt_is_refused_and_leaves_no_trace(
  bench, tokens, error, text
):
  cache = bench(num_pages=12, vocab_size=100).cache
  before = cache.state_digest()
  with pytest.raises(error, match=text):
    cache.open(tokens)
  assert cache.state_digest() == before
  assert cache.audit() == ()


@pytest.mark.parametrize(
  ("options", "text"),
  [
    ({"num_pages": 0}, "num_pages=0"),
    ({"num_pages": (4, 4)}, "each of 1 groups"),
    ({"max_sequences": 0}, "max_sequences=0"),
    ({"max_length": 0}, "max_length=0"),
    ({"prefix_index": "trie"}, "prefix_index='trie' is not one of"),
    ({"tail_policy": "guess"}, "tail_policy='guess' is not one of"),
    ({"eviction": "random"}, "eviction policy 'random' is not one of"),
    ({"vocab_size": 0}, "vocab_size=0"),
  ],
)
def test_options_that_cannot_be_are_refused(bench, options, text):
  with pytest.raises(errors.LayoutError, match=text):
    bench(**options)


def test_one_sequence_too_many_is_refused(bench):
  cache = bench(max_sequences=2).cache
  one, _ = cache.open([1]), cache.open([2])
  with pytest.raises(errors.TooManySequences, match="max_sequences=2"):
    cache.open([3])
  with pytest.raises(errors.TooManySequences, match="max_sequences=2"):
    cache.fork(one)
  cache.close(one)
  assert cache.open([3]).row == 0


def test_a_closed_sequence_is_refused_everywhere_even_when_its_row_is_reused(
  bench,
):
  b = bench()
  closed = b.open(PROMPT)
  b.cache.close(closed)
  other = b.open([5, 6])
  assert not closed.is_open
  assert other.is_open
  for use in (
    b.cache.close,
    b.cache.cancel,
    b.cache.fork,
    b.cache.rematch,
    b.cache.lease,
    b.cache.handles,
    lambda s: b.cache.truncate(s, 0),
    lambda s: b.cache.append([s], [1]),
    lambda s: b.cache.plan([(s, 1)]),
    lambda s: b.cache.batch([s]),
    lambda s: s.length,
  ):
    with pytest.raises(errors.SequenceClosed, match="is closed"):
      use(closed)
  assert other.tokens.tolist() == [5, 6]
  assert b.cache.audit() == ()


@pytest.mark.parametrize(
  ("rows", "text"),
  [(0, "one row or more"), (-1, "one row or more"), (11, "rows 0..10 asked")],
)
def test_a_step_outside_the_known_tokens_is_refused(bench, rows, text):
  cache = bench().cache
  sequence = cache.open(PROMPT)
  with pytest.raises(errors.BadStep, match=text):
    cache.plan([(sequence, rows)])
  assert cache.usage()[0].reserved == 0


def test_a_batch_that_names_a_sequence_twice_is_refused(bench):
  cache = bench().cache
  sequence = cache.open(PROMPT)
  with pytest.raises(errors.BadStep, match="named twice"):
    cache.plan([(sequence, 1), (sequence, 1)])
  with pytest.raises(errors.BadStep, match="named twice"):
    cache.append([sequence, sequence], [1, 2])
  with pytest.raises(errors.BadStep, match="1 sequences got 2 tokens"):
    cache.append([sequence], [1, 2])
  with pytest.raises(errors.BadStep, match="needs members"):
    cache.plan([])
  assert sequence.num_tokens == 10


def test_a_batch_with_a_closed_member_is_refused(bench):
  b = bench()
  batch = b.cache.batch([b.open([1, 2]), b.open([3, 4])])
  b.cache.append(batch, [5, 6])
  b.cache.commit(b.cache.plan(batch))
  b.cache.close(batch.sequences[0])
  with pytest.raises(errors.SequenceClosed, match="is closed"):
    b.cache.append(batch, [7, 8])
  with pytest.raises(errors.SequenceClosed, match="is closed"):
    b.cache.plan(batch)


def test_a_full_sequence_takes_no_further_token(bench):
  b = bench(max_length=10)
  sequence = b.open(PROMPT)
  with pytest.raises(errors.PromptTooLong, match="max_length=10"):
    b.cache.append([sequence], [1])
  assert sequence.num_tokens == 10


def test_there_is_one_open_step_and_it_ends_once(bench):
  b = bench()
  one, two = b.cache.open([1, 2]), b.cache.open([3, 4])
  plan = b.cache.plan([(one, 2)])
  with pytest.raises(errors.StepOpen, match="another step is open"):
    b.cache.plan([(two, 2)])
  b.cache.commit(plan)
  packing = tables.Packing(tables.StepShape(4, 2), b.cache.table_widths)
  for end in (b.cache.commit, b.cache.abort):
    with pytest.raises(errors.StepClosed, match="not the open step"):
      end(plan)
  with pytest.raises(errors.StepClosed, match="not the open step"):
    b.cache.pack(plan, packing)


def test_members_of_the_open_step_cannot_be_changed(bench):
  b = bench()
  member, other = b.cache.open(PROMPT), b.open([7, 7])
  plan = b.cache.plan([(member, 10)])
  for change in (
    b.cache.fork,
    b.cache.close,
    b.cache.rematch,
    lambda s: b.cache.truncate(s, 1),
  ):
    with pytest.raises(errors.SequenceInStep, match="row 0 is a member"):
      change(member)
  b.cache.close(other)
  b.cache.commit(plan)
  b.cache.close(member)
  assert b.cache.audit() == ()


def test_a_step_is_packed_only_into_a_shape_that_holds_it(bench):
  b = bench()
  sequence = b.cache.open(PROMPT)
  plan = b.cache.plan([(sequence, 10)])
  widths = b.cache.table_widths
  for shape, text in (
    (tables.StepShape(9, 1), "do not fit"),
    (tables.StepShape(16, 16), "do not fit the decode shape"),
  ):
    with pytest.raises(errors.ShapeOverflow, match=text):
      b.cache.pack(plan, tables.Packing(shape, widths))
  with pytest.raises(errors.LayoutError, match="are not the cache's"):
    b.cache.pack(plan, tables.Packing(tables.StepShape(16, 2), (3,)))
