"""What every implementation of paged attention is given."""

import dataclasses
import functools

import jax

from pallas_kernels import page_shape


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=(
    "q",
    "k_pages",
    "v_pages",
    "page_table",
    "v_page_table",
    "context_lens",
    "query_starts",
    "query_positions",
    "key_starts",
    "window",
    "sinks",
    "k_scales",
    "v_scales",
  ),
  meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Operands:
  """The arrays of one call; None where the caller gave none.

  Arrays, or `jax.ShapeDtypeStruct`s where only support is asked about.
  """

  q: jax.Array  # [tokens, q_heads, head_dim]
  k_pages: jax.Array  # [pages, kv_heads, page_size // fold, lane]
  v_pages: jax.Array  # the same, lane of v_head_dim
  page_table: jax.Array  # int32 [sequences, width]
  context_lens: jax.Array  # int32 [sequences]
  v_page_table: jax.Array | None = None  # int32 [sequences, width]
  query_starts: jax.Array | None = None  # int32 [sequences + 1]; None: decode
  query_positions: jax.Array | None = None  # int32 [tokens]
  key_starts: jax.Array | None = None  # int32 [sequences]
  window: jax.Array | int | None = None  # int32 []
  sinks: jax.Array | None = None  # [q_heads]
  k_scales: jax.Array | None = None  # float32 [pages, 1, scale lanes]
  v_scales: jax.Array | None = None  # float32 [pages, 1, scale lanes]

  @property
  def is_decode(self) -> bool:
    """Whether each sequence has exactly one query row."""
    return self.query_starts is None


@dataclasses.dataclass(frozen=True)
class Options:
  """The static side of one call, resolved.

  Attributes:
    k_geometry: how K pages lie.
    v_geometry: how V pages lie; the same page_size and kv_heads.
    scale: multiplies the logits first.
    causal: whether a query sees only keys at or before its own position.
    soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, or None.
  """

  k_geometry: page_shape.PageGeometry
  v_geometry: page_shape.PageGeometry
  scale: float
  causal: bool
  soft_cap: float | None

  @property
  def page_size(self) -> int:
    """Token rows of a page."""
    return self.k_geometry.page_size

  @property
  def kv_heads(self) -> int:
    """KV heads of a page."""
    return self.k_geometry.kv_heads

  @property
  def head_dim(self) -> int:
    """Elements of a query and of a key, per head."""
    return self.k_geometry.head_dim

  @property
  def v_head_dim(self) -> int:
    """Elements of a value, and so of an output, per head."""
    return self.v_geometry.head_dim
