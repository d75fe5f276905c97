"""`KVCache`: the allocator's decisions joined to the device's pages."""

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from host_allocator import allocator as allocators
from host_allocator import errors
from host_allocator import layout as layouts
from host_allocator import receipts
from host_allocator import sequences
from host_allocator import state as states
from host_allocator import tables
from host_allocator.prefix import side_inputs as side_inputs_lib
from kvjax import pages as pages_lib
from kvjax import step as step_lib

_DEFAULT_MAX_LENGTH = 8192
_LEAST_COPIES = 8  # row copies are padded to a power of two from here on


class Step:
  """One open step: what the model reads, and the pages it must hand back.

  Attributes:
    arrays: the batch's page-index arrays, on the device.
  """

  def __init__(self, arrays: step_lib.StepArrays, pages: pages_lib.Pages):
    self.arrays = arrays
    self._predecessor = pages
    self._successor: pages_lib.Pages | None = None

  @property
  def pages(self) -> pages_lib.Pages:
    """The pages as they stand: the predecessor until a successor is set."""
    if self._successor is not None:
      return self._successor
    return self._predecessor

  @pages.setter
  def pages(self, successor: pages_lib.Pages) -> None:
    """Hands the successor back.

    Raises:
      PagesNotReturned: it is the predecessor itself, or does not have its
        structure, shapes and dtypes.
    """
    if successor is self._predecessor:
      raise errors.PagesNotReturned(
        "step.pages was set to the pages that it already held; set it to "
        "the pages that the model returned"
      )
    expected, found = _signature(self._predecessor), _signature(successor)
    if expected != found:
      raise errors.PagesNotReturned(
        f"the successor pages are {found}, expected {expected}"
      )
    self._successor = successor

  @property
  def is_returned(self) -> bool:
    return self._successor is not None


class KVCache:
  """A paged KV cache with exact prefix reuse.

  The host side (`.allocator`) decides which page holds which rows; this class
  uploads its decisions, carries the device pages from step to step and takes
  care that neither side can move on without the other.

  Example:
    >>> import kvjax
    >>> layout = kvjax.CacheLayout.uniform(
    ...   num_layers=2, num_kv_heads=1, head_dim=8, page_size=4)
    >>> cache = kvjax.KVCache(layout, num_pages=8, max_sequences=2)
    >>> sequence = cache.open([5, 6, 7])
    >>> sequence.num_tokens, sequence.matched_tokens
    (3, 0)
    >>> cache.close(sequence)
    >>> cache.audit()
    ()
  """

  def __init__(
    self,
    layout: layouts.CacheLayout,
    *,
    num_pages: int | Sequence[int],
    max_sequences: int,
    max_length: int | None = None,
    max_tokens_per_step: int = 512,
    prefix_index: str | None = "radix",
    tail_policy: str = "copy_rows",
    eviction: str = "lru",
    vocab_size: int | None = None,
  ):
    """Allocates the device pages and the host tables.

    Args:
      layout: the cache groups.
      num_pages: allocatable pages, of every group or one count per group.
      max_sequences: most sequences open at once, and in one step.
      max_length: most tokens of a sequence; the width of the page tables.
        By default what the smallest pool holds, at most 8,192.
      max_tokens_per_step: most token rows of one step.
      prefix_index: "radix", "hash_chain", or None for no reuse.
      tail_policy: "copy_rows" (exact to the token) or "full_pages".
      eviction: one of `host_allocator.prefix.eviction`'s policies.
      vocab_size: where given, token ids are checked against it.

    Raises:
      LayoutError: the sizes do not fit together.
    """
    per_group = states.pages_per_group(layout, num_pages)
    if max_length is None:
      max_length = min(
        _DEFAULT_MAX_LENGTH,
        *(
          count * group.page_size
          for count, group in zip(per_group, layout.groups, strict=True)
        ),
      )
    self.layout = layout
    self.allocator = allocators.KVAllocator(
      layout,
      num_pages=per_group,
      max_sequences=max_sequences,
      max_length=max_length,
      prefix_index=prefix_index,
      tail_policy=tail_policy,
      eviction=eviction,
      vocab_size=vocab_size,
    )
    self.step_shapes = tables.step_shapes(max_tokens_per_step, max_sequences)
    self._num_pages = per_group
    self._pages = pages_lib.make_pages(layout, self._num_pages)
    self._copy_rows = jax.jit(pages_lib.copy_rows, donate_argnums=0)
    self._packings: dict[tables.StepShape, tables.Packing] = {}
    self._open_step: Step | None = None

  # Sequences: the allocator's operations, unchanged.

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
  ) -> sequences.Sequence:
    """Opens a sequence over the longest exact prefix already computed.

    See `host_allocator.allocator.KVAllocator.open` for the arguments and
    what each is refused for.

    Ownership: the sequence references its matched pages until `close`.
    """
    return self.allocator.open(
      tokens,
      namespace=namespace,
      adapter=adapter,
      salt=salt,
      side_inputs=side_inputs,
      priority=priority,
      want_logits=want_logits,
      receipt=receipt,
    )

  def rematch(self, sequence: sequences.Sequence) -> int:
    """Looks again for rows computed by others; returns the rows gained."""
    return self.allocator.rematch(sequence)

  def batch(self, members: Sequence[sequences.Sequence]) -> sequences.Batch:
    """Checks sequences once, for many calls of `append` and `step`.

    It is refused once one of its members has been closed.
    """
    return self.allocator.batch(members)

  def append(
    self,
    batch: Sequence[sequences.Sequence] | sequences.Batch,
    tokens: Sequence[int] | np.ndarray,
  ) -> None:
    """Makes one more token known to each sequence of a batch."""
    self.allocator.append(batch, tokens)

  def fork(self, sequence: sequences.Sequence) -> sequences.Sequence:
    """A second sequence over the same rows; it copies what it changes."""
    return self.allocator.fork(sequence)

  def truncate(self, sequence: sequences.Sequence, length: int) -> None:
    """Shortens a sequence to its first `length` tokens."""
    self.allocator.truncate(sequence, length)

  def close(self, sequence: sequences.Sequence) -> None:
    """Drops a sequence's references; its published pages stay matchable."""
    self.allocator.close(sequence)

  def cancel(self, sequence: sequences.Sequence) -> None:
    """Closes a sequence, at the commit of the step that it is in."""
    self.allocator.cancel(sequence)

  def usage(self) -> tuple:
    """Free, evictable, live and reserved pages of each group."""
    return self.allocator.usage()

  def audit(self) -> tuple:
    """Re-derives every invariant; an empty tuple means that all hold."""
    return self.allocator.audit()

  # Steps.

  @contextlib.contextmanager
  def step(
    self, batch: Sequence[tuple[sequences.Sequence, int]] | sequences.Batch
  ) -> Iterator[Step]:
    """Reserves, runs and publishes one step, or leaves no trace of it.

    Inside the `with` block call the model with `step.pages` (donated) and
    `step.arrays`, and set `step.pages` to what it returns. Leaving the block
    commits; an exception aborts and is raised again.

    Args:
      batch: `(sequence, num_new_tokens)` pairs; the sequence's next
        `num_new_tokens` known tokens are computed. Or a `batch`, one token
        of each member.

    Yields:
      The open step.

    Raises:
      OutOfPages: the pool cannot hold the step; nothing has changed.
      StepOpen: another step is open.
      BadStep: the batch is none, or asks for rows of unknown tokens.
      ShapeOverflow: more tokens or sequences than a step may have.
      PagesNotReturned: the block ended without setting `step.pages`.
      DeviceLost: the device pages were lost; the cache is empty afterwards.
    """
    shape = tables.smallest_shape(self.step_shapes, *self.allocator.size(batch))
    plan = self.allocator.plan(batch)
    step: Step | None = None
    try:
      packed = self.allocator.pack(plan, self._packing(shape))
      self._apply_copies(plan.copies)
      step = self._begin(packed, shape)
      yield step
      self._adopt(step)
      self.allocator.commit(plan)
    except BaseException as error:
      if self.allocator.open_plan is plan:
        self.allocator.abort(plan)
      self._recover(step, error)
      raise
    self._open_step = None

  @contextlib.contextmanager
  def idle_step(self, shape: tables.StepShape) -> Iterator[Step]:
    """A step of no sequences, which writes only to the null page.

    Running the model once in each of `cache.step_shapes` compiles all that
    the cache can ever ask for.
    """
    self._check_no_step("an idle step")
    packing = self._packing(shape)
    packed = np.zeros(packing.size, np.int32)
    packing.field(packed, "sequence_rows")[:] = shape.num_sequences
    step = self._begin(packed, shape)
    try:
      yield step
      self._adopt(step)
    except BaseException as error:
      self._recover(step, error)
      raise
    self._open_step = None

  def gather(
    self, sequence: sequences.Sequence, layer: int, group: int = 0
  ) -> tuple[jax.Array, jax.Array]:
    """A copy of a sequence's computed rows of one layer, for inspection.

    Returns:
      K and V, each `[length, kv_heads, head_dim]`.
    """
    self._check_no_step("gather")
    table = sequence.pages(group)
    return pages_lib.gather_rows(
      self._pages.groups[group], table, sequence.length, layer
    )

  def _packing(self, shape: tables.StepShape) -> tables.Packing:
    # One object per shape: it works out its offsets once.
    if shape not in self._packings:
      packing = tables.Packing(shape, self.allocator.table_widths)
      self._packings[shape] = packing
    return self._packings[shape]

  def _begin(self, packed: np.ndarray, shape: tables.StepShape) -> Step:
    # The device array may alias `packed`, which does not change while it does.
    arrays = step_lib.StepArrays(jax.device_put(packed), self._packing(shape))
    self._open_step = Step(arrays, self._pages)
    return self._open_step

  def _check_no_step(self, what: str) -> None:
    if self._open_step is not None:
      raise errors.StepOpen(f"{what} needs the pages, and a step has them")

  def _apply_copies(self, copies: tuple) -> None:
    """Copies rows before the step; costs nothing where there are none."""
    if not any(len(destination) for _, destination, _ in copies):
      return
    self._pages = self._copy_rows(self._pages, _pad_copies(copies))

  def _adopt(self, step: Step) -> None:
    if not step.is_returned:
      raise errors.PagesNotReturned(
        "the step ended without setting step.pages to the pages that the "
        "model returned"
      )
    self._pages = step.pages

  def _recover(self, step: Step | None, error: BaseException) -> None:
    """Finds the pages that a failed step leaves, or empties the cache.

    Rows that it wrote need no undo, for nobody can see them. The pages are
    lost where they were donated and not handed back, or where the
    computation that was to produce them failed.
    """
    self._open_step = None
    pages = self._pages if step is None else step.pages
    try:
      lost = pages.is_deleted()
      if not lost:
        jax.block_until_ready(pages)
    except Exception:
      lost = True
    if not lost:
      self._pages = pages
      return
    self.poison()
    raise errors.DeviceLost(
      "the step failed after its pages were donated; every sequence is lost "
      "and the cache is empty"
    ) from error

  def poison(self) -> None:
    """Drops everything after a device failure and rebuilds the pool.

    Open sequences report `DeviceLost`; new ones start from an empty cache.
    """
    self.allocator.poison()
    self._pages = pages_lib.make_pages(self.layout, self._num_pages)


def _pad_copies(copies: tuple) -> tuple:
  """Row copies padded to a power of two, so that few shapes compile."""
  most = max(len(destination) for _, destination, _ in copies)
  size = max(_LEAST_COPIES, 1 << (most - 1).bit_length())

  def pad(values: np.ndarray) -> jax.Array:
    padded = np.zeros(size, np.int32)
    padded[: len(values)] = values
    return jnp.asarray(padded)

  return tuple(tuple(map(pad, group)) for group in copies)


def _signature(pages: pages_lib.Pages) -> tuple:
  leaves, tree = jax.tree.flatten(pages)
  return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
