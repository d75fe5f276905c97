"""One exception hierarchy; every class carries a stable `.reason`.

A reason is what programs, logs and tests compare; the message is for people
and names the value and the limit.  An error leaves the state as it was, except
`DeviceLost`, which reports that the state was dropped.
"""

# ruff: noqa: N818 - the names say what happened; all of them are errors.


class KVError(Exception):
  """Anything the cache refuses, with a stable snake_case `reason`."""

  reason = "kv_error"


class BadArgument(KVError, ValueError):
  """An argument of the wrong type, or outside its limits."""

  reason = "bad_argument"


class EmptyPrompt(KVError, ValueError):
  """A sequence was opened without a single token."""

  reason = "empty_prompt"


class TokenOutOfRange(KVError, ValueError):
  """A token id is negative, above the vocabulary, or not an integer."""

  reason = "token_out_of_range"


class PromptTooLong(KVError, ValueError):
  """A sequence would know more tokens than `max_length`."""

  reason = "prompt_too_long"


class NeverFits(KVError, ValueError):
  """A request needs more pages than the whole pool has."""

  reason = "never_fits"


class OutOfPages(KVError):
  """A step needs more pages than are free and evictable now.

  Attributes:
    needed: Pages the step needs, over all groups that fall short.
    available: Free and evictable pages of those groups.
    by_group: `{group name: (needed, available)}` of every group.
  """

  reason = "out_of_pages"

  def __init__(
    self, needed: int, available: int, by_group: dict[str, tuple[int, int]]
  ):
    self.needed = needed
    self.available = available
    self.by_group = by_group
    super().__init__(f"{needed=} pages, {available=}, {by_group=}")

  def __reduce__(self):
    return type(self), (self.needed, self.available, self.by_group)


class TooManySequences(KVError):
  """All `max_sequences` rows of the tables are taken."""

  reason = "too_many_sequences"


class SequenceClosed(KVError, RuntimeError):
  """A closed sequence was used, or closed again."""

  reason = "sequence_closed"


class SequenceInStep(KVError, RuntimeError):
  """A member of the open step was forked, truncated or closed."""

  reason = "sequence_in_step"


class StepOpen(KVError, RuntimeError):
  """A second step was planned while one is open."""

  reason = "step_open"


class StepClosed(KVError, RuntimeError):
  """A plan was committed, aborted or packed after it had ended."""

  reason = "step_closed"


class BadStep(KVError, ValueError):
  """A step of no sequence, of one twice, or of no rows or unknown ones."""

  reason = "bad_step"


class PagesNotReturned(KVError, RuntimeError):
  """A step ended without handing back the successor pages."""

  reason = "pages_not_returned"


class DeviceLost(KVError, RuntimeError):
  """The device pages are gone, and with them this sequence's rows."""

  reason = "device_lost"


class StaleHandle(KVError):
  """A page handle's generation is not its page's generation."""

  reason = "stale_handle"


class StaleReceipt(KVError):
  """A receipt's pages were recycled since, or its index left behind."""

  reason = "stale_receipt"


class BadHandle(KVError, ValueError):
  """What was handed in is another allocator's, or names nothing here.

  Sequences, batches, leases and receipts count as handles too, and so does what
  is none of these where one belongs.
  """

  reason = "bad_handle"


class DoubleFree(KVError, RuntimeError):
  """More references were dropped than were held."""

  reason = "double_free"


class LayoutError(KVError, ValueError):
  """Cache groups, pools or shapes that do not fit together."""

  reason = "layout_error"


class ShapeOverflow(KVError, ValueError):
  """A step does not fit the shape it is packed into."""

  reason = "shape_overflow"


class LedgerError(KVError, ValueError):
  """Byte or page counts that do not reconcile."""

  reason = "ledger_error"


class NamespaceRevoked(KVError):
  """A namespace was closed to new sequences."""

  reason = "namespace_revoked"


class BadTruncation(KVError, ValueError):
  """A truncation to a negative length, or past the known tokens."""

  reason = "bad_truncation"


class BadSideInput(KVError, ValueError):
  """A side input outside the prompt, over another, or without a digest."""

  reason = "bad_side_input"


class _Named(KVError):
  """An error of one kind with many reasons."""

  def __init__(self, reason: str, message: str):
    self.reason = reason
    super().__init__(message)

  def __reduce__(self):
    return type(self), (self.reason, str(self))


class AddressError(_Named, ValueError):
  """A coordinate that names no readable byte; `reason` says which check."""

  reason = "address_error"


class Unreconciled(_Named, LedgerError):
  """Counts that contradict each other; `reason` says where."""

  reason = "unreconciled"


class Incompatible(KVError):
  """K/V of one computation was offered for another.

  Attributes:
    field: The first manifest field that differs; `reason` is made of it.
  """

  reason = "incompatible"

  def __init__(self, field: str, producer: object, consumer: object):
    self.field = field
    self.reason = f"{field}_mismatch"
    super().__init__(f"{field} differs: {producer!r} against {consumer!r}")
    self._values = (producer, consumer)

  def __reduce__(self):
    return type(self), (self.field, *self._values)
