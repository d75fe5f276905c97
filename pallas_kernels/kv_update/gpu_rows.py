"""Rows moved by Hopper's bulk copies, in place.

    write    a block for each token            K and V rows -> shared -> pages
    copy     a block for each (copy, KV head)  a page -> shared -> another page

Nothing passes through registers, so a dtype is its bytes.  The pools are
mutable references, which alias their successors.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.kv_update import gpu

Ref = Any


def write(
  k: jax.Array,  # [tokens, kv_heads, head_dim]
  v: jax.Array,  # [tokens, kv_heads, v_head_dim]
  k_pages: jax.Array,  # [pages, kv_heads, page_size, head_dim]
  v_pages: jax.Array,  # [pages, kv_heads, page_size, v_head_dim]
  slots: jax.Array,  # int32 [tokens]
) -> tuple[jax.Array, ...]:
  """Writes each token's rows to its slot; returns K's and V's pages."""
  return _in_place(
    functools.partial(_write, page_size=k_pages.shape[2]),
    (k_pages, v_pages),
    (k, v, slots),
    grid={"token": slots.shape[0]},
    scratch={
      "k_s": plgpu.SMEM(k.shape[1:], k.dtype),
      "v_s": plgpu.SMEM(v.shape[1:], v.dtype),
      "ready": plgpu.Barrier(num_arrivals=2, num_barriers=1),
    },
  )


def _write(
  k_g: Ref,  # [tokens, kv_heads, head_dim]
  v_g: Ref,  # [tokens, kv_heads, v_head_dim]
  slots_g: Ref,  # int32 [tokens]
  k_pages_g: Ref,  # [pages, kv_heads, page_size, head_dim]
  v_pages_g: Ref,  # [pages, kv_heads, page_size, v_head_dim]
  *,
  k_s: Ref,  # [kv_heads, head_dim]
  v_s: Ref,  # [kv_heads, v_head_dim]
  ready: Ref,
  page_size: int,
) -> None:
  token = lax.axis_index("token")
  plgpu.copy_gmem_to_smem(k_g.at[token], k_s, ready.at[0])
  plgpu.copy_gmem_to_smem(v_g.at[token], v_s, ready.at[0])
  slot = slots_g[token]
  page = lax.div(slot, jnp.int32(page_size))
  row = lax.rem(slot, jnp.int32(page_size))
  plgpu.barrier_wait(ready.at[0])
  plgpu.copy_smem_to_gmem(k_s, k_pages_g.at[page, :, row])
  plgpu.copy_smem_to_gmem(v_s, v_pages_g.at[page, :, row])
  plgpu.wait_smem_to_gmem(0)


def copy(
  pages: jax.Array,  # [pages, kv_heads, page_size, head_dim]
  source_pages: jax.Array,  # int32 [copies]
  destination_pages: jax.Array,  # int32 [copies]
  row_counts: jax.Array,  # int32 [copies]
) -> jax.Array:
  """Copies the first rows of pages; no destination is a source."""
  _, kv_heads, page_size, head_dim = pages.shape
  groups = page_size // gpu.GROUP_ROWS
  # Mosaic GPU of JAX 0.10 takes no slice at a traced row.
  grouped = pages.reshape(-1, kv_heads, groups, gpu.GROUP_ROWS, head_dim)
  slot = gpu.slot_elements(head_dim, pages.dtype)
  (grouped,) = _in_place(
    functools.partial(_copy, groups=groups, head_dim=head_dim),
    (grouped,),
    (source_pages, destination_pages, row_counts),
    grid={"copy": row_counts.shape[0], "head": kv_heads},
    scratch={
      "page_s": plgpu.SMEM(grouped.shape[2:], pages.dtype),
      "tail_s": plgpu.SMEM((gpu.GROUP_ROWS - 1, slot), pages.dtype),
      "ready": plgpu.Barrier(num_arrivals=gpu.GROUP_ROWS, num_barriers=1),
    },
  )
  return grouped.reshape(pages.shape)


def _copy(
  source_g: Ref,  # int32 [copies]
  destination_g: Ref,  # int32 [copies]
  counts_g: Ref,  # int32 [copies]
  pages_g: Ref,  # [pages, kv_heads, groups, 8, head_dim]
  *,
  page_s: Ref,  # [groups, 8, head_dim]
  tail_s: Ref,  # [7, slot elements], a row where a copy may begin
  ready: Ref,
  groups: int,
  head_dim: int,
) -> None:
  copy, head = lax.axis_index("copy"), lax.axis_index("head")
  count = counts_g[copy]
  source, destination = source_g[copy], destination_g[copy]
  whole = lax.div(count, jnp.int32(gpu.GROUP_ROWS))
  # The group that is copied in part; any, if there is none.
  last = jnp.minimum(whole, jnp.int32(groups - 1))
  rows_left = count - whole * gpu.GROUP_ROWS

  @pl.when(count > 0)
  def _() -> None:
    plgpu.copy_gmem_to_smem(pages_g.at[source, head], page_s, ready.at[0])
    for row in range(gpu.GROUP_ROWS - 1):
      plgpu.copy_gmem_to_smem(
        pages_g.at[source, head, last, row],
        tail_s.at[row, pl.ds(0, head_dim)],
        ready.at[0],
      )
    plgpu.barrier_wait(ready.at[0])

    def store(group: jax.Array, _: None) -> None:
      plgpu.copy_smem_to_gmem(
        page_s.at[group], pages_g.at[destination, head, group]
      )

    lax.fori_loop(0, whole, store, None)
    for row in range(gpu.GROUP_ROWS - 1):

      @pl.when(row < rows_left)
      def _(row: int = row) -> None:
        plgpu.copy_smem_to_gmem(
          tail_s.at[row, pl.ds(0, head_dim)],
          pages_g.at[destination, head, last, row],
        )

    plgpu.wait_smem_to_gmem(0)


def _in_place(
  body: Callable[..., None],
  pools: tuple[jax.Array, ...],
  operands: tuple[jax.Array, ...],
  *,
  grid: dict[str, int],
  scratch: dict[str, Any],
) -> tuple[jax.Array, ...]:
  """Runs a kernel that changes pools.

  Args:
    body: takes references to operands, then to pools, then scratch by name.
    pools: what it changes.
    operands: what it reads.
    grid: axes and their sizes.
    scratch: types, by name.

  Returns:
    The pools' successors.
  """

  def scoped(*refs: Ref) -> None:
    pl.run_scoped(functools.partial(body, *refs), **scratch)

  # `plgpu.kernel` without its batching rule, which takes no references.
  run = pl.kernel(
    scoped,
    out_type=(),
    mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid)),
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    interpret=_compat.gpu_interpreter() or False,
  )
  refs = [jax.new_ref(pool, memory_space=plgpu.GMEM) for pool in pools]
  run(*operands, *refs)
  return tuple(jax.freeze(ref) for ref in refs)
