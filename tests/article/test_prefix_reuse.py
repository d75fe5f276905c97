"""§0x07, §0x09B: how many rows a prompt is spared, and what is left to do."""

import pytest

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
