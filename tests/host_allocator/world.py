"""One allocator beside the brute-force model of what it must do.

Every operation is carried out on both. Refusals are predicted from the model
and must leave `state_digest()` alone; steps are executed on a `Memory`, so that
what a sequence, an index entry or a lease shows is read back from the pages and
compared with the history it stands for.
"""

import dataclasses

from host_allocator import errors
from host_allocator import tables
from host_allocator.prefix import side_inputs as side_inputs_lib
from tests.host_allocator import brute_force
from tests.host_allocator import checks
from tests.host_allocator import view


class World(checks.Checks):
  """The operations, carried out on the allocator and on the model."""

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
    elif len(tokens) > view.MAX_LENGTH:
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
    elif len(self.live) == view.MAX_SEQUENCES:
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
    live = view.Live(
      handle, root, list(tokens), keys, handle.length, want_logits
    )
    self.live.append(live)
    assert handle.matched_tokens == handle.length
    self.check_match(live, 0, held)
    if handle.receipt is not None:
      self.receipts.append((handle.receipt, self.receipt_rows(handle.receipt)))
      self.receipts = self.receipts[-6:]
    return handle.matched_tokens, self.contents()

  def rematch(self, live: view.Live):
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

  def append(self, members: list[view.Live], token: int):
    full = any(len(live.tokens) == view.MAX_LENGTH for live in members)
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

  def reserve(
    self, batch: list[tuple[view.Live, int]], fault=None, kept_batch=None
  ):
    """Plans a step; returns whether it is open now."""
    pairs = [(live.handle, count) for live, count in batch]

    def call():
      return self.allocator.plan(kept_batch or pairs)

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

  def decode_kept(self, token: int):
    """Decodes a batch that is kept from step to step, as engines do."""
    if self.plan is not None:
      return
    if self.kept is None:
      members = finished(self)
      if not members:
        return
      handles = [live.handle for live in members]
      self.kept = (self.allocator.batch(handles), members)
    batch, members = self.kept
    tokens = [(token + i) % 3 for i in range(len(members))]
    if not all(any(live is each for each in self.live) for live in members):
      self.refused(errors.SequenceClosed, self.allocator.append, batch, tokens)
      self.refused(errors.SequenceClosed, self.allocator.plan, batch)
      self.kept = None
      return
    able = finished(self)
    if not all(any(live is each for each in able) for live in members):
      self.kept = None
      return
    self.allocator.append(batch, tokens)
    self.count("append kept")
    for live, given in zip(members, tokens, strict=True):
      live.tokens.append(given)
      live.keys.append(given)
    if self.reserve([(live, 1) for live in members], kept_batch=batch):
      self.commit()

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

  def fork(self, live: view.Live):
    if self.in_step(live):
      self.refused(errors.SequenceInStep, self.allocator.fork, live.handle)
      return
    if len(self.live) == view.MAX_SEQUENCES:
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

  def truncate(self, live: view.Live, length: int):
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

  def close(self, live: view.Live):
    if self.in_step(live):
      self.refused(errors.SequenceInStep, self.allocator.close, live.handle)
      return
    self.allocator.close(live.handle)
    self.count("close")
    self.live.remove(live)
    self.refused(errors.SequenceClosed, self.allocator.close, live.handle)
    self.check_matchable(live, live.length)

  def cancel(self, live: view.Live):
    waits = self.in_step(live)
    self.allocator.cancel(live.handle)
    self.count("cancel")
    if waits:
      live.cancelled = True
      return
    self.live.remove(live)
    self.refused(errors.SequenceClosed, self.allocator.fork, live.handle)

  def take_lease(self, live: view.Live):
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
    self.plan = self.kept = None
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


def unfinished(world: World) -> list[view.Live]:
  """Sequences with rows to compute."""
  return [live for live in world.live if live.length < len(live.tokens)]


def finished(world: World) -> list[view.Live]:
  """Sequences whose every token is computed, and that may have one more."""
  return [
    live
    for live in world.live
    if live.length == len(live.tokens) < view.MAX_LENGTH
  ]


def some_work(world: World, number: int, width: int, count: int):
  """Up to `width` sequences with up to `count` rows each, at least one."""
  waiting = unfinished(world)
  waiting = waiting[number % len(waiting) :] if width < 8 else waiting
  return [
    (live, min(count, len(live.tokens) - live.length))
    for live in waiting[:width]
  ]


def all_work(live: view.Live):
  """What is left to compute of one sequence, as a batch."""
  left = len(live.tokens) - live.length
  return [(live, left)] if left else []
