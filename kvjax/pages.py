"""The device side of a cache: one K and one V slab per cache group.

A slab holds every layer of its group, `[num_layers * pages_per_layer, ...]`,
so a model that scans over layers carries one array and adds
`layer * pages_per_layer` to its page ids. Page 0 of each layer is the null
page. The slabs are a *value*: each step consumes them (donated) and returns
their successor, and that order is what makes page reuse safe.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from host_allocator import errors
from host_allocator import layout as layouts
from pallas_kernels import bits
from pallas_kernels import kv_update
from pallas_kernels import page_shape

_MAX_ROWS = 2**31 - 1  # slots are int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupPages:
  """The pages of one cache group, all layers, K and V."""

  # [num_layers * pages_per_layer, kv_heads, page_rows, lane]
  k: jax.Array
  v: jax.Array
  # [num_layers * pages_per_layer, 1, kv_heads * page_size padded] float32,
  # only where the group is quantised.
  k_scales: jax.Array | None
  v_scales: jax.Array | None
  # The allocatable pages and the null page.
  pages_per_layer: int = dataclasses.field(metadata={"static": True})
  page_size: int = dataclasses.field(metadata={"static": True})
  head_dim: int = dataclasses.field(metadata={"static": True})

  @property
  def num_layers(self) -> int:
    return self.k.shape[0] // self.pages_per_layer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
  """Every cache group's pages, in the layout's order."""

  groups: tuple[GroupPages, ...]

  @property
  def num_bytes(self) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

  def is_deleted(self) -> bool:
    """Whether a donation consumed these arrays."""
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(self))


def make_pages(
  layout: layouts.CacheLayout, num_pages: tuple[int, ...]
) -> Pages:
  """Allocates zeroed slabs on the default device.

  Args:
    layout: the cache groups.
    num_pages: allocatable pages of each group; one null page is added.

  Raises:
    LayoutError: a group's K and V widths differ, or its rows, over all
      layers, do not fit an int32 slot.
  """
  return Pages(
    tuple(
      _make_group(group, count + 1)
      for group, count in zip(layout.groups, num_pages, strict=True)
    )
  )


def _make_group(group: layouts.CacheGroup, pages_per_layer: int) -> GroupPages:
  if group.v_head_dim not in (None, group.head_dim):
    raise errors.LayoutError(
      f"group {group.name!r}: v_head_dim={group.v_head_dim} differs from "
      f"head_dim={group.head_dim}, which the kernels do not support"
    )
  total = group.num_layers * pages_per_layer
  if total * group.page_size > _MAX_ROWS:
    raise errors.LayoutError(
      f"group {group.name!r} needs {total * group.page_size} rows over its "
      f"layers, the limit is {_MAX_ROWS}"
    )
  shape = page_shape.page_shape(
    group.num_kv_heads,
    group.page_size,
    group.head_dim,
    platform=jax.default_backend(),
  )
  # XLA for CPU would convert a whole pool of narrow floats to write a row.
  dtype = bits.storage_dtype(
    storage_dtype(group), platform=jax.default_backend()
  )

  def scales() -> jax.Array | None:
    if group.quantization is None:
      return None
    per_page = page_shape.scales_shape(group.num_kv_heads, group.page_size)
    return jnp.zeros((total, *per_page), jnp.float32)

  return GroupPages(
    k=jnp.zeros((total, *shape), dtype),
    v=jnp.zeros((total, *shape), dtype),
    k_scales=scales(),
    v_scales=scales(),
    pages_per_layer=pages_per_layer,
    page_size=group.page_size,
    head_dim=group.head_dim,
  )


def storage_dtype(group: layouts.CacheGroup) -> jnp.dtype:
  """The dtype of the stored K and V scalars."""
  match group.quantization:
    case "int8":
      return jnp.dtype(jnp.int8)
    case "fp8":
      return jnp.dtype(jnp.float8_e4m3fn)
    case _:
      return jnp.dtype(group.dtype)


def copy_rows(
  pages: Pages,
  copies: tuple[tuple[jax.Array, jax.Array, jax.Array], ...],
) -> Pages:
  """Copies the leading rows of some pages, over all layers, K and V.

  Args:
    pages: the predecessor; donate it.
    copies: per group `(source_pages, destination_pages, row_counts)`, each
      int32 `[n]`, page ids within a layer. A count of 0 is a no-op.
  """
  return Pages(
    tuple(
      _copy_group(group, *group_copies)
      for group, group_copies in zip(pages.groups, copies, strict=True)
    )
  )


def _copy_group(
  group: GroupPages,
  source: jax.Array,
  destination: jax.Array,
  row_counts: jax.Array,
) -> GroupPages:
  first = jnp.arange(group.num_layers, dtype=jnp.int32)[:, None]
  first = first * group.pages_per_layer
  source = (first + source[None, :]).reshape(-1)
  destination = (first + destination[None, :]).reshape(-1)
  row_counts = jnp.tile(row_counts, group.num_layers)

  def rows(slab: jax.Array) -> jax.Array:
    return kv_update.copy_rows(
      slab, source, destination, row_counts, head_dim=group.head_dim
    )

  def scales(slab: jax.Array | None) -> jax.Array | None:
    # A page's scales travel whole: those above the copied rows belong to
    # rows that nobody can see before they are written.
    return None if slab is None else slab.at[destination].set(slab[source])

  return dataclasses.replace(
    group,
    k=rows(group.k),
    v=rows(group.v),
    k_scales=scales(group.k_scales),
    v_scales=scales(group.v_scales),
  )


def gather_rows(
  group: GroupPages, page_table: np.ndarray, length: int, layer: int
) -> tuple[jax.Array, jax.Array]:
  """Reads one sequence's K and V of one layer, for inspection.

  Args:
    group: the group's pages, between two steps.
    page_table: int32 `[pages]`, the sequence's pages in token order.
    length: rows to read.
    layer: layer index within the group.

  Returns:
    K and V, each `[length, kv_heads, head_dim]`, as stored (quantised rows
    are not rescaled).
  """
  num_pages = -(-length // group.page_size)
  ids = layer * group.pages_per_layer + jnp.asarray(page_table[:num_pages])

  def rows(slab: jax.Array) -> jax.Array:
    kv_heads = slab.shape[1]
    taken = bits.load(slab[ids]).reshape(
      num_pages, kv_heads, group.page_size, -1
    )
    flat = taken.transpose(0, 2, 1, 3).reshape(-1, kv_heads, taken.shape[-1])
    return flat[:length, :, : group.head_dim]

  return rows(group.k), rows(group.v)
