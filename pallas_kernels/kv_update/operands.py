"""What every implementation of the updates is given."""

import dataclasses
import functools
from collections.abc import Callable

import jax

from pallas_kernels import page_shape


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("k", "v", "k_pages", "v_pages", "slots", "k_scales", "v_scales"),
  meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class WriteOperands:
  """The arrays of one `write_kv`."""

  k: jax.Array  # [tokens, kv_heads, head_dim]
  v: jax.Array  # [tokens, kv_heads, v_head_dim]
  k_pages: jax.Array  # [pages, kv_heads, page_size // fold, lane]
  v_pages: jax.Array  # the same, lane of v_head_dim
  slots: jax.Array  # int32 [tokens], page * page_size + row
  k_scales: jax.Array | None = None  # float32 [pages, 1, scale lanes]
  v_scales: jax.Array | None = None  # float32 [pages, 1, scale lanes]


@dataclasses.dataclass(frozen=True)
class WriteOptions:
  """The static side of one `write_kv`: how K and V pages lie."""

  k_geometry: page_shape.PageGeometry
  v_geometry: page_shape.PageGeometry


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("pages", "source_pages", "destination_pages", "row_counts"),
  meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class CopyOperands:
  """The arrays of one `copy_rows`."""

  pages: jax.Array  # [pages, kv_heads, page_size // fold, lane]
  source_pages: jax.Array  # int32 [copies]
  destination_pages: jax.Array  # int32 [copies]
  row_counts: jax.Array  # int32 [copies]


@dataclasses.dataclass(frozen=True)
class CopyOptions:
  """The static side of one `copy_rows`: how the pages lie."""

  geometry: page_shape.PageGeometry


def write_both(
  write: Callable[..., tuple[jax.Array, jax.Array | None]],
  operands: WriteOperands,
  options: WriteOptions,
) -> tuple[jax.Array, ...]:
  """Writes K, then V, by `write(x, pages, scales, slots, geometry)`.

  Returns:
    What `api.write_kv` returns: both pages, and both scales where quantised.
  """
  slots = operands.slots
  k_pages, k_scales = write(
    operands.k, operands.k_pages, operands.k_scales, slots, options.k_geometry
  )
  v_pages, v_scales = write(
    operands.v, operands.v_pages, operands.v_scales, slots, options.v_geometry
  )
  if k_scales is None or v_scales is None:
    return k_pages, v_pages
  return k_pages, v_pages, k_scales, v_scales
