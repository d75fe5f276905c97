"""§0x07, §0x09B: how many rows a prompt is spared, and what is left to do."""

import pytest

from host_allocator import errors
from host_allocator.prefix import hash_chain
from host_allocator.prefix import side_inputs
from tests.article import driver

PROMPT = list(range(100, 150))


def hit(cached, prompt, *, page_size=driver.PAGE, policy, want_logits=True):
  """Opens `prompt` where `cached` has been computed."""
  allocator = driver.make(
    driver.one_group(page_size), 128 // page_size + 24, tail_policy=policy
  )
  allocator.close(driver.prefilled(allocator, cached))
  return allocator, allocator.open(prompt, want_logits=want_logits)


@pytest.mark.parametrize(
  ("cached", "prompt", "full_pages", "copy_rows"),
  [
    # The prompt diverges at token 37, inside its third page.
    (PROMPT, [*PROMPT[:37], 7, *PROMPT[38:]], 32, 37),
    # Three whole pages are cached and the prompt is exactly those.
    (PROMPT[:48], PROMPT[:48], 32, 47),
    # The same three pages, and two tokens more.
    (PROMPT[:48], PROMPT, 48, 48),
    # A prompt of one page that is cached whole.
    (PROMPT[:16], PROMPT[:16], 0, 15),
    (PROMPT[:16], PROMPT[16:32], 0, 0),
  ],
)
def test_rows_spared(cached, prompt, full_pages, copy_rows):
  _, aligned = hit(cached, prompt, policy="full_pages")
  _, exact = hit(cached, prompt, policy="copy_rows")
  assert aligned.matched_tokens == full_pages
  assert exact.matched_tokens == copy_rows


def test_an_immutable_tail_spares_one_row_more():
  _, aligned = hit(PROMPT, PROMPT, policy="full_pages")
  _, exact = hit(PROMPT, PROMPT, policy="copy_rows")
  assert (aligned.matched_tokens, exact.matched_tokens) == (48, 49)


@pytest.mark.parametrize(
  ("num_tokens", "recomputed"), [(48, 16), (50, 2), (16, 16)]
)
def test_what_is_left_takes_one_new_page_however_short(num_tokens, recomputed):
  cached = PROMPT[: num_tokens // 16 * 16]
  allocator, sequence = hit(cached, PROMPT[:num_tokens], policy="full_pages")
  assert sequence.num_tokens - sequence.matched_tokens == recomputed
  live = allocator.usage()[0].live
  plan = allocator.plan([(sequence, recomputed)])
  assert allocator.usage()[0].reserved == 1
  allocator.commit(plan)
  assert allocator.usage()[0].live == live + 1
  group = allocator.layout.groups[0]
  assert group.page_bytes == driver.MIB
  if num_tokens == 50:
    assert recomputed * group.row_bytes == 128 * driver.KIB


@pytest.mark.parametrize(
  ("page_size", "uncapped", "capped"),
  [(4, 40, 36), (8, 40, 32), (16, 32, 16), (32, 0, 0), (64, 0, 0)],
)
def test_whole_page_hits_fall_in_stairs(page_size, uncapped, capped):
  longest, others = PROMPT[:33], (PROMPT[:25], PROMPT[:16])
  for want_logits, spared in ((False, uncapped), (True, capped)):
    found = [
      hit(
        longest,
        prompt,
        page_size=page_size,
        policy="full_pages",
        want_logits=want_logits,
      )[1]
      for prompt in others
    ]
    assert sum(sequence.matched_tokens for sequence in found) == spared
    recomputed = sum(s.num_tokens - s.matched_tokens for s in found)
    assert recomputed == 41 - spared


@pytest.mark.parametrize("page_size", [4, 8, 16, 32, 64])
def test_row_copies_spare_the_same_at_every_page_size(page_size):
  found = [
    hit(PROMPT[:33], prompt, page_size=page_size, policy="copy_rows")[1]
    for prompt in (PROMPT[:25], PROMPT[:16])
  ]
  assert [sequence.matched_tokens for sequence in found] == [24, 15]


@pytest.mark.parametrize("index", ["radix", "hash_chain"])
def test_a_partial_match_never_takes_the_last_page_from_its_prompt(index):
  """Reading ten rows in place would leave no page for the copy."""
  allocator = driver.make(driver.one_group(4), 3, prefix_index=index)
  allocator.close(driver.prefilled(allocator, range(12)))
  lone = allocator.open([*range(10), 50, 51])
  assert lone.matched_tokens == 8
  driver.compute(allocator, lone)
  assert lone.length == 12


@pytest.mark.parametrize("index", ["radix", "hash_chain"])
def test_reading_a_page_that_is_held_anyhow_costs_nothing(index):
  allocator = driver.make(driver.one_group(4), 4, prefix_index=index)
  driver.prefilled(allocator, range(8))
  second = allocator.open([*range(6), 50, 51, 52, 53, 54, 55])
  assert second.matched_tokens == 6
  driver.compute(allocator, second)
  assert second.length == 12


@pytest.fixture(params=["radix", "hash_chain"])
def cached(request):
  """An allocator that has PROMPT, closed, and nothing else."""
  allocator = driver.make(
    driver.two_groups(),
    16,
    prefix_index=request.param,
    vocab_size=1000,
    record_digests=True,
  )
  allocator.close(driver.prefilled(allocator, PROMPT, adapter="a", salt="s"))
  return allocator


MATCHING = {"adapter": "a", "salt": "s"}


def test_the_receipt_of_a_match_is_a_fact(cached):
  sequence = cached.open(PROMPT, **MATCHING)
  receipt = sequence.receipt
  assert (receipt.prompt_tokens, receipt.semantic_tokens) == (50, 50)
  assert (receipt.matched_tokens, receipt.recomputed_tokens) == (49, 1)
  assert receipt.namespace == ""
  for group, handles in enumerate(receipt.handles()):
    assert [handle.page for handle in handles] == sequence.pages(group).tolist()
    for handle in handles:
      cached.check_handle(handle)
  with pytest.raises(AttributeError):
    receipt.matched_tokens = 50
  with pytest.raises(ValueError, match="read-only"):
    receipt.group_pages[0][0] = 1
  with pytest.raises(ValueError, match="read-only"):
    receipt.group_generations[0][0] = 1


def side(offset, length, digest):
  return side_inputs.SideInput(offset, length, digest)


# An opening that must be refused, by what reason.
REFUSED = {
  "no tokens": ({"tokens": []}, "empty_prompt"),
  "nothing at all": ({"tokens": None}, "token_out_of_range"),
  "tokens without an order": ({"tokens": {1, 2}}, "token_out_of_range"),
  "a namespace by number": ({"namespace": 7}, "bad_argument"),
  "a list of adapters": ({"adapter": ["a"]}, "bad_argument"),
  "a salt in bytes": ({"salt": b"s"}, "bad_argument"),
  "a priority in words": ({"priority": "high"}, "bad_argument"),
  "logits wanted five times": ({"want_logits": 5}, "bad_argument"),
  "half an offset": ({"side_inputs": [side(1.5, 2, "x")]}, "bad_side_input"),
  "a side input of two parts": ({"side_inputs": [(3, 2)]}, "bad_side_input"),
  "an identity in bytes": (
    {"side_inputs": [side(3, 2, b"x")]},
    "bad_side_input",
  ),
  "a receipt in words": ({"receipt": "seen it"}, "bad_handle"),
  "a negative token": ({"tokens": [5, -1]}, "token_out_of_range"),
  "a token past the vocabulary": ({"tokens": [1000]}, "token_out_of_range"),
  "a token past 32 bits": ({"tokens": [2**40]}, "token_out_of_range"),
  "half a token": ({"tokens": [1.5]}, "token_out_of_range"),
  "a word": ({"tokens": ["a"]}, "token_out_of_range"),
  "a table of tokens": ({"tokens": [[1, 2]]}, "token_out_of_range"),
  "too many tokens": ({"tokens": [1] * 257}, "prompt_too_long"),
  "a revoked namespace": (
    {"namespace": "revoked"},
    "namespace_revoked",
  ),
  "a side input past the end": (
    {"side_inputs": [side(49, 2, "x")]},
    "bad_side_input",
  ),
  "a side input before the start": (
    {"side_inputs": [side(-1, 2, "x")]},
    "bad_side_input",
  ),
  "a side input of nothing": (
    {"side_inputs": [side(3, 0, "x")]},
    "bad_side_input",
  ),
  "a side input without identity": (
    {"side_inputs": [side(3, 2, "")]},
    "bad_side_input",
  ),
  "side inputs that overlap": (
    {"side_inputs": [side(3, 4, "x"), side(6, 2, "y")]},
    "bad_side_input",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_malformed_opening_is_refused_by_name(cached, name):
  change, reason = REFUSED[name]
  cached.revoke("revoked")
  digest, epoch = cached.state_digest(), cached.epoch
  with pytest.raises(errors.KVError) as caught:
    cached.open(**{"tokens": PROMPT, **MATCHING, **change})
  assert caught.value.reason == reason
  assert cached.state_digest() == digest
  assert cached.epoch == epoch
  assert cached.audit() == ()


def test_a_receipt_of_another_index_or_cache_is_refused(cached):
  other = driver.make(driver.two_groups(), 16)
  foreign = driver.prefilled(other, PROMPT).receipt
  own = cached.open(PROMPT, **MATCHING)
  digest = cached.state_digest()
  for receipt in (foreign, own.receipt):
    with pytest.raises(errors.BadHandle):
      cached.open(PROMPT, adapter="a", salt="t", receipt=receipt)
  assert cached.state_digest() == digest
  cached.drop_index("")
  digest = cached.state_digest()
  with pytest.raises(errors.StaleReceipt, match="left behind"):
    cached.open(PROMPT, **MATCHING, receipt=own.receipt)
  assert cached.state_digest() == digest


def test_what_could_never_be_computed_is_refused():
  small = driver.make(driver.one_group(), 3)
  digest = small.state_digest()
  with pytest.raises(errors.NeverFits, match="num_tokens=49"):
    small.open(list(range(49)))
  assert small.state_digest() == digest


def test_one_sequence_too_many_is_refused(cached):
  for _ in range(8):
    cached.open([1])
  digest = cached.state_digest()
  with pytest.raises(errors.TooManySequences, match="max_sequences=8"):
    cached.open([1])
  assert cached.state_digest() == digest


# Equal tokens that are another computation, or not there any more.
MISSES = {
  "another adapter": {"adapter": "b", "salt": "s"},
  "no adapter": {"salt": "s"},
  "another salt": {"adapter": "a", "salt": "t"},
  "no salt": {"adapter": "a"},
  "adapter and salt exchanged": {"adapter": "s", "salt": "a"},
  "another tenant": {**MATCHING, "namespace": "tenant"},
  "an image under the same tokens": {
    **MATCHING,
    "side_inputs": [side(0, 4, "image")],
  },
}


@pytest.mark.parametrize("name", MISSES)
def test_equal_tokens_of_another_computation_are_a_miss(cached, name):
  assert cached.open(PROMPT, **MISSES[name]).matched_tokens == 0


def test_an_image_ends_the_match_where_it_begins(cached):
  found = cached.open(PROMPT, **MATCHING, side_inputs=[side(20, 4, "image")])
  assert found.matched_tokens == 20
  driver.compute(cached, found)
  again = cached.open(PROMPT, **MATCHING, side_inputs=[side(20, 4, "image")])
  other = cached.open(PROMPT, **MATCHING, side_inputs=[side(20, 4, "other")])
  assert (again.matched_tokens, other.matched_tokens) == (49, 20)


@pytest.mark.parametrize(
  "forget",
  [
    lambda cached: cached.drop_index(),
    lambda cached: cached.drop_index(""),
    lambda cached: cached.poison(),
  ],
  ids=["new weights", "namespace dropped", "device lost"],
)
def test_what_was_forgotten_is_a_miss(cached, forget):
  forget(cached)
  assert cached.open(PROMPT, **MATCHING).matched_tokens == 0


@pytest.mark.parametrize("end", ["plan", "abort", "cancel"])
def test_rows_that_were_not_committed_are_a_miss(cached, end):
  unborn = list(range(200, 250))
  sequence = cached.open(unborn)
  plan = cached.plan([(sequence, 50)])
  if end == "abort":
    cached.abort(plan)
  elif end == "cancel":
    cached.cancel(sequence)
    cached.abort(plan)
  assert cached.open(unborn).matched_tokens == 0


def test_a_missing_ancestor_hides_what_hangs_on_it(cached):
  """Equal tokens behind another beginning are another computation."""
  found = cached.open([7, *PROMPT[1:]], **MATCHING)
  assert found.matched_tokens == 0
  shifted = cached.open(PROMPT[16:], **MATCHING)
  assert shifted.matched_tokens == 0


def test_a_receipt_of_recycled_pages_is_refused_and_nothing_opened(cached):
  held = cached.open(PROMPT, **MATCHING)
  receipt = held.receipt
  cached.close(held)
  cached.open(PROMPT[:48], **MATCHING, receipt=receipt)
  for sequence in cached.rows.open_sequences():
    cached.close(sequence)
  driver.prefilled(cached, range(500, 756))
  digest = cached.state_digest()
  with pytest.raises(errors.StaleReceipt, match="recycled"):
    cached.open(PROMPT, **MATCHING, receipt=receipt)
  assert cached.state_digest() == digest


@pytest.mark.parametrize(
  "key",
  [
    lambda parent, tokens, extras: b"same",
    lambda parent, tokens, extras: tokens,
  ],
  ids=["one digest for all", "one digest under all ancestors"],
)
def test_a_forced_collision_costs_a_miss_and_no_wrong_answer(monkeypatch, key):
  """Tokens and ancestors are the witness."""
  monkeypatch.setattr(
    hash_chain.HashChainIndex.__init__,
    "__kwdefaults__",
    {"key_function": key},
  )
  allocator = driver.make(
    driver.one_group(), 16, prefix_index="hash_chain", tail_policy="full_pages"
  )
  # Both end in the same page of tokens, behind different first pages.
  left = [*[1] * 16, *PROMPT[:16]]
  right = [*[2] * 16, *PROMPT[:16]]
  found = [
    driver.prefilled(allocator, left),
    driver.prefilled(allocator, right),
  ]
  pages = [sequence.pages().tolist() for sequence in found]
  assert not set(pages[0]) & set(pages[1])
  for tokens, own in zip((left, right), pages, strict=True):
    again = allocator.open([*tokens, 5], want_logits=False)
    assert again.pages().tolist() == own[: again.matched_tokens // 16]
  assert allocator.open([*[3] * 16, *PROMPT[:16]]).matched_tokens == 0
  assert allocator.audit() == ()
