"""Scales of quantised pages, from pages' rows to the shape of the scores.

A page's scales lie `[head * page_size + row]` in lanes; scores want, for each
head, the rows of the block's pages one after another.  Where two rows share a
lane row, even and odd rows are wanted apart.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import page_shape

Ref = Any


def why_unsupported(geometry: page_shape.PageGeometry) -> str | None:
  """Why scales of such pages cannot be rearranged, or None."""
  size = geometry.page_size
  if size & (size - 1):
    return (
      f"page_size={size} with quantised pages, expected a power of two: a head's"
      " scales must not straddle lane rows"
    )
  return None


def factors(
  scales: jax.Array,  # float32 [pages_per_block, 1, scale lanes]
  geometry: page_shape.PageGeometry,
  *,
  first_row: jax.Array,
  seen: tuple[jax.Array, jax.Array],
) -> list[list[jax.Array]]:
  """Each head's scales, for each part of the rows.

  Args:
    scales: of the block's pages.
    geometry: of those pages.
    first_row: of the block.
    seen: the first row that is seen, and the one after the last; the scales of
      all others become 0, as nobody wrote them for us.

  Returns:
    `[kv_heads][fold]` arrays, float32 `[1, pages_per_block * page_size / fold]`.
  """
  fold, size = geometry.fold, geometry.page_size
  lane = page_shape.SCALE_LANE
  pages = scales.shape[0]
  unit = min(size, lane)  # rows that lie within one lane row
  width = unit // fold
  rows = scales[:, 0, :]
  at = lax.broadcasted_iota(jnp.int32, rows.shape, 1)
  page = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
  row = first_row + page * size + (at & (size - 1))
  is_ours = (row >= seen[0]) & (row < seen[1])
  is_ours &= at < geometry.kv_heads * size
  rows = jnp.where(is_ours, rows, 0.0)
  columns = [
    rows[:, start : start + lane] for start in range(0, rows.shape[1], lane)
  ]
  if fold == 2:
    columns = [_unzip(column, unit) for column in columns]
  found = []
  for head in range(geometry.kv_heads):
    parts: list[list[jax.Array]] = [[] for _ in range(fold)]
    for page in range(pages):
      for start in range(head * size, (head + 1) * size, unit):
        column = columns[start // lane]
        for part in range(fold):
          at = start % lane + part * width
          parts[part].append(column[page : page + 1, at : at + width])
    found.append([jnp.concatenate(p, axis=1) for p in parts])
  return found


def _unzip(
  column: jax.Array,  # float32 [pages, 128]
  unit: int,
) -> jax.Array:
  """Even rows of each unit first, then its odd ones; exact."""
  lane = column.shape[1]
  source = lax.broadcasted_iota(jnp.int32, (lane, lane), 0)
  target = lax.broadcasted_iota(jnp.int32, (lane, lane), 1)
  within = lax.rem(target, unit)
  odd = (within >= unit // 2).astype(jnp.int32)
  wanted = target - within + 2 * (within - odd * (unit // 2)) + odd
  moves = (source == wanted).astype(jnp.float32)
  # One-hot and all of float32's bits: every product is the scale itself.
  return lax.dot_general(
    column,
    moves,
    (((1,), (0,)), ((), ())),
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
