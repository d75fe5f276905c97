"""`copy_rows` for TPU: a page is read, merged with its source and written.

One grid step is one copy; one with a count of 0 is skipped.  Destinations are
never sources and never named twice, so copies may overlap: the reads of the next
copy are under way while this one is merged.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import page_shape
from pallas_kernels.kv_update import operands as operands_lib
from pallas_kernels.kv_update import tpu_tiles

Ref = Any


def _kernel(
  sources: Ref,  # SMEM int32 [copies]
  destinations: Ref,  # SMEM int32 [copies]
  counts: Ref,  # SMEM int32 [copies]
  _before: Ref,  # the pages, which the output aliases
  pages: Ref,  # HBM [pages, kv_heads, rows, lane]
  new: Ref,  # VMEM [2, kv_heads, rows, lane], sources
  old: Ref,  # VMEM [2, kv_heads, rows, lane], destinations
  read_semaphores: Ref,  # DMA [2]
  write_semaphores: Ref,  # DMA [2]
  *,
  geometry: page_shape.PageGeometry,
  num_copies: int,
) -> None:
  def reads(copy: jax.Array, half: jax.Array) -> list[Any]:
    return [
      pltpu.make_async_copy(
        pages.at[ids[copy]], buffer.at[half], read_semaphores.at[half]
      )
      for ids, buffer in ((sources, new), (destinations, old))
    ]

  def write(copy: jax.Array, half: jax.Array) -> Any:
    return pltpu.make_async_copy(
      old.at[half], pages.at[destinations[copy]], write_semaphores.at[half]
    )

  def next_real(copy: jax.Array) -> jax.Array:
    return lax.while_loop(
      lambda c: (
        (c < num_copies) & (counts[jnp.minimum(c, num_copies - 1)] == 0)
      ),
      lambda c: c + 1,
      copy,
    )

  first = next_real(jnp.int32(0))

  @pl.when(first < num_copies)
  def _() -> None:
    for read in reads(first, jnp.int32(0)):
      read.start()

  def body(
    carry: tuple[jax.Array, jax.Array, jax.Array],
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    copy, before, done = carry
    half = lax.rem(done, 2)
    following = next_real(copy + 1)

    @pl.when(done > 0)  # It wrote from the half that is read into next.
    def _() -> None:
      write(before, 1 - half).wait()

    @pl.when(following < num_copies)
    def _() -> None:
      for read in reads(following, 1 - half):
        read.start()

    for read in reads(copy, half):
      read.wait()
    row = lax.broadcasted_iota(jnp.int32, new.shape[1:], 1)
    if geometry.fold == 2:
      lane = lax.broadcasted_iota(jnp.int32, new.shape[1:], 2)
      row = 2 * row + (lane >= geometry.lane // 2).astype(jnp.int32)
    old[half] = jnp.where(row < counts[copy], new[half], old[half])
    write(copy, half).start()
    return following, copy, done + 1

  _, last, done = lax.while_loop(
    lambda carry: carry[0] < num_copies, body, (first, first, jnp.int32(0))
  )

  @pl.when(done > 0)
  def _() -> None:
    write(last, lax.rem(done + 1, 2)).wait()


def copy_rows(
  operands: operands_lib.CopyOperands, options: operands_lib.CopyOptions
) -> jax.Array:
  """`api.copy_rows`."""
  pages = operands.pages
  num_copies = operands.source_pages.shape[0]
  if num_copies == 0:
    return pages
  buffer = pltpu.VMEM((2, *pages.shape[1:]), pages.dtype)
  return pl.pallas_call(
    functools.partial(
      _kernel, geometry=options.geometry, num_copies=num_copies
    ),
    out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(1,),
      in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
      out_specs=pl.BlockSpec(memory_space=pl.ANY),
      scratch_shapes=[
        buffer,
        buffer,
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((2,)),
      ],
    ),
    input_output_aliases={3: 0},
    compiler_params=tpu_tiles.COMPILER_PARAMS,
    name="kvjax_copy_rows",
  )(
    operands.source_pages,
    operands.destination_pages,
    operands.row_counts,
    pages,
  )
