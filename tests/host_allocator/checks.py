"""What must hold of an allocator between any two operations."""

import pytest

from tests.host_allocator import brute_force
from tests.host_allocator import view


class InjectedError(Exception):
  """A fault that the test put into a phase of the allocator."""


class Checks(view.View):
  """Comparisons of an allocator with the model beside it."""

  def refused(self, error, call, *arguments):
    """The call must raise `error` and leave the state as it was."""
    before = self.allocator.state_digest()
    with pytest.raises(error) as caught:
      call(*arguments)
    assert caught.value.reason == error.reason
    assert self.allocator.state_digest() == before
    self.count(f"refused {error.reason}")
    return caught.value

  def faulty(self, fault: str, call):
    """Runs the call with a fault in one phase; it must undo what it did."""
    digest, before = self.allocator.state_digest(), self.contents()
    reserved = [pool.reserved for pool in self.allocator.usage()]

    def strike(phase):
      if phase.startswith(fault):
        raise InjectedError(phase)

    self.allocator.on_phase = strike
    try:
      call()
    except InjectedError:
      pass
    else:
      raise AssertionError(f"no phase {fault} was passed")
    finally:
      self.allocator.on_phase = None
    self.count(f"fault {fault}")
    if self.contents() == before:
      assert self.allocator.state_digest() == digest
    assert [pool.reserved for pool in self.allocator.usage()] == reserved

  def check_match(self, live, old, held):
    """The match is the longest there is, or falls back where it must."""
    whole = self.config.tail_policy == "full_pages"
    unit = self.layout.bundle_tokens
    if self.config.index is None or not self.root_alive(live):
      assert live.length == old
      return
    best = brute_force.longest_match(
      self.residents,
      live.root,
      live.keys,
      unit=unit,
      want_logits=live.want_logits,
      whole_units=whole,
    )
    got = live.length
    if best <= old or best == self.present(live):
      # A row that is shown already may be computed for its logits only.
      assert got in (best, old)
      return
    if whole:
      assert got == best
      return
    aligned = best // unit * unit
    if got == best > aligned:
      # Part of a bundle is borrowed; that must not cost it its place.
      assert self.fits(live, best, held, min) or not self.fits(
        live, aligned, held, min
      )
    elif got != best:
      assert got == max(aligned, old), f"matched {got} rows, not {best}"
      assert not self.fits(live, best, held, max), (
        f"fell back from {best} rows to {got} although there is room"
      )

  def fits(self, live: view.Live, matched: int, held, choose) -> bool:
    """Whether a prompt has room now if `matched` rows are taken over.

    Where several bundles begin alike, `choose` (min or max) says which is
    taken: the one that costs fewest or most pages.
    """
    unit = self.layout.bundle_tokens
    for g, size in enumerate(self.config.page_sizes):
      taken = set()
      for stop in range(unit, matched + unit, unit):
        prefix = tuple(live.keys[: min(stop, matched)])
        taken |= choose(
          (
            set(
              r.pages[g][
                : brute_force.pages_needed(matched - stop + unit, size)
              ]
            )
            for r in self.residents
            if r.root == live.root
            and r.tokens[: len(prefix)] == prefix
            and stop - unit < len(r.tokens) <= stop
          ),
          key=lambda pages: len(pages - held[g]),
        )
      need = brute_force.pages_needed(len(live.tokens), size) - matched // size
      room = self.config.num_pages[g] - self.allocator.usage()[g].reserved
      if need > room - len(held[g] | taken):
        return False
    return True

  def root_alive(self, live: view.Live) -> bool:
    return any(root.key == live.root for root in self.allocator.index.roots())

  def check_matchable(self, live: view.Live, length: int):
    """What was committed can be found, as far as the policy goes."""
    if self.config.index is None or live.root[0] in self.closed_namespaces:
      return
    unit = self.layout.bundle_tokens
    whole = self.config.tail_policy == "full_pages"
    if not any(root.key == live.root for root in self.allocator.index.roots()):
      return
    found = brute_force.longest_match(
      self.read_residents(),
      live.root,
      live.keys[:length],
      unit=unit,
      want_logits=False,
      whole_units=whole,
    )
    bundles = length // unit * unit
    # A tail may have been replaced by a longer one, and that one evicted.
    exact = not whole and "evict" not in self.tally
    assert found == length if exact else bundles <= found <= length

  def check_evicted(self, before, free, needs):
    """Only what nobody holds goes, and no more of it than was short."""
    after = self.read_residents()
    held = [set(self.held(g)) for g in range(len(self.memories))]
    kept = {(r.root, r.tokens) for r in after}
    for resident in before - after:
      if (resident.root, resident.tokens) not in kept:
        assert not all(
          set(pages) <= held[g] for g, pages in enumerate(resident.pages)
        ), f"{resident.tokens} was evicted although all of it is held"
    for g in range(len(self.memories)):
      lost = {p for r in before - after for p in r.pages[g]}
      lost -= {p for r in after for p in r.pages[g]}
      short = max(needs[g] - free[g], 0)
      if len(self.memories) == 1 and not self.config.whole_edges:
        assert not lost & held[g], "a held page was evicted"
        assert len(lost) == short, f"{len(lost)} pages evicted, {short} short"
      if not short and len(self.memories) == 1:
        assert not lost
    if before - after:
      self.count("evict")
    self.residents = after

  def check(self, *, lost_index: bool = False):
    """Everything that must hold between two operations."""
    findings = self.allocator.audit()
    assert findings == (), findings
    assert self.allocator.epoch >= self.last_epoch
    self.last_epoch = self.allocator.epoch
    residents = self.read_residents()
    brute_force.check_prefix_closed(residents, self.layout.bundle_tokens)
    self.check_contents(residents)
    self.check_partition(residents)
    if not lost_index:
      kept = {(r.root, r.tokens) for r in residents}
      for resident in self.residents:
        assert (resident.root, resident.tokens) in kept or any(
          root == resident.root
          and tokens[: len(resident.tokens)] == resident.tokens
          for root, tokens in kept
        ), "a prefix was lost without an eviction"
    self.residents = residents

  def check_contents(self, residents):
    histories = {}
    for live in self.live:
      rows = self.histories.of(live.root, live.keys)
      assert live.handle.length == live.length
      assert live.handle.tokens.tolist() == live.tokens
      shown = self.present(live)
      assert live.length <= shown <= max(live.length, len(live.tokens))
      for g, memory in enumerate(self.memories):
        pages = self.pages(live, g)
        assert 0 not in pages
        assert memory.read(pages, shown) == rows[:shown], (
          "a sequence sees rows that are not its own"
        )
    for resident in residents:
      start = (len(resident.tokens) - 1) // self.layout.bundle_tokens
      start *= self.layout.bundle_tokens
      key = (resident.root, resident.tokens)
      if key not in histories:
        histories[key] = self.histories.of(*key)[start:]
      for g, memory in enumerate(self.memories):
        rows = memory.read(resident.pages[g], len(histories[key]))
        assert rows == histories[key], "the index names rows that are not there"
    for lease, rows in self.leases:
      for g, memory in enumerate(self.memories):
        pages = lease.group_pages[g].tolist()
        assert memory.read(pages, lease.num_tokens) == rows[g], (
          "rows changed under a lease"
        )
    self.check_shared(residents)

  def check_shared(self, residents):
    """Equal whole bundles of open sequences are one bundle (R11)."""
    unit = self.layout.bundle_tokens
    pages = {
      (r.root, r.tokens): r.pages
      for r in residents
      if len(r.tokens) % unit == 0
    }
    for live in self.live:
      if not self.root_alive(live):
        continue
      for stop in range(unit, live.length + 1, unit):
        expected = pages.get((live.root, tuple(live.keys[:stop])))
        assert expected is not None, "a committed bundle cannot be matched"
        for g, size in enumerate(self.config.page_sizes):
          own = self.pages(live, g)[(stop - unit) // size : stop // size]
          assert tuple(own) == expected[g], "equal bundles are held twice"

  def check_partition(self, residents):
    for g, usage in enumerate(self.allocator.usage()):
      held = set(self.held(g))
      known = {page for r in residents for page in r.pages[g]}
      reserved = set()
      if self.plan is not None:
        reserved = set(self.plan.groups[g].pages.tolist())
      assert not reserved & (held | known)
      assert usage.total == self.config.num_pages[g]
      assert usage.live == len(held)
      assert usage.evictable == len(known - held)
      assert usage.reserved == len(reserved)
      assert usage.free == usage.total - len(held | known | reserved)
