"""Every error kvjax raises on purpose: the cache's, and those of its own.

All are `KVError`s with a stable snake_case `reason`; an error that a caller's
argument caused is a `ValueError` too.
"""

# ruff: noqa: F401, N818 - re-exported; the names say what happened.

from host_allocator.errors import AddressError
from host_allocator.errors import BadArgument
from host_allocator.errors import BadHandle
from host_allocator.errors import BadSideInput
from host_allocator.errors import BadStep
from host_allocator.errors import BadTruncation
from host_allocator.errors import DeviceLost
from host_allocator.errors import DoubleFree
from host_allocator.errors import EmptyPrompt
from host_allocator.errors import Incompatible
from host_allocator.errors import KVError
from host_allocator.errors import LayoutError
from host_allocator.errors import LedgerError
from host_allocator.errors import NamespaceRevoked
from host_allocator.errors import NeverFits
from host_allocator.errors import OutOfPages
from host_allocator.errors import PagesNotReturned
from host_allocator.errors import PromptTooLong
from host_allocator.errors import SequenceClosed
from host_allocator.errors import SequenceInStep
from host_allocator.errors import ShapeOverflow
from host_allocator.errors import StaleHandle
from host_allocator.errors import StaleReceipt
from host_allocator.errors import StepClosed
from host_allocator.errors import StepOpen
from host_allocator.errors import TokenOutOfRange
from host_allocator.errors import TooManySequences
from host_allocator.errors import Unreconciled


class CheckpointError(KVError, ValueError):
  """A checkpoint is missing, damaged, or contradicts its own config."""

  reason = "checkpoint_error"


class UnsupportedCheckpoint(KVError, ValueError):
  """A sound checkpoint of something that kvjax does not run."""

  reason = "unsupported_checkpoint"


class BadRequest(KVError, ValueError):
  """A request to the engine, or a chat, that cannot be carried out."""

  reason = "bad_request"


class EngineClosed(KVError, RuntimeError):
  """Work was submitted to an engine after it was closed."""

  reason = "engine_closed"
