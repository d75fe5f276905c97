"""KVAllocator: open, plan, commit, abort, fork, truncate, close.

Every public method is one transaction under one lock: it either happens whole
or raises with the state as it was (R2).  Rows walk like this::

    open      tokens known, the longest indexed prefix in the table
    append    one more token known
    plan      pages reserved, row copies listed; nothing visible yet
    pack      the step as one int32 buffer
    commit    tables, lengths, references and index entries, all at once
    close     references dropped; what is in the index stays matchable
"""

import itertools
import threading
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import numpy as np

from host_allocator import audit as audit_lib
from host_allocator import errors
from host_allocator import identity
from host_allocator import layout as layout_lib
from host_allocator import pages as pages_lib
from host_allocator import receipts
from host_allocator import sequences as sequences_lib
from host_allocator import steps
from host_allocator import tables
from host_allocator.prefix import base
from host_allocator.prefix import none
from host_allocator.prefix import radix

TAIL_POLICIES = ("copy_rows", "full_pages")
_INDEXES: dict[str, Any] = {"radix": radix.RadixIndex}
_NO_PAGES = np.zeros(0, np.int32)


class KVAllocator:
  """The host side of one KV cache.

  Args:
    layout: Cache groups; each gets a pool of its own.
    num_pages: Pages that can be allocated, of every group or per group; ids run
      from 1, page 0 is the null page.
    max_sequences: Most sequences open at once.
    max_length: Most tokens of one sequence.
    prefix_index: "radix", "hash_chain", or None for no reuse.
    tail_policy: "copy_rows" reuses to the token, "full_pages" whole bundles.
    eviction: One of `prefix.eviction.POLICIES`.
    vocab_size: Token ids lie below it; None for no upper bound.
    record_digests: Put `state_digest()` before and after into step receipts.
    semantic_digest: Identity of the model whose K/V is kept.
    evict_whole_edges: See `prefix.forest.Forest`.
  """

  def __init__(
    self,
    layout: layout_lib.CacheLayout,
    *,
    num_pages: int | Sequence[int],
    max_sequences: int,
    max_length: int,
    prefix_index: str | None = "radix",
    tail_policy: str = "copy_rows",
    eviction: str = "lru",
    vocab_size: int | None = None,
    record_digests: bool = False,
    semantic_digest: str = "",
    evict_whole_edges: bool = False,
  ):
    per_group = (
      (num_pages,) * len(layout.groups)
      if isinstance(num_pages, int)
      else tuple(num_pages)
    )
    if len(per_group) != len(layout.groups) or min(per_group) < 1:
      raise errors.LayoutError(
        f"{num_pages=} must be at least 1 for each of {len(layout.groups)}"
        " groups"
      )
    if max_sequences < 1 or max_length < 1:
      raise errors.LayoutError(
        f"{max_sequences=} and {max_length=} must be at least 1"
      )
    if tail_policy not in TAIL_POLICIES:
      raise errors.LayoutError(f"{tail_policy=} is not one of {TAIL_POLICIES}")
    if prefix_index is not None and prefix_index not in _INDEXES:
      raise errors.LayoutError(
        f"{prefix_index=} is not one of {sorted(_INDEXES)} or None"
      )
    self.layout = layout
    self.max_sequences = max_sequences
    self.max_length = max_length
    self.tail_policy = tail_policy
    self.vocab_size = vocab_size
    self.record_digests = record_digests
    self.namespaces = identity.Namespaces(semantic_digest, layout.digest)
    self.pools = tuple(
      pages_lib.PagePool(group.page_size, count)
      for group, count in zip(layout.groups, per_group, strict=True)
    )
    self.rows = sequences_lib.SequenceRows(layout, max_sequences, max_length)
    self.index: base.PrefixIndex = none.NoIndex()
    if prefix_index is not None:
      self.index = _INDEXES[prefix_index](
        layout,
        self.rows,
        self.pools,
        eviction=eviction,
        whole_edges=evict_whole_edges,
        partial_tails=tail_policy == "copy_rows",
      )
    self.epoch = 0
    self._bundle = layout.bundle_tokens
    self._token_limit = 2**31 if vocab_size is None else vocab_size
    self._plan: steps.StepPlan | None = None
    self._leases: dict[int, receipts.Lease] = {}
    self._lease_numbers = itertools.count(1)
    self._lock = threading.RLock()
    # Called with the name of each phase; tests make it raise.
    self.on_phase: Callable[[str], None] | None = None

  # Opening -------------------------------------------------------------------

  def open(
    self,
    tokens: Sequence[int] | np.ndarray,
    *,
    namespace: str = "",
    adapter: str = "",
    salt: str = "",
    side_inputs: Sequence[Any] = (),
    priority: int = 0,
    want_logits: bool = True,
  ) -> sequences_lib.Sequence:
    """Opens a sequence on the longest prefix that its index already holds.

    Args:
      tokens: Token ids, `[n]`, at least one.
      namespace: Isolation domain; authorised before any look-up.
      adapter: Identity of the adapter that will compute the rows.
      salt: Shared by those who may share pages.
      side_inputs: Images or prompt embeddings at token offsets.
      priority: For the "priority" eviction policy.
      want_logits: Whether the last row must be computed even if it is there.

    Returns:
      The sequence; its `matched_tokens` rows need not be computed.

    Raises:
      EmptyPrompt, TokenOutOfRange, PromptTooLong, NeverFits, TooManySequences,
      NamespaceRevoked: The state is as before.

    Ownership: the sequence holds its pages until it is closed.
    """
    ids = self._check_tokens(tokens)
    if not len(ids):
      raise errors.EmptyPrompt("a sequence needs at least one token")
    self._check_length(len(ids))
    with self._lock:
      key = self.namespaces.authorize(namespace, adapter=adapter, salt=salt)
      sequence = self.rows.take()
      row = sequence.row
      try:
        sequence.priority, sequence.want_logits = priority, want_logits
        self.rows.tokens[row, : len(ids)] = ids
        self.rows.num_tokens[row] = len(ids)
        sequence.root = self.index.root(key)
        sequence.root.num_sequences += 1
        sequence.node = sequence.root.top
        self._phase("open.matching")
        self._match(sequence)
        sequence.matched_tokens = int(self.rows.length[row])
        self._phase("open.matched")
      except BaseException:
        self._release(sequence)
        raise
      return sequence

  def rematch(self, sequence: sequences_lib.Sequence) -> int:
    """Looks again: somebody may have computed the next rows meanwhile.

    Returns:
      Rows that need not be computed any more; 0 where nothing was found.
    """
    with self._lock:
      row = self._idle_row(sequence)
      before = int(self.rows.length[row])
      if before < self.rows.num_tokens[row] - sequence.want_logits:
        self._match(sequence)
      return int(self.rows.length[row]) - before

  def append(
    self,
    sequences: Sequence[sequences_lib.Sequence],
    tokens: Sequence[int] | np.ndarray,
  ) -> None:
    """Adds one known token to each sequence; its row is computed later.

    Raises:
      TokenOutOfRange, PromptTooLong, SequenceClosed, BadStep: Nothing was
        added.
    """
    ids = self._check_tokens(tokens)
    with self._lock:
      rows = self._batch_rows(sequences)
      if len(rows) != len(ids):
        raise errors.BadStep(f"{len(rows)} sequences got {len(ids)} tokens")
      known = self.rows.num_tokens[rows]
      if len(rows) and known.max() >= self.max_length:
        raise errors.PromptTooLong(
          f"a sequence has max_length={self.max_length} tokens already"
        )
      self.rows.tokens[rows, known] = ids
      self.rows.num_tokens[rows] = known + 1

  def fork(self, sequence: sequences_lib.Sequence) -> sequences_lib.Sequence:
    """A second sequence with the same tokens and rows, sharing every page.

    Whoever of the two first writes to their shared last page copies it.

    Raises:
      SequenceInStep, SequenceClosed, TooManySequences.
    """
    with self._lock:
      row = self._idle_row(sequence)
      child = self.rows.take()
      other, rows = child.row, self.rows
      known = int(rows.num_tokens[row])
      rows.tokens[other, :known] = rows.tokens[row, :known]
      for field in (rows.num_tokens, rows.length, rows.present):
        field[other] = field[row]
      rows.published[other] = rows.published[row]
      rows.published[other] -= rows.published[row] % self._bundle
      for group, pool in enumerate(self.pools):
        pages = rows.pages(row, group)
        rows.table_rows[group][other][: len(pages)] = pages
        leased = rows.leased[group][row]
        if leased:
          rows.leased[group][other] = leased
          pool.hold(pages[:-1])
          pool.lease(pages[-1:])
        else:
          pool.hold(pages)
      child.root, child.node = sequence.root, sequence.node
      child.lease_node = sequence.lease_node
      child.priority = sequence.priority
      child.want_logits = sequence.want_logits
      child.matched_tokens = int(rows.length[row])
      child.root.num_sequences += 1
      self.epoch += 1
      return child

  def truncate(
    self, sequence: sequences_lib.Sequence, length: int
  ) -> receipts.ReleaseReceipt:
    """Cuts a sequence to its first `length` tokens and rows.

    Raises:
      BadTruncation: Where `length` is negative or more than the known tokens.
      SequenceInStep, SequenceClosed.
    """
    with self._lock:
      row, rows = self._idle_row(sequence), self.rows
      known, before = int(rows.num_tokens[row]), int(rows.length[row])
      if not 0 <= length <= known:
        raise errors.BadTruncation(f"{length=} is not within 0..{known}")
      rows.num_tokens[row] = length
      dropped = [0] * len(self.pools)
      if length < rows.present[row]:
        self.index.shorten(sequence, length)
        for group in range(len(self.pools)):
          dropped[group] = self._cut_table(row, group, length)
        rows.present[row] = length
        rows.length[row] = min(before, length)
        rows.versions[row] += 1
        if not any(rows.leased[group][row] for group in range(len(dropped))):
          sequence.lease_node = None
      self.epoch += 1
      return receipts.ReleaseReceipt(
        "truncated", self.epoch, sequence.generation, before, tuple(dropped)
      )

  def close(self, sequence: sequences_lib.Sequence) -> receipts.ReleaseReceipt:
    """Ends a sequence; its committed rows stay matchable until evicted.

    Raises:
      SequenceClosed, SequenceInStep.
    """
    with self._lock:
      self._idle_row(sequence)
      return self._close(sequence, "closed")

  def cancel(self, sequence: sequences_lib.Sequence) -> receipts.ReleaseReceipt:
    """Closes a sequence, or marks a member of the open step to be closed.

    A member's pages are reported as `pending` until the step ends.
    """
    with self._lock:
      row = sequence.row
      if sequence.in_step:
        sequence.cancelled = True
        length = int(self.rows.length[row])
        return receipts.ReleaseReceipt(
          "cancel_pending",
          self.epoch,
          sequence.generation,
          length,
          (0,) * len(self.pools),
        )
      return self._close(sequence, "cancelled")

  # Steps ---------------------------------------------------------------------

  def plan(
    self, batch: Iterable[tuple[sequences_lib.Sequence, int]]
  ) -> steps.StepPlan:
    """Reserves what computing the next `n` rows of each sequence needs.

    Evicts where it must, which is an epoch of its own and stays.

    Args:
      batch: (sequence, rows to compute) for each member.

    Returns:
      The plan; exactly one of `commit` and `abort` must end it.

    Raises:
      OutOfPages: Free and evictable pages do not suffice; nothing was touched.
      StepOpen, BadStep, SequenceClosed.
    """
    pairs = tuple(batch)
    with self._lock:
      if self._plan is not None:
        raise errors.StepOpen("another step is open: commit or abort it first")
      members = tuple(sequence for sequence, _ in pairs)
      rows = self._batch_rows(members)
      counts = np.array([count for _, count in pairs], np.int32)
      return self._reserve(members, rows, counts)

  def commit(self, plan: steps.StepPlan) -> receipts.StepReceipt:
    """Publishes a step: tables, lengths, references, index, in one go."""
    with self._lock:
      self._check_open(plan)
      before = self._recorded_digest()
      self._phase("commit.ready")
      self._publish_tables(plan)
      released = self._publish_prefixes(plan)
      self.epoch += 1
      self._end(plan)
      return self._step_receipt("committed", plan, released, before)

  def abort(self, plan: steps.StepPlan) -> receipts.StepReceipt:
    """Gives a step's reservation back; the state is the one before it."""
    with self._lock:
      self._check_open(plan)
      before = self._recorded_digest()
      for pool, group in zip(self.pools, plan.groups, strict=True):
        pool.give_back(group.pages)
      self._end(plan)
      released = [0] * len(self.pools)
      return self._step_receipt("aborted", plan, released, before)

  def pack(self, plan: steps.StepPlan, packing: tables.Packing) -> np.ndarray:
    """The step as one fresh int32 buffer; see `tables.Packing`."""
    with self._lock:
      self._check_open(plan)
      return steps.pack(plan, self.rows, packing)

  # Questions -----------------------------------------------------------------

  @property
  def table_widths(self) -> tuple[int, ...]:
    """Pages a sequence can have, per group."""
    return tuple(table.shape[1] for table in self.rows.tables)

  def pages_needed(self, num_tokens: int) -> tuple[int, ...]:
    """Pages per group that a sequence of that length takes."""
    return self.layout.pages_for(num_tokens)

  def can_fit(self, num_tokens: int) -> bool:
    """Whether one sequence of that length fits an empty pool."""
    return num_tokens <= self.max_length and all(
      need <= pool.num_pages
      for need, pool in zip(
        self.pages_needed(num_tokens), self.pools, strict=True
      )
    )

  def usage(self) -> tuple[pages_lib.PoolUsage, ...]:
    """The partition of every pool."""
    with self._lock:
      return tuple(
        pool.usage(self._pending(group))
        for group, pool in enumerate(self.pools)
      )

  def audit(self) -> tuple[str, ...]:
    """Recomputes every invariant from scratch.

    Returns:
      What is wrong, in words; empty where nothing is.
    """
    with self._lock:
      return audit_lib.audit(self)

  def state_digest(self) -> str:
    """SHA-256 of the committed state, without generations and recency."""
    with self._lock:
      return audit_lib.state_digest(self)

  @property
  def open_plan(self) -> steps.StepPlan | None:
    """The open step, if there is one."""
    return self._plan

  def leases(self) -> tuple[receipts.Lease, ...]:
    """The leases that are held."""
    return tuple(self._leases.values())

  # Leases and handles --------------------------------------------------------

  def lease(self, sequence: sequences_lib.Sequence) -> receipts.Lease:
    """Keeps a sequence's present pages from being recycled or overwritten.

    Ownership: the caller holds them until `release`.
    """
    with self._lock:
      row = sequence.row
      group_pages = []
      for group, pool in enumerate(self.pools):
        pages = self.rows.pages(row, group).copy()
        pool.lease(pages)
        pages.flags.writeable = False
        group_pages.append(pages)
      lease = receipts.Lease(
        next(self._lease_numbers),
        tuple(group_pages),
        self._generations(group_pages),
        int(self.rows.present[row]),
      )
      self._leases[lease.number] = lease
      return lease

  def release(self, lease: receipts.Lease) -> None:
    """Ends a lease.

    Raises:
      DoubleFree: It has ended already.
    """
    with self._lock:
      if self._leases.pop(lease.number, None) is not lease:
        raise errors.DoubleFree(f"lease {lease.number} is not held")
      for pool, pages in zip(self.pools, lease.group_pages, strict=True):
        pool.unlease(pages)

  def handles(
    self, sequence: sequences_lib.Sequence
  ) -> tuple[tuple[pages_lib.PageHandle, ...], ...]:
    """The pages of a sequence's table per group, with their generations."""
    with self._lock:
      row = sequence.row
      return tuple(
        tuple(
          pages_lib.PageHandle(group, page, int(pool.generations[page]))
          for page in self.rows.pages(row, group).tolist()
        )
        for group, pool in enumerate(self.pools)
      )

  def check_handle(self, handle: pages_lib.PageHandle) -> None:
    """Refuses a handle that does not name a page as it is now (R1).

    Raises:
      BadHandle: No such group or page.
      StaleHandle: The page was recycled since.
    """
    if not 0 <= handle.group < len(self.pools):
      raise errors.BadHandle(f"no cache group {handle.group}")
    pool = self.pools[handle.group]
    if not 1 <= handle.page <= pool.num_pages:
      raise errors.BadHandle(
        f"page {handle.page} is not within 1..{pool.num_pages}"
      )
    now = int(pool.generations[handle.page])
    if handle.generation != now:
      raise errors.StaleHandle(
        f"page {handle.page} is at generation {now}, not {handle.generation}"
      )

  def check_receipt(self, receipt: receipts.PrefixMatchReceipt) -> None:
    """Refuses a match receipt any of whose pages was recycled since.

    Raises:
      StaleReceipt: Naming the first such page.
    """
    with self._lock:
      for pool, pages, generations in zip(
        self.pools,
        receipt.group_pages,
        receipt.group_generations,
        strict=True,
      ):
        stale = np.flatnonzero(pool.generations[pages] != generations)
        if len(stale):
          raise errors.StaleReceipt(
            f"page {pages[stale[0]]} was recycled after epoch {receipt.epoch}"
          )

  # Forgetting ----------------------------------------------------------------

  def drop_index(self, namespace: str | None = None) -> None:
    """Makes what is indexed unfindable; open sequences go on undisturbed.

    Args:
      namespace: Whose index; None for all, as a weight update needs.
    """
    with self._lock:
      for root in list(self.index.roots()):
        if namespace is None or root.key[0] == namespace:
          self.index.drop(root)
          self.namespaces.advance(root.key[0])
      self.epoch += 1

  def revoke(self, namespace: str) -> None:
    """Drops a namespace's index and refuses new sequences in it."""
    with self._lock:
      self.drop_index(namespace)
      self.namespaces.revoke(namespace)

  def poison(self) -> None:
    """The device pages are lost: everything FREE, every sequence DeviceLost."""
    with self._lock:
      self._plan = None
      for root in list(self.index.roots()):
        self.index.drop(root)
      for sequence in self.rows.open_sequences():
        sequence.lost = True
        self.rows.give_back(sequence)
      self._leases.clear()
      for pool in self.pools:
        pool.reset()
      self.epoch += 1

  # Inside --------------------------------------------------------------------

  def _phase(self, name: str) -> None:
    if self.on_phase is not None:
      self.on_phase(name)

  def _check_tokens(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    try:
      ids = np.asarray(tokens)
      if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"dtype {ids.dtype}")
      if ids.ndim != 1:
        raise TypeError(f"shape {ids.shape}")
    except (TypeError, ValueError, OverflowError) as error:
      raise errors.TokenOutOfRange(
        f"tokens must be a flat list of whole numbers: {error}"
      ) from error
    if ids.size:
      worst = ids.min() if ids.min() < 0 else ids.max()
      if not 0 <= worst < self._token_limit:
        raise errors.TokenOutOfRange(
          f"token id {worst} is not within 0..{self._token_limit - 1}"
        )
    return ids.astype(np.int32, copy=False)

  def _check_length(self, num_tokens: int) -> None:
    if num_tokens > self.max_length:
      raise errors.PromptTooLong(
        f"{num_tokens=} is more than max_length={self.max_length}"
      )
    if not self.can_fit(num_tokens):
      raise errors.NeverFits(
        f"{num_tokens=} needs {self.pages_needed(num_tokens)} pages of"
        f" {tuple(pool.num_pages for pool in self.pools)}"
      )

  def _batch_rows(
    self, members: Sequence[sequences_lib.Sequence]
  ) -> np.ndarray:
    """The rows of open, distinct sequences of this allocator."""
    rows = np.array([sequence.row for sequence in members], np.int32)
    if len(np.unique(rows)) != len(rows):
      raise errors.BadStep("a sequence is named twice in one batch")
    return rows

  def _idle_row(self, sequence: sequences_lib.Sequence) -> int:
    row = sequence.row
    if sequence.in_step:
      raise errors.SequenceInStep(
        f"sequence in row {row} is a member of the open step"
      )
    return row

  def _match(self, sequence: sequences_lib.Sequence) -> None:
    """Takes over whatever the index has beyond what the table shows."""
    row, rows = sequence.row, self.rows
    known = int(rows.num_tokens[row])
    cap = known - sequence.want_logits
    match = self.index.match(sequence, known)
    found = match.num_tokens
    if self.tail_policy == "full_pages":
      found = min(found, cap)
      found -= found % self._bundle
    aligned = found - found % self._bundle
    if found > aligned and not self._can_copy(row, found):
      found = aligned
    present = int(rows.present[row])
    if found > present:
      self._adopt(sequence, match, found)
      rows.length[row] = min(found, cap)
      rows.present[row] = found
      self.epoch += 1
    if sequence.receipt is None:
      sequence.receipt = self._match_receipt(sequence, match.num_tokens)

  def _can_copy(self, row: int, found: int) -> bool:
    """Whether the rest of a prompt fits while its last page is leased (R9)."""
    known = int(self.rows.num_tokens[row])
    for pool in self.pools:
      rest = -(-known // pool.page_size) - found // pool.page_size
      if found % pool.page_size and rest > pool.available - 1:
        return False
    return True

  def _adopt(
    self,
    sequence: sequences_lib.Sequence,
    match: base.PrefixMatch,
    found: int,
  ) -> None:
    """Puts a match's pages into the table in place of the sequence's own."""
    row, rows = sequence.row, self.rows
    place = int(rows.published[row])
    place -= place % self._bundle
    for group, pool in enumerate(self.pools):
      size = pool.page_size
      first, last = place // size, -(-found // size)
      table_row = rows.table_rows[group][row]
      own = table_row[first : rows.num_pages(row, group)].copy()
      for node in match.path:
        column = max(node.start // size, first)
        offset = column - node.start // size
        ids = node.pages[group][offset : last - node.start // size]
        stop = min(column + len(ids), -(-self.index.end(node) // size))
        table_row[column:stop] = ids[: stop - column]
      full = found // size
      pool.hold(table_row[first:full])
      if full < last:
        pool.lease(table_row[full:last])
      self._drop_own(row, group, own)
      rows.leased[group][row] = table_row[full] if full < last else 0
    self.index.settle(sequence, match, found)

  def _drop_own(self, row: int, group: int, own: np.ndarray) -> None:
    """Lets table entries go, the last of which may be held by lease."""
    leased = self.rows.leased[group][row]
    if leased and len(own) and own[-1] == leased:
      self.pools[group].unlease(own[-1:])
      own = own[:-1]
      self.rows.leased[group][row] = 0
    self.pools[group].drop(own)

  def _match_receipt(
    self, sequence: sequences_lib.Sequence, semantic_tokens: int
  ) -> receipts.PrefixMatchReceipt:
    row = sequence.row
    group_pages = [
      self.rows.pages(row, group).copy() for group in range(len(self.pools))
    ]
    for pages in group_pages:
      pages.flags.writeable = False
    length, present = int(self.rows.length[row]), int(self.rows.present[row])
    return receipts.PrefixMatchReceipt(
      epoch=self.epoch,
      namespace=sequence.root.key[0],
      namespace_generation=sequence.root.key[1],
      prompt_tokens=int(self.rows.num_tokens[row]),
      semantic_tokens=semantic_tokens,
      matched_tokens=length,
      copied_rows=present % self._bundle,
      group_pages=tuple(group_pages),
      group_generations=self._generations(group_pages),
    )

  def _generations(
    self, group_pages: Sequence[np.ndarray]
  ) -> tuple[np.ndarray, ...]:
    return tuple(
      pool.generations[pages]
      for pool, pages in zip(self.pools, group_pages, strict=True)
    )

  def _cut_table(self, row: int, group: int, length: int) -> int:
    """Drops a row's pages past `length`; returns how many."""
    pool, rows = self.pools[group], self.rows
    keep, have = -(-length // pool.page_size), rows.num_pages(row, group)
    table_row = rows.table_rows[group][row]
    own = table_row[keep:have].copy()
    table_row[keep:have] = 0
    self._drop_own(row, group, own)
    if length % pool.page_size and not rows.leased[group][row]:
      page = table_row[keep - 1]
      private = pool.references[page] == 1 and not pool.leases[page]
      if private and not pool.entries[page]:
        pool.valid_rows[page] = min(
          int(pool.valid_rows[page]), length % pool.page_size
        )
    return len(own)

  def _reserve(
    self,
    members: tuple[sequences_lib.Sequence, ...],
    rows: np.ndarray,
    counts: np.ndarray,
  ) -> steps.StepPlan:
    state = self.rows
    starts = state.length[rows]
    ends = starts + counts
    if not len(rows) or counts.min() < 1:
      raise errors.BadStep(f"a step needs members of one row or more: {counts}")
    beyond = np.flatnonzero(ends > state.num_tokens[rows])
    if len(beyond):
      at = beyond[0]
      raise errors.BadStep(
        f"rows {starts[at]}..{ends[at] - 1} asked of a sequence of"
        f" {state.num_tokens[rows[at]]} tokens"
      )
    plan = steps.StepPlan(
      members,
      rows,
      starts,
      counts,
      ends,
      np.maximum(starts, state.present[rows]),
    )
    demands = [self._demand(plan, group) for group in range(len(self.pools))]
    needed = [len(copied) + int(fresh.sum()) for copied, fresh in demands]
    self._phase("plan.counted")
    self._make_room(needed)
    groups = []
    try:
      for group, (copied, fresh) in enumerate(demands):
        self._phase(f"plan.reserving_{group}")
        groups.append(self._group_plan(plan, group, copied, fresh))
      self._phase("plan.reserved")
    except BaseException:
      for pool, taken in zip(self.pools, groups, strict=False):
        pool.give_back(taken.pages)
      raise
    plan.groups = tuple(groups)
    plan.num_tokens = int(counts.sum())
    for sequence in members:
      sequence.in_step = True
    self._plan = plan
    return plan

  def _demand(
    self, plan: steps.StepPlan, group: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Members whose last page must be copied, and fresh pages of each (R5)."""
    pool, state = self.pools[group], self.rows
    size = pool.page_size
    fresh = -(-plan.ends // size) - -(-plan.writes // size)
    offsets = plan.writes % size
    inside = np.flatnonzero((offsets > 0) & (plan.ends > plan.writes))
    rows = plan.rows[inside]
    pages = state.tables[group][rows, plan.writes[inside] // size]
    private = (
      (state.leased[group][rows] == 0)
      & (pool.references[pages] == 1)
      & (pool.valid_rows[pages] <= offsets[inside])
    )
    return inside[~private], fresh

  def _make_room(self, needed: list[int]) -> None:
    """Evicts so that every pool has what is needed free, or raises."""
    short = [
      need - pool.available
      for need, pool in zip(needed, self.pools, strict=True)
    ]
    if max(short) > 0:
      by_group = {
        group.name: (need, pool.available)
        for group, need, pool in zip(
          self.layout.groups, needed, self.pools, strict=True
        )
      }
      lacking = [i for i, count in enumerate(short) if count > 0]
      raise errors.OutOfPages(
        sum(needed[i] for i in lacking),
        sum(self.pools[i].available for i in lacking),
        by_group,
      )
    shortage = [
      max(need - pool.num_free, 0)
      for need, pool in zip(needed, self.pools, strict=True)
    ]
    if any(shortage):
      self.index.evict(shortage)
      self.epoch += 1
      self._phase("plan.evicted")

  def _group_plan(
    self,
    plan: steps.StepPlan,
    group: int,
    copied: np.ndarray,
    fresh: np.ndarray,
  ) -> steps.GroupPlan:
    pool, state = self.pools[group], self.rows
    size = pool.page_size
    members = np.repeat(np.arange(len(fresh)), fresh)
    before = np.cumsum(fresh) - fresh
    columns = -(-plan.writes // size) - before
    columns = columns[members] + np.arange(len(members))
    sources = columns_of_copies = _NO_PAGES
    rows_to_copy = _NO_PAGES
    if len(copied):
      columns_of_copies = plan.writes[copied] // size
      sources = state.tables[group][plan.rows[copied], columns_of_copies]
      rows_to_copy = plan.writes[copied] % size
    return steps.GroupPlan(
      members=np.concatenate([copied, members]),
      columns=np.concatenate([columns_of_copies, columns]),
      pages=pool.take(len(copied) + len(members)),
      copy_sources=sources,
      copy_rows=rows_to_copy,
    )

  def _publish_tables(self, plan: steps.StepPlan) -> None:
    state = self.rows
    copied = {
      i
      for part in plan.groups
      for i in part.members[: part.num_copies].tolist()
    }
    for i in copied:
      self.index.detach(plan.sequences[i])
    for group, (pool, part) in enumerate(
      zip(self.pools, plan.groups, strict=True)
    ):
      rows = plan.rows[part.members]
      pool.commit(part.pages)
      state.tables[group][rows, part.columns] = part.pages
      for row, source in zip(
        rows[: part.num_copies].tolist(), part.copy_sources, strict=True
      ):
        page = np.array([source], np.int32)
        if state.leased[group][row]:
          state.leased[group][row] = 0
          pool.unlease(page)
        else:
          pool.drop(page)
        state.versions[row] += 1
      self._mark_valid(plan, group)
    state.length[plan.rows] = plan.ends
    state.present[plan.rows] = plan.ends

  def _mark_valid(self, plan: steps.StepPlan, group: int) -> None:
    """Raises the valid rows of every page the step wrote to."""
    pool, part = self.pools[group], plan.groups[group]
    size = pool.page_size
    pool.valid_rows[part.pages] = size
    first, last = plan.writes // size, (plan.ends - 1) // size
    table, rows = self.rows.tables[group], plan.rows
    wrote = plan.ends > plan.writes
    # The first page is full where the step went past it; then the last.
    pool.valid_rows[table[rows[wrote], first[wrote]]] = size
    pages = table[rows[wrote], last[wrote]]
    pool.valid_rows[pages] = plan.ends[wrote] - last[wrote] * size

  def _publish_prefixes(self, plan: steps.StepPlan) -> list[int]:
    released = [0] * len(self.pools)
    whole = plan.ends - plan.ends % self._bundle
    due = (whole > self.rows.published[plan.rows]) | (plan.counts > 1)
    growing = self.rows.growing[plan.rows] & (plan.counts == 1)
    fast = np.flatnonzero(due & growing)
    if len(fast):
      self.index.grow(plan.rows[fast], plan.ends[fast])
    for i in np.flatnonzero(due & ~growing).tolist():
      sequence = plan.sequences[i]
      sequence.lease_node = None
      stop = int(plan.ends[i] if plan.counts[i] > 1 else whole[i])
      for group, count in enumerate(self.index.insert(sequence, stop)):
        released[group] += count
    return released

  def _end(self, plan: steps.StepPlan) -> None:
    self._plan = None
    plan.is_open = False
    for sequence in plan.sequences:
      sequence.in_step = False
    for sequence in plan.sequences:
      if sequence.cancelled:
        self._close(sequence, "cancelled")

  def _check_open(self, plan: steps.StepPlan) -> None:
    if plan is not self._plan:
      raise errors.StepClosed("the plan is not the open step")

  def _step_receipt(
    self,
    outcome: str,
    plan: steps.StepPlan,
    released: list[int],
    before: str | None,
  ) -> receipts.StepReceipt:
    copied = tuple(int(group.copy_rows.sum()) for group in plan.groups)
    return receipts.StepReceipt(
      outcome=outcome,
      epoch=self.epoch,
      num_tokens=plan.num_tokens,
      new_pages=tuple(len(group.pages) for group in plan.groups),
      copied_rows=copied,
      copied_bytes=sum(
        rows * group.row_bytes
        for rows, group in zip(copied, self.layout.groups, strict=True)
      ),
      released_duplicates=tuple(released),
      predecessor_digest=before,
      successor_digest=self._recorded_digest(),
    )

  def _recorded_digest(self) -> str | None:
    return self.state_digest() if self.record_digests else None

  def _close(
    self, sequence: sequences_lib.Sequence, outcome: str
  ) -> receipts.ReleaseReceipt:
    length = int(self.rows.length[sequence.row])
    self.index.insert(sequence, length)
    generation = sequence.generation
    dropped = self._release(sequence)
    return receipts.ReleaseReceipt(
      outcome, self.epoch, generation, length, dropped
    )

  def _release(self, sequence: sequences_lib.Sequence) -> tuple[int, ...]:
    """Drops everything a sequence holds, and its row."""
    row, dropped = sequence.row, []
    if sequence.root is not None:
      self.index.release(sequence)
    for group in range(len(self.pools)):
      own = self.rows.pages(row, group).copy()
      self._drop_own(row, group, own)
      dropped.append(len(own))
    self.rows.give_back(sequence)
    self.epoch += 1
    return tuple(dropped)

  def _pending(self, group: int) -> int:
    """Pages that only cancelled members of the open step hold."""
    if self._plan is None:
      return 0
    held: dict[int, int] = {}
    for sequence in self._plan.sequences:
      if sequence.cancelled:
        for page in self.rows.pages(sequence.row, group).tolist():
          held[page] = held.get(page, 0) + 1
    pool = self.pools[group]
    return sum(
      pool.references[page] + pool.leases[page] == count
      for page, count in held.items()
    )
