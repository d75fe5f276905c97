"""Both prefix indexes: what is found and shared, side inputs, events, memory."""

import subprocess
import sys

import numpy as np
import pytest

from host_allocator import allocator
from host_allocator import errors
from host_allocator import identity
from host_allocator import layout
from host_allocator import telemetry
from host_allocator.prefix import side_inputs

A = list(range(100, 120))


# Matching ----------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 4, 5])
@pytest.mark.parametrize("shared", [1, 3, 4, 7, 8, 20])
def test_rows_are_reused_to_the_token(indexed, page_size, shared):
  b = indexed((page_size,))
  b.store(A)
  prompt = A[:shared] + [7] * 4
  assert b.matched(prompt) == shared
  b.open(prompt)


@pytest.mark.parametrize("shared", [1, 3, 4, 7, 8, 20])
def test_full_pages_reuses_whole_pages_only(indexed, shared):
  b = indexed(tail_policy="full_pages")
  b.store(A)
  assert b.matched(A[:shared] + [7] * 4) == shared // 4 * 4
  assert b.matched(A) == 16


def test_unequal_pages_agree_on_whole_bundles(indexed):
  b = indexed((2, 3), tail_policy="full_pages")
  b.store(A)
  assert b.matched([*A[:17], 7]) == 12


def test_a_token_that_differs_ends_the_match_whatever_follows(indexed):
  b = indexed(tail_policy="full_pages")
  b.store(A)
  assert b.matched([*A[:9], 0, *A[10:], 1]) == 8


def test_a_partly_matching_page_is_read_until_it_is_copied(indexed):
  b = indexed()
  owner = b.open(A[:10])
  reader = b.cache.open([*A[:10], 7, 7])
  assert reader.matched_tokens == 10
  page = owner.pages()[2]
  assert b.cache.pools[0].leases[page] == 1
  b.decode(owner, 50)
  assert owner.pages()[2] == page
  assert b.run(reader).copied_rows == (2,)
  assert b.cache.pools[0].leases[page] == 0


def test_a_partial_match_falls_back_when_its_page_is_the_one_missing(indexed):
  b = indexed(num_pages=4)
  b.store(A[:10])
  sequence = b.cache.open([*A[:9], *[7] * 7])
  assert sequence.matched_tokens == 8
  b.run(sequence)


def test_later_chunks_find_what_others_have_computed_meanwhile(indexed):
  b = indexed()
  follower = b.cache.open([*A, 7])
  b.run((follower, 2))
  leader = b.open(A)
  assert b.cache.rematch(follower) == 18
  assert b.cache.rematch(follower) == 0
  assert follower.pages()[:5].tolist() == leader.pages().tolist()
  b.run(follower)


def test_pages_computed_side_by_side_become_one(indexed):
  b = indexed()
  one, two = b.cache.open(A), b.cache.open(A)
  fork = b.cache.fork(two)
  receipt = b.run(one, two)
  assert receipt.released_duplicates == (5,)
  assert one.pages().tolist() == two.pages().tolist()
  b.cache.close(fork)
  assert b.cache.usage()[0].live == 5


def test_a_fork_is_pointed_at_the_kept_page_too(indexed):
  b = indexed((2, 4))
  keeper, late = b.cache.open(A[:8]), b.open(A[:5])
  b.decode(late, A[5])
  fork = b.cache.fork(late)
  version = fork.table_version
  b.run(keeper)
  assert fork.pages()[2] != keeper.pages()[2]
  b.decode(late, A[6], A[7])
  assert late.pages().tolist() == keeper.pages().tolist()
  assert fork.pages()[2] == keeper.pages()[2]
  assert fork.table_version > version
  b.decode(fork, 1, 2)


def test_generated_tokens_can_be_matched_too(indexed):
  b = indexed()
  sequence = b.decode(b.open(A[:6]), *range(50, 56))
  assert b.matched([*A[:6], *range(50, 56), 1]) == 12
  b.cache.close(sequence)
  assert b.matched([*A[:6], *range(50, 56), 1]) == 12


def test_no_index_finds_nothing(bench):
  b = bench(prefix_index=None)
  b.store(A)
  assert b.matched(A) == 0
  assert b.cache.usage()[0].free == 32


# Side inputs ---------------------------------------------------------------------


def image(offset, digest, length=3):
  return side_inputs.SideInput(offset, length, digest)


def test_another_image_ends_the_match_where_it_begins(indexed):
  b = indexed()
  prompt = [1, 2, 3, 4, 5, 9, 9, 9, 6, 7]
  b.store(prompt, side_inputs=[image(5, "cat")])
  assert b.matched(prompt, side_inputs=[image(5, "cat")]) == 9
  assert b.matched(prompt, side_inputs=[image(5, "dog")]) == 5
  assert b.matched(prompt) == 5
  assert b.matched(prompt, side_inputs=[image(5, "cat", 2)]) == 7


def test_no_page_that_an_image_touches_is_shared_by_full_pages(indexed):
  b = indexed(tail_policy="full_pages")
  prompt = [1, 2, 3, 4, 5, 9, 9, 9, 6, 7]
  b.store(prompt, side_inputs=[image(5, "cat")])
  assert b.matched(prompt, side_inputs=[image(5, "dog")]) == 4


def test_one_long_image_is_not_two_short_ones(indexed):
  b = indexed()
  prompt = [9] * 6
  b.store(prompt, side_inputs=[image(0, "cat", 6)])
  halves = [image(0, "cat"), image(3, "cat")]
  assert b.matched(prompt, side_inputs=halves) == 3


def test_decoding_and_forking_go_on_behind_an_image(indexed):
  b = indexed()
  sequence = b.open([1, 9, 9, 9], side_inputs=[image(1, "cat")])
  child = b.cache.fork(sequence)
  b.decode(sequence, 5, 6, 7, 8, 5)
  b.decode(child, 6, 6, 6, 6)
  b.cache.close(child)
  b.cache.close(sequence)
  again = [1, 9, 9, 9, 5, 6, 7, 8, 5, 1]
  assert b.matched(again, side_inputs=[image(1, "cat")]) == 9
  assert b.matched(again) == 1


@pytest.mark.parametrize(
  ("inputs", "text"),
  [
    ([image(8, "cat")], "leaves the 10 tokens"),
    ([image(-1, "cat")], "leaves the 10 tokens"),
    ([image(0, "cat", 0)], "is empty"),
    ([image(0, "cat"), image(2, "dog")], "overlaps another"),
    ([image(0, "")], "has no digest"),
  ],
)
def test_side_inputs_that_cannot_be_are_refused(indexed, inputs, text):
  cache = indexed().cache
  with pytest.raises(errors.BadSideInput, match=text):
    cache.open(list(range(10)), side_inputs=inputs)
  assert cache.rows.num_open == 0


def test_names_of_images_go_with_what_used_them(indexed):
  b = indexed(num_pages=8)
  for i in range(300):
    b.store([9] * 8, side_inputs=[image(0, f"image {i}", 8)])
  assert len(b.cache.side_input_keys) < 140
  assert b.matched([9] * 8, side_inputs=[image(0, "image 299", 8)]) == 7


def test_image_keys_are_the_same_in_every_process():
  tokens = np.array([9, 9], np.int32)
  found = []
  for order in (("cat", "dog"), ("dog", "cat")):
    names = side_inputs.SideInputKeys()
    keys = {d: names.keys(tokens, [image(0, d, 2)]) for d in order}
    found.append(names.describe(keys["cat"]))
  assert found[0] == found[1]


# Events, residence, memory --------------------------------------------------------


def test_events_let_a_router_mirror_the_index(indexed):
  b = indexed(record_events=True, num_pages=12)
  known: dict[tuple, tuple] = {}

  def mirror():
    for event in b.cache.drain_events():
      if isinstance(event, telemetry.BundlesStored):
        parent = event.parent
        for i, bundle in enumerate(event.bundles):
          known[bundle] = (parent, event.keys[4 * i : 4 * i + 4])
          parent = bundle
      elif isinstance(event, telemetry.BundlesRemoved):
        for bundle in event.bundles:
          del known[bundle]
      else:
        known.clear()

  def matchable():
    """Whole bundles of the index, as (parent, keys) by page identity."""
    pool, found = b.cache.pools[0], {}
    for root in b.cache.index.roots():
      last = {id(root.top): None}
      for node in b.cache.index.nodes(root):
        parent = last[id(node.parent)]
        for i in range((b.cache.index.end(node) - node.start) // 4):
          page = int(node.pages[0][i])
          bundle = (page, int(pool.generations[page]))
          keys = tuple(node.key[4 * i : 4 * i + 4].tolist())
          found[bundle] = (parent, keys)
          parent = bundle
        last[id(node)] = parent
    return found

  rng = np.random.default_rng(0)
  for step in range(40):
    prompt = [*A[: rng.integers(1, 12)], *rng.integers(0, 2, 6).tolist()]
    b.decode(b.open(prompt), *rng.integers(0, 2, 7).tolist())
    mirror()
    assert known == matchable()
    for sequence in b.cache.rows.open_sequences():
      b.cache.close(sequence)
    if step % 10 == 9:
      b.cache.drop_index()
    mirror()
    assert known == matchable()


def test_roots_of_passing_salts_do_not_pile_up(indexed):
  b = indexed(num_pages=8)
  for i in range(100):
    b.store([1, 2, 3, 4, 5], salt=str(i))
  assert len(list(b.cache.index.roots())) <= 8
  assert b.cache.audit() == ()


def memory_of_1800_requests(prefix_index, *, leaks):
  """KiB, cyclic garbage and objects that 1,800 requests leave behind.

  Whatever was cached is dropped before each count, so that objects that are
  still there were leaked. With `leaks`, one is for every other request.
  """
  program = f"""
import gc, random, resource, sys
from host_allocator import allocator, layout
gc.collect()
gc.disable()
layout = layout.CacheLayout.uniform(
  num_layers=1, num_kv_heads=1, head_dim=1, page_size=4)
cache = allocator.KVAllocator(
  layout, num_pages=400, max_sequences=4, max_length=64,
  prefix_index={prefix_index!r})
draw = random.Random(0)
LEAK = []
def serve(count):
  for i in range(count):
    prompt = [draw.randrange(3) for _ in range(6)] + [i, i, i, i, i]
    sequence = cache.open(prompt, salt="" if i % 9 else str(i))
    cache.commit(cache.plan([(sequence, len(prompt) - sequence.length)]))
    child = cache.fork(sequence)
    cache.truncate(child, 3)
    cache.close(sequence)
    cache.close(child)
    if {leaks} and i % 2:
      LEAK.append(bytearray(500))
    if i % 400 == 0:
      cache.drop_index()
  cache.drop_index()
serve(1800)
gc.collect()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
blocks = sys.getallocatedblocks()
serve(1800)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
cyclic = gc.collect()  # Empties the interpreter's own lists of spares, too.
print(cyclic)
print(sys.getallocatedblocks() - blocks)
"""
  found = subprocess.run(
    [sys.executable, "-c", program],
    env={"PYTHONPATH": ":".join(sys.path)},
    capture_output=True,
    check=True,
    text=True,
  ).stdout.split()
  return map(int, found)


@pytest.mark.parametrize("prefix_index", ["radix", "hash_chain"])
def test_memory_is_flat_without_the_cyclic_collector(prefix_index):
  grown_kib, cyclic, objects = memory_of_1800_requests(
    prefix_index, leaks=False
  )
  assert grown_kib < 1500
  assert cyclic < 60
  assert objects < 180, "more than one for every ten requests"


def test_the_memory_test_sees_a_small_leak():
  _, _, objects = memory_of_1800_requests("radix", leaks=True)
  assert objects > 900


def test_root_keys_are_the_identity_modules(indexed):
  b = indexed(semantic_digest="weights")
  b.store(A, namespace="n", adapter="a", salt="s")
  (root,) = b.cache.index.roots()
  digest = layout.CacheLayout(b.cache.layout.groups).digest
  assert root.key == identity.RootKey("n", 0, "weights", digest, "a", "s")
  assert isinstance(b.cache, allocator.KVAllocator)
