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

from collections.abc import Iterable
from collections.abc import Sequence

import numpy as np

from host_allocator import arguments
from host_allocator import ending
from host_allocator import errors
from host_allocator import forgetting
from host_allocator import holding
from host_allocator import identity
from host_allocator import layout as layout_lib
from host_allocator import matching
from host_allocator import publication
from host_allocator import receipts
from host_allocator import reservation
from host_allocator import sequences as sequences_lib
from host_allocator import steps
from host_allocator import tables
from host_allocator import tokens as tokens_lib
from host_allocator.prefix import side_inputs as side_inputs_lib

Members = Sequence[sequences_lib.Sequence] | sequences_lib.Batch


class KVAllocator(forgetting.Forgetting):
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
    record_events: Keep index events for `drain_events`.
    semantic_digest: Identity of the model whose K/V is kept.
    evict_whole_edges: See `prefix.trees.Trees`.

  Raises:
    LayoutError: Where these do not fit together.
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
    record_events: bool = False,
    semantic_digest: str = "",
    evict_whole_edges: bool = False,
  ):
    super().__init__(
      layout,
      num_pages=num_pages,
      max_sequences=max_sequences,
      max_length=max_length,
      prefix_index=prefix_index,
      tail_policy=tail_policy,
      eviction=eviction,
      evict_whole_edges=evict_whole_edges,
      semantic_digest=semantic_digest,
      record_events=record_events,
    )
    self._token_limit = tokens_lib.limit(vocab_size)
    self._record_digests = record_digests

  # Sequences -----------------------------------------------------------------

  def open(
    self,
    tokens: Sequence[int] | np.ndarray,
    *,
    namespace: str = "",
    adapter: str = "",
    salt: str = "",
    side_inputs: Sequence[side_inputs_lib.SideInput] = (),
    priority: int = 0,
    want_logits: bool = True,
    receipt: receipts.PrefixMatchReceipt | None = None,
  ) -> sequences_lib.Sequence:
    """Opens a sequence on the longest prefix that its index already holds.

    Args:
      tokens: Token ids, `[n]`, at least one.
      namespace: Isolation domain; authorised before any look-up.
      adapter: Identity of the adapter that will compute the rows.
      salt: Shared by those who may share pages.
      side_inputs: What runs of placeholder tokens stand for.
      priority: For the "priority" eviction policy.
      want_logits: Whether the last row must be computed even if it is there.
      receipt: Of an earlier match that the caller's decision rested on.

    Returns:
      The sequence; its `matched_tokens` rows need not be computed.

    Raises:
      EmptyPrompt, TokenOutOfRange, PromptTooLong, NeverFits, BadSideInput,
      BadArgument, NamespaceRevoked, TooManySequences, StaleReceipt, BadHandle:
        The state is as before. BadHandle: the receipt is of another allocator
        or namespace.

    Ownership: the sequence holds its pages until it is closed.
    """
    ids = tokens_lib.to_array(tokens, self._token_limit)
    self._check_length(len(ids))
    priority = arguments.whole("priority", priority)
    want_logits = arguments.flag("want_logits", want_logits)
    with self.lock:
      key = self.namespaces.authorize(namespace, adapter=adapter, salt=salt)
      if receipt is not None:
        self._check_receipt_of(receipt, key)
      keys = self.side_input_keys.keys(ids, side_inputs) if side_inputs else ids
      sequence = self.rows.take()
      try:
        sequence.priority, sequence.want_logits = priority, want_logits
        self.rows.set_tokens(sequence.row, ids, keys)
        sequence.root = self.index.root(key)
        sequence.root.num_sequences += 1
        sequence.node = sequence.root.top
        self.phase("open.matching")
        semantic_tokens, pages = matching.match(self, sequence)
        sequence.matched_tokens = int(self.rows.length[sequence.row])
        sequence.receipt = matching.receipt(
          self, sequence, semantic_tokens, pages
        )
        self.phase("open.matched")
      except BaseException:
        holding.release(self, sequence)
        raise
      return sequence

  def rematch(self, sequence: sequences_lib.Sequence) -> int:
    """Looks again: somebody may have computed the next rows meanwhile.

    Returns:
      Rows that need not be computed any more; 0 where nothing was found.

    Raises:
      BadHandle, SequenceClosed, SequenceInStep.
    """
    with self.lock:
      row = self.idle_row(sequence)
      before = int(self.rows.length[row])
      if before < self.rows.num_tokens[row] - sequence.want_logits:
        matching.match(self, sequence)
      return int(self.rows.length[row]) - before

  def batch(
    self, sequences: Iterable[sequences_lib.Sequence]
  ) -> sequences_lib.Batch:
    """Checks sequences once, for many calls of `append` and `plan`.

    Raises:
      BadHandle, SequenceClosed, DeviceLost, BadStep: One is not this
        allocator's, closed, or named twice.
    """
    with self.lock:
      return self.rows.batch(sequences)

  def append(
    self, sequences: Members, tokens: Sequence[int] | np.ndarray
  ) -> None:
    """Adds one known token to each sequence; its row is computed later.

    Raises:
      TokenOutOfRange, PromptTooLong, BadHandle, SequenceClosed, BadStep:
        Nothing was added.
    """
    ids = tokens_lib.to_array(tokens, self._token_limit)
    with self.lock:
      batch = self.rows.as_batch(sequences)
      if len(batch.rows) != len(ids):
        raise errors.BadStep(
          f"{len(batch.rows)} sequences got {len(ids)} tokens"
        )
      if batch is sequences:
        self.rows.append_to_batch(batch, ids)
      else:
        self.rows.append(batch.rows, ids)

  def fork(self, sequence: sequences_lib.Sequence) -> sequences_lib.Sequence:
    """A second sequence with the same tokens and rows, sharing every page.

    Whoever of the two first writes to their shared last page copies it.

    Raises:
      BadHandle, SequenceClosed, SequenceInStep, TooManySequences.

    Ownership: the child holds references of its own.
    """
    with self.lock:
      self.idle_row(sequence)
      child = self.rows.take()
      holding.share(self, sequence, child)
      self.epoch += 1
      return child

  def truncate(
    self, sequence: sequences_lib.Sequence, length: int
  ) -> receipts.ReleaseReceipt:
    """Cuts a sequence to its first `length` tokens and rows.

    Raises:
      BadTruncation: Where `length` is not a whole number from 0 to the known
        tokens.
      BadHandle, SequenceClosed, SequenceInStep.
    """
    with self.lock:
      row = self.idle_row(sequence)
      before = int(self.rows.length[row])
      length = arguments.whole(
        "length",
        length,
        0,
        int(self.rows.num_tokens[row]),
        errors.BadTruncation,
      )
      dropped = (0,) * len(self.pools)
      if length < self.rows.present[row]:
        dropped = holding.cut(self, sequence, length)
      self.rows.num_tokens[row] = length
      self.rows.stride = None
      self.epoch += 1
      return receipts.ReleaseReceipt(
        "truncated", self.epoch, sequence.generation, before, dropped
      )

  def close(self, sequence: sequences_lib.Sequence) -> receipts.ReleaseReceipt:
    """Ends a sequence; its committed rows stay matchable until evicted.

    Raises:
      BadHandle, SequenceClosed, SequenceInStep.
    """
    with self.lock:
      self.idle_row(sequence)
      return ending.close(self, sequence, "closed")

  def cancel(self, sequence: sequences_lib.Sequence) -> receipts.ReleaseReceipt:
    """Closes a sequence, or marks a member of the open step to be closed.

    A member's pages are reported as `pending` until the step ends.

    Raises:
      BadHandle, SequenceClosed.
    """
    with self.lock:
      row, plan = self.rows.row_of(sequence), self.open_plan
      if plan is None or row not in plan.rows:
        return ending.close(self, sequence, "cancelled")
      if sequence not in plan.cancelled:
        plan.cancelled.append(sequence)
      return receipts.ReleaseReceipt(
        "cancel_pending",
        self.epoch,
        sequence.generation,
        sequence.length,
        (0,) * len(self.pools),
      )

  # Steps ---------------------------------------------------------------------

  def plan(
    self, batch: reservation.Pairs | sequences_lib.Batch
  ) -> steps.StepPlan:
    """Reserves what computing the next rows of each sequence needs.

    Evicts where it must, which is an epoch of its own and stays.

    Args:
      batch: (sequence, rows to compute) for each member, or a `Batch` for one
        row each.

    Returns:
      The plan; exactly one of `commit` and `abort` must end it.

    Raises:
      OutOfPages: Free and evictable pages do not suffice; nothing was touched.
      StepOpen, BadStep, BadHandle, SequenceClosed.
    """
    with self.lock:
      if self.open_plan is not None:
        raise errors.StepOpen("another step is open: commit or abort it first")
      if isinstance(batch, sequences_lib.Batch):
        self.rows.check_batch(batch)
        return reservation.reserve(self, batch, batch.ones, len(batch.rows))
      named, counts = reservation.columns(batch, self.max_length)
      members = self.rows.batch(named)
      return reservation.reserve(self, members, counts, int(counts.sum()))

  def size(
    self, batch: reservation.Pairs | sequences_lib.Batch
  ) -> tuple[int, int]:
    """How many tokens and sequences a step of a batch would have.

    Raises:
      BadStep: It is none, or asks for rows that no sequence can have.
    """
    if isinstance(batch, sequences_lib.Batch):
      return len(batch.rows), len(batch.rows)
    named, counts = reservation.columns(batch, self.max_length)
    return int(counts.sum()), len(named)

  def pack(self, plan: steps.StepPlan, packing: tables.Packing) -> np.ndarray:
    """The step as one int32 buffer; see `tables.Packing`.

    It does not change for as long as the caller holds it, a view of it, or a
    device array that aliases it.

    Raises:
      StepClosed, ShapeOverflow, LayoutError.
    """
    with self.lock:
      self._check_open(plan)
      return steps.pack(plan, self.rows, packing)

  def commit(self, plan: steps.StepPlan) -> receipts.StepReceipt:
    """Publishes a step: tables, lengths, references, index, in one go.

    Nothing here is refused. Where an interrupt strikes in the midst of the
    tables, everything is lost as in `poison`, for half a step is no state; where
    it strikes later, the step is committed, and some of it not matchable.

    Raises:
      StepClosed.
    """
    with self.lock:
      self._check_open(plan)
      before = self._recorded_digest()
      self.phase("commit.ready")
      try:
        publication.enter(self, plan)
      except BaseException:
        self.poison()
        raise
      self.epoch += 1
      released = [0] * len(self.pools)
      try:
        publication.publish(self, plan, released)
      finally:
        receipt = self._end_step(plan, "committed", tuple(released), before)
      return receipt

  def abort(self, plan: steps.StepPlan) -> receipts.StepReceipt:
    """Gives a step's reservation back; the state is the one before it.

    Raises:
      StepClosed.
    """
    with self.lock:
      self._check_open(plan)
      before = self._recorded_digest()
      reservation.give_back(self, plan)
      return self._end_step(plan, "aborted", (0,) * len(self.pools), before)

  # Inside --------------------------------------------------------------------

  def _check_length(self, num_tokens: int) -> None:
    if not num_tokens:
      raise errors.EmptyPrompt("a sequence needs at least one token")
    if num_tokens > self.max_length:
      raise errors.PromptTooLong(
        f"{num_tokens=} is more than max_length={self.max_length}"
      )
    if num_tokens > self.longest:
      raise errors.NeverFits(
        f"{num_tokens=} needs {self.pages_needed(num_tokens)} pages of"
        f" {tuple(pool.num_pages for pool in self.pools)}"
      )

  def _check_open(self, plan: steps.StepPlan) -> None:
    if plan is None or plan is not self.open_plan:
      raise errors.StepClosed("the plan is not the open step")

  def _check_receipt_of(
    self, receipt: receipts.PrefixMatchReceipt, key: identity.RootKey
  ) -> None:
    self.check_receipt(receipt)
    if receipt.root != key:
      raise errors.BadHandle(
        f"the receipt is of namespace {receipt.namespace!r}, or of another"
        f" adapter or salt, and not of {key.namespace!r}"
      )

  def _recorded_digest(self) -> str | None:
    return self.state_digest() if self._record_digests else None

  def _end_step(
    self,
    plan: steps.StepPlan,
    outcome: str,
    released: tuple[int, ...],
    before: str | None,
  ) -> receipts.StepReceipt:
    ending.close_cancelled(self, plan)
    after = self._recorded_digest()
    return ending.step_receipt(self, plan, outcome, released, before, after)
