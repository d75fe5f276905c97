"""One allocator beside the brute-force model of what it must do.

Every operation is carried out on both. Refusals are predicted from the model
and must leave `state_digest()` alone; steps are executed on a `Memory`, so that
what a sequence, an index entry or a lease shows is read back from the pages and
compared with the history it stands for.
"""

import dataclasses

import pytest

from host_allocator import allocator as allocators
from host_allocator import errors
from host_allocator import layout
from host_allocator import tables
from host_allocator.prefix import side_inputs as side_inputs_lib
from tests.host_allocator import brute_force

MAX_SEQUENCES = 5
MAX_LENGTH = 24


class InjectedError(Exception):
  """A fault that the test put into a phase of the allocator."""


@dataclasses.dataclass
class Live:
  """What the model knows of an open sequence.

  `keys` are its tokens, or what they stand for under a side input.
  """

  handle: object
  root: tuple
  tokens: list[int]
  keys: list
  length: int
  want_logits: bool
  cancelled: bool = False


@dataclasses.dataclass
class Config:
  """How to build a world."""

  index: str | None = "radix"
  page_sizes: tuple[int, ...] = (4,)
  num_pages: tuple[int, ...] = (8,)
  tail_policy: str = "copy_rows"
  eviction: str = "lru"
  whole_edges: bool = False


class World:
  """An allocator, a memory for each group, and what should be in them."""

  def __init__(self, config: Config) -> None:
    self.config = config
    groups = tuple(
      layout.CacheGroup(f"g{i}", 1, 1, 1, size)
      for i, size in enumerate(config.page_sizes)
    )
    self.layout = layout.CacheLayout(groups)
    self.allocator = allocators.KVAllocator(
      self.layout,
      num_pages=config.num_pages,
      max_sequences=MAX_SEQUENCES,
      max_length=MAX_LENGTH,
      prefix_index=config.index,
      tail_policy=config.tail_policy,
      eviction=config.eviction,
      evict_whole_edges=config.whole_edges,
    )
    self.histories = brute_force.Histories()
    self.memories = [
      brute_force.Memory(count, size)
      for count, size in zip(config.num_pages, config.page_sizes, strict=True)
    ]
    # Rows that a page's owners may rely on, for the rule on writing in place.
    self.valid: list[dict[int, int]] = [{} for _ in groups]
    self.live: list[Live] = []
    self.plan = None
    self.evicted_for_plan = False
    self.members: list[tuple[Live, int]] = []
    self.leases: list[tuple] = []
    self.receipts: list[tuple] = []
    self.closed_namespaces: set[str] = set()
    self.residents = self.read_residents()
    self.last_epoch = 0
    self.tally: dict[str, int] = {}

  # What the allocator shows --------------------------------------------------

  def pages(self, live: Live, group: int) -> list[int]:
    return live.handle.pages(group).tolist()

  def read_residents(self) -> set[brute_force.Resident]:
    """Every bundle the index could hand out, from its nodes."""
    index, unit = self.allocator.index, self.layout.bundle_tokens
    found = set()
    for root in index.roots():
      paths = {id(root.top): ()}
      for node in index.nodes(root):
        start, end = node.start, index.end(node)
        keys = tuple(
          key if key >= 0 else self.allocator.side_input_keys._marks[key]
          for key in node.key[: end - start].tolist()
        )
        path = paths[id(node.parent)] + keys
        paths[id(node)] = path
        for begin in range(start, end, unit):
          stop = min(begin + unit, end)
          pages = tuple(
            tuple(
              node.pages[group][
                (begin - start) // size : -(-(stop - start) // size)
              ].tolist()
            )
            for group, size in enumerate(self.config.page_sizes)
          )
          found.add(brute_force.Resident(root.key, path[:stop], pages))
    return found

  def held(self, group: int) -> dict[int, int]:
    """Page -> holders, from tables and leases."""
    count: dict[int, int] = {}
    for live in self.live:
      for page in self.pages(live, group):
        count[page] = count.get(page, 0) + 1
    for lease, _ in self.leases:
      for page in lease.group_pages[group].tolist():
        count[page] = count.get(page, 0) + 1
    return count

  def available(self, group: int) -> int:
    return self.config.num_pages[group] - len(self.held(group))

  # Operations ----------------------------------------------------------------

  def open(self, tokens, namespace, salt, want_logits, fault=None, image=None):
    """Opens; returns (matched tokens, resident content) or the refusal.

    An image is (offset, length, digest), cut to the tokens.
    """
    keys, side_inputs = list(tokens), []
    if image is not None and image[0] < len(tokens):
      offset, length, digest = image
      length = min(length, len(tokens) - offset)
      side_inputs = [side_inputs_lib.SideInput(offset, length, digest)]
      for i in range(length):
        keys[offset + i] = (digest, tokens[offset + i], i == 0)
    expected = None
    if not tokens:
      expected = errors.EmptyPrompt
    elif len(tokens) > MAX_LENGTH:
      expected = errors.PromptTooLong
    elif any(
      brute_force.pages_needed(len(tokens), size) > count
      for size, count in zip(
        self.config.page_sizes, self.config.num_pages, strict=True
      )
    ):
      expected = errors.NeverFits
    elif namespace in self.closed_namespaces:
      expected = errors.NamespaceRevoked
    elif len(self.live) == MAX_SEQUENCES:
      expected = errors.TooManySequences

    def call():
      return self.allocator.open(
        tokens,
        namespace=namespace,
        salt=salt,
        want_logits=want_logits,
        side_inputs=side_inputs,
      )

    if expected is not None:
      self.refused(expected, call)
      return expected.reason
    if fault is not None:
      self.faulty(fault, call)
      return "fault"
    root = self.root_key(namespace, salt)
    held = [set(self.held(g)) for g in range(len(self.memories))]
    handle = call()
    self.count("open")
    live = Live(handle, root, list(tokens), keys, handle.length, want_logits)
    self.live.append(live)
    assert handle.matched_tokens == handle.length
    self.check_match(live, 0, held)
    if handle.receipt is not None:
      self.receipts.append((handle.receipt, self.receipt_rows(handle.receipt)))
      self.receipts = self.receipts[-6:]
    return handle.matched_tokens, self.contents()

  def rematch(self, live: Live):
    if self.in_step(live):
      self.refused(errors.SequenceInStep, self.allocator.rematch, live.handle)
      return None
    held = [set(self.held(g)) for g in range(len(self.memories))]
    old = live.length
    gained = self.allocator.rematch(live.handle)
    self.count("rematch")
    assert gained == live.handle.length - old >= 0
    live.length = live.handle.length
    self.check_match(live, old, held)
    return gained

  def append(self, members: list[Live], token: int):
    full = any(len(live.tokens) == MAX_LENGTH for live in members)
    handles = [live.handle for live in members]
    tokens = [(token + i) % 3 for i in range(len(members))]
    if full:
      self.refused(errors.PromptTooLong, self.allocator.append, handles, tokens)
      return
    self.allocator.append(handles, tokens)
    self.count("append")
    for live, given in zip(members, tokens, strict=True):
      live.tokens.append(given)
      live.keys.append(given)

  def reserve(self, batch: list[tuple[Live, int]], fault=None):
    """Plans a step; returns whether it is open now."""
    pairs = [(live.handle, count) for live, count in batch]

    def call():
      return self.allocator.plan(pairs)

    if self.plan is not None:
      self.refused(errors.StepOpen, call)
      return True
    beyond = any(
      not 1 <= count <= len(live.tokens) - live.length for live, count in batch
    )
    if not batch or beyond:
      self.refused(errors.BadStep, call)
      return False
    needs = [self.needed(batch, g) for g in range(len(self.memories))]
    short = [need > self.available(g) for g, need in enumerate(needs)]
    if any(short):
      error = self.refused(errors.OutOfPages, call)
      assert error.by_group == {
        group.name: (needs[g], self.available(g))
        for g, group in enumerate(self.layout.groups)
      }
      return False
    free = [pool.free for pool in self.allocator.usage()]
    before = self.residents
    if fault is not None:
      evicts = any(need > have for need, have in zip(needs, free, strict=True))
      if fault == "plan.evicted" and not evicts:
        fault = "plan.reserved"
      self.faulty(fault, call)
      spared = fault == "plan.counted"
      self.check_evicted(before, free, [0] * len(needs) if spared else needs)
      return False
    self.plan = call()
    self.count("plan")
    self.members = batch
    self.evicted_for_plan = self.read_residents() != before
    self.check_evicted(before, free, needs)
    for g, need in enumerate(needs):
      assert self.allocator.usage()[g].reserved == need
    return True

  def execute(self):
    """Carries the open step out on the memory, from its packed buffer."""
    plan, batch = self.plan, self.members
    total = sum(count for _, count in batch)
    one_each = total == len(batch)
    shape = tables.StepShape(total + (0 if one_each else 3), len(batch))
    if one_each is not shape.is_decode:
      shape = tables.StepShape(total + 1, len(batch))
    packing = tables.Packing(shape, self.allocator.table_widths)
    buffer = self.allocator.pack(plan, packing)
    expected_tokens, contents = [], []
    for live, count in batch:
      rows = self.histories.of(live.root, live.keys)
      stop = live.length + count
      expected_tokens += live.tokens[live.length : stop]
      contents += rows[live.length : stop]
    got = packing.field(buffer, "tokens")
    assert got[:total].tolist() == expected_tokens
    assert not got[total:].any()
    for g, memory in enumerate(self.memories):
      sources, targets, counts = plan.copies[g]
      memory.copy(
        list(
          zip(sources.tolist(), targets.tolist(), counts.tolist(), strict=True)
        )
      )
      slots = packing.field(buffer, "slots", g)
      assert not slots[total:].any()
      written = {slot for slot in slots.tolist() if slot >= memory.page_size}
      assert not written & self.readable(g), "a row in use is overwritten"
      memory.write(slots[:total].tolist(), contents)
      table = packing.field(buffer, "page_table", g)
      for i, (live, count) in enumerate(batch):
        stop = live.length + count
        used = brute_force.pages_needed(stop, memory.page_size)
        pages = table[i].tolist()
        # The step itself must see every row before it, and its own.
        rows = self.histories.of(live.root, live.keys)
        assert memory.read(pages, stop) == rows[:stop]
        assert not any(pages[used:])

  def readable(self, group: int) -> set[int]:
    """Slots of rows that somebody may read: sequences, index, leases."""
    size, views = self.config.page_sizes[group], []
    for live in self.live:
      views.append((self.pages(live, group), self.present(live)))
    for lease, _ in self.leases:
      views.append((lease.group_pages[group].tolist(), lease.num_tokens))
    unit = self.layout.bundle_tokens
    for resident in self.residents:
      rows = (len(resident.tokens) - 1) % unit + 1
      views.append((resident.pages[group], rows))
    return {
      pages[row // size] * size + row % size
      for pages, rows in views
      for row in range(rows)
    }

  def commit(self):
    if self.plan is None:
      return
    self.execute()
    written = self.written_pages()
    receipt = self.allocator.commit(self.plan)
    assert receipt.outcome == "committed"
    self.count("commit")
    if any(receipt.released_duplicates):
      self.count("dedupe")
    if any(receipt.copied_rows):
      self.count("copy")
    self.count_written_under_lease(written)
    for g, pages in enumerate(written):
      for page, rows in pages.items():
        self.valid[g][page] = rows
    plan, self.plan = self.plan, None
    for live, count in self.members:
      live.length += count
    self.end_step()
    self.refused(errors.StepClosed, self.allocator.commit, plan)

  def abort(self):
    if self.plan is None:
      return
    if self.evicted_for_plan:
      self.count("abort after eviction")
    receipt = self.allocator.abort(self.plan)
    assert receipt.outcome == "aborted"
    self.count("abort")
    plan, self.plan = self.plan, None
    self.end_step()
    self.refused(errors.StepClosed, self.allocator.abort, plan)

  def end_step(self):
    self.live = [live for live in self.live if not live.cancelled]
    self.members = []

  def fork(self, live: Live):
    if self.in_step(live):
      self.refused(errors.SequenceInStep, self.allocator.fork, live.handle)
      return
    if len(self.live) == MAX_SEQUENCES:
      self.refused(errors.TooManySequences, self.allocator.fork, live.handle)
      return
    child = self.allocator.fork(live.handle)
    self.count("fork")
    self.live.append(
      dataclasses.replace(
        live,
        handle=child,
        tokens=list(live.tokens),
        keys=list(live.keys),
        cancelled=False,
      )
    )
    for g in range(len(self.memories)):
      assert child.pages(g).tolist() == self.pages(live, g)

  def truncate(self, live: Live, length: int):
    if self.in_step(live):
      self.refused(
        errors.SequenceInStep, self.allocator.truncate, live.handle, length
      )
      return
    if not 0 <= length <= len(live.tokens):
      self.refused(
        errors.BadTruncation, self.allocator.truncate, live.handle, length
      )
      return
    private = self.private_tails(live, length)
    for g, size in enumerate(self.config.page_sizes):
      known = {page for r in self.residents for page in r.pages[g]}
      pages = self.pages(live, g)[length // size :][:1]
      if length % size and known.intersection(pages):
        self.count("truncate into a published page")
    self.allocator.truncate(live.handle, length)
    self.count("truncate")
    live.tokens, live.keys = live.tokens[:length], live.keys[:length]
    live.length = min(live.length, length)
    for g, page in private:
      size = self.config.page_sizes[g]
      self.valid[g][page] = min(self.valid[g][page], length % size)

  def close(self, live: Live):
    if self.in_step(live):
      self.refused(errors.SequenceInStep, self.allocator.close, live.handle)
      return
    self.allocator.close(live.handle)
    self.count("close")
    self.live.remove(live)
    self.refused(errors.SequenceClosed, self.allocator.close, live.handle)
    self.check_matchable(live, live.length)

  def cancel(self, live: Live):
    waits = self.in_step(live)
    self.allocator.cancel(live.handle)
    self.count("cancel")
    if waits:
      live.cancelled = True
      return
    self.live.remove(live)
    self.refused(errors.SequenceClosed, self.allocator.fork, live.handle)

  def take_lease(self, live: Live):
    lease = self.allocator.lease(live.handle)
    self.count("lease")
    rows = [
      memory.read(self.pages(live, g), lease.num_tokens)
      for g, memory in enumerate(self.memories)
    ]
    self.leases.append((lease, rows))

  def release_lease(self, number: int):
    lease, _ = self.leases.pop(number % len(self.leases))
    self.allocator.release(lease)
    self.count("release")
    self.refused(errors.DoubleFree, self.allocator.release, lease)

  def drop(self, namespace):
    self.allocator.drop_index(namespace)
    self.count("drop")
    for resident in self.read_residents():
      assert namespace is not None
      assert resident.root[0] != namespace

  def revoke(self, namespace):
    self.allocator.revoke(namespace)
    self.count("revoke")
    self.closed_namespaces.add(namespace)

  def restore(self, namespace):
    self.allocator.namespaces.restore(namespace)
    self.closed_namespaces.discard(namespace)

  def poison(self):
    self.allocator.poison()
    self.count("poison")
    for live in self.live:
      self.refused(errors.DeviceLost, self.allocator.fork, live.handle)
    self.live, self.leases, self.members = [], [], []
    self.plan = None
    for g, memory in enumerate(self.memories):
      size = self.config.page_sizes[g]
      memory.rows = [[brute_force.EMPTY] * size for _ in memory.rows]
      assert self.allocator.usage()[g].free == self.config.num_pages[g]

  def check_receipts(self):
    """An old receipt is taken only while its pages hold what it saw."""
    for receipt, rows in self.receipts:
      try:
        self.allocator.check_receipt(receipt)
      except errors.StaleReceipt:
        self.count("stale receipt")
        continue
      assert self.receipt_rows(receipt) == rows

  # Predictions ---------------------------------------------------------------

  def needed(self, batch, group: int) -> int:
    """Pages a step must reserve: fresh ones, and one for each forced copy."""
    size, need = self.config.page_sizes[group], 0
    holders = self.table_holders(group)
    for live, count in batch:
      present = self.present(live)
      start, stop = max(live.length, present), live.length + count
      need += brute_force.pages_needed(stop, size)
      need -= brute_force.pages_needed(start, size)
      if start % size and stop > start:
        page = self.pages(live, group)[start // size]
        borrowed = self.borrowed(live, group)
        shared = holders[page] > 1 or borrowed
        need += shared or self.valid[group].get(page, 0) > start % size
    return need

  def table_holders(self, group: int) -> dict[int, int]:
    count: dict[int, int] = {}
    for live in self.live:
      pages = self.pages(live, group)
      if self.borrowed(live, group):
        pages = pages[:-1]
      for page in pages:
        count[page] = count.get(page, 0) + 1
    return {**dict.fromkeys(self.held(group), 0), **count}

  def borrowed(self, live: Live, group: int) -> bool:
    """Whether the last page is an index's, to be copied before writing."""
    return bool(self.allocator.rows.leased[group][live.handle.row])

  def present(self, live: Live) -> int:
    return int(self.allocator.rows.present[live.handle.row])

  def written_pages(self) -> list[dict[int, int]]:
    """Page -> valid rows after the open step, for pages it writes."""
    result = []
    for g, size in enumerate(self.config.page_sizes):
      part, pages = self.plan.groups[g], {}
      for i, (live, count) in enumerate(self.members):
        table = dict(enumerate(self.pages(live, g)))
        for member, column, page in zip(
          part.members.tolist(),
          part.columns.tolist(),
          part.pages.tolist(),
          strict=True,
        ):
          if member == i:
            table[column] = page
        start = max(live.length, self.present(live))
        stop = live.length + count
        for column in range(
          start // size, brute_force.pages_needed(stop, size)
        ):
          if stop > start:
            pages[table[column]] = min(stop - column * size, size)
      result.append(pages)
    return result

  def count_written_under_lease(self, written):
    for g, pages in enumerate(written):
      leased = {p for lease, _ in self.leases for p in lease.group_pages[g]}
      if leased & set(pages):
        self.count("append under a lease")

  def private_tails(self, live: Live, length: int) -> list[tuple[int, int]]:
    """Pages whose valid rows a truncation lowers: nobody else knows them."""
    found = []
    if length >= self.present(live):
      return found
    for g, size in enumerate(self.config.page_sizes):
      if not length % size:
        continue
      page = self.pages(live, g)[length // size]
      known = {p for r in self.residents for p in r.pages[g]}
      last = length // size == len(self.pages(live, g)) - 1
      if last and self.borrowed(live, g):
        continue
      if self.held(g)[page] == 1 and page not in known:
        found.append((g, page))
    return found

  def root_key(self, namespace, salt):
    return tuple(self.allocator.namespaces.authorize(namespace, salt=salt))

  def contents(self) -> frozenset:
    return frozenset((r.root, r.tokens) for r in self.read_residents())

  def receipt_rows(self, receipt) -> list[list[int]]:
    return [
      memory.read(pages.tolist(), receipt.matched_tokens)
      for memory, pages in zip(self.memories, receipt.group_pages, strict=True)
    ]

  def in_step(self, live: Live) -> bool:
    return self.plan is not None and any(
      live is member for member, _ in self.members
    )

  def count(self, name: str) -> None:
    self.tally[name] = self.tally.get(name, 0) + 1

  # Checks --------------------------------------------------------------------

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

  def fits(self, live: Live, matched: int, held, choose) -> bool:
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

  def root_alive(self, live: Live) -> bool:
    return any(root.key == live.root for root in self.allocator.index.roots())

  def check_matchable(self, live: Live, length: int):
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


def unfinished(world: World) -> list[Live]:
  """Sequences with rows to compute."""
  return [live for live in world.live if live.length < len(live.tokens)]


def finished(world: World) -> list[Live]:
  """Sequences whose every token is computed, and that may have one more."""
  return [
    live for live in world.live if live.length == len(live.tokens) < MAX_LENGTH
  ]


def some_work(world: World, number: int, width: int, count: int):
  """Up to `width` sequences with up to `count` rows each, at least one."""
  waiting = unfinished(world)
  waiting = waiting[number % len(waiting) :] if width < 8 else waiting
  return [
    (live, min(count, len(live.tokens) - live.length))
    for live in waiting[:width]
  ]


def all_work(live: Live):
  """What is left to compute of one sequence, as a batch."""
  left = len(live.tokens) - live.length
  return [(live, left)] if left else []
