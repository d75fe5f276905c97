"""`write_kv` for TPU: rows go in by tiles of eight lane rows.

The new rows come as float32, as only 32-bit rows may be loaded from any offset:
an aligned tile of them, shifted to where the run begins, is one load.  Where two
rows share a lane row, they come paired both ways, `(0,1) (2,3) ..` and `(-1,0)
(1,2) ..`, and the run takes the pairing of its parity.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import page_shape
from pallas_kernels.kv_update import operands as operands_lib
from pallas_kernels.kv_update import quantize
from pallas_kernels.kv_update import tpu_runs
from pallas_kernels.kv_update import tpu_tiles

Ref = Any


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("rows", "scales"),
  meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Source:
  """The new rows of one side: arrays outside the kernel, references inside."""

  rows: Any  # VMEM float32 [1, fold, columns * kv_heads, lane rows, 128]
  scales: Any  # VMEM float32 [1, chunk, 1, scale lanes], or None


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("runs", "rings", "scale_rings", "semaphores"),
  meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Scratch:
  """What is in flight: types outside the kernel, references inside."""

  runs: tpu_runs.Scratch
  rings: tuple[Any, ...]  # VMEM [ring, kv_heads, 8, lane], of K and V
  scale_rings: tuple[Any, ...]  # VMEM float32 [ring, 1, scale lanes]
  semaphores: Any  # DMA [sides, ring]


def _kernel(
  slots: Ref,  # SMEM int32 [tokens + tile_tokens]
  sources: tuple[Source, Source],
  _before: tuple[Ref, ...],  # the pages, which the outputs alias
  *pages_and_scratch: Any,  # HBM references of K, V and their scales; Scratch
  options: operands_lib.WriteOptions,
  num_tokens: int,
  chunk: int,
) -> None:
  *pages, scratch = pages_and_scratch
  first = pl.program_id(0) * chunk
  tokens = (first, jnp.minimum(first + chunk, num_tokens))
  geometries = (options.k_geometry, options.v_geometry)
  tile_tokens = tpu_tiles.tile_rows(geometries[0]) * geometries[0].fold
  sides = tuple(
    tpu_runs.Side(
      tile=functools.partial(_page_tile, ref, geometry),
      ring=ring,
      semaphores=scratch.semaphores.at[i],
      change=functools.partial(_change_rows, source.rows, geometry.fold),
    )
    for i, (ref, geometry, ring, source) in enumerate(
      zip(pages[:2], geometries, scratch.rings, sources, strict=True)
    )
  )
  tpu_runs.update_tiles(slots, tokens, tile_tokens, sides, scratch.runs)
  if len(pages) == 2:
    return
  scale_sides = tuple(
    tpu_runs.Side(
      tile=functools.partial(_scale_tile, ref),
      ring=ring,
      semaphores=scratch.semaphores.at[2 + i],
      change=functools.partial(
        _change_scales, source.scales, geometries[i].page_size
      ),
    )
    for i, (ref, ring, source) in enumerate(
      zip(pages[2:], scratch.scale_rings, sources, strict=True)
    )
  )
  tpu_runs.update_tiles(
    slots, tokens, geometries[0].page_size, scale_sides, scratch.runs
  )


def _page_tile(
  pages: Ref, geometry: page_shape.PageGeometry, tile: jax.Array
) -> Ref:
  """A tile of all heads of a page."""
  rows = tpu_tiles.tile_rows(geometry)
  tiles = geometry.page_size // geometry.fold // rows
  if tiles == 1:
    return pages.at[tile]
  start = pl.multiple_of(lax.rem(tile, tiles) * rows, rows)
  return pages.at[lax.div(tile, tiles), :, pl.ds(start, rows)]


def _scale_tile(scales: Ref, page: jax.Array) -> Ref:
  return scales.at[page]


def _change_rows(
  source: Ref,  # VMEM float32 [1, fold, columns * kv_heads, lane rows, 128]
  fold: int,
  old: jax.Array,  # [kv_heads, tile rows, lane]
  run: tpu_runs.Run,
) -> jax.Array:
  # The token that belongs in the tile's first row, counted from the padding.
  base = run.source_row - run.first_row + tpu_tiles.TILE_ROWS * fold
  row = lax.broadcasted_iota(jnp.int32, old.shape, 1)
  if fold == 1:
    new = _load(source, 0, base, old.shape)
  else:
    parity = lax.rem(base, 2)
    new = _load(source, parity, lax.div(base + parity, 2), old.shape)
    lane = lax.broadcasted_iota(jnp.int32, old.shape, 2)
    row = 2 * row + (lane >= old.shape[2] // 2).astype(jnp.int32)
  changed = (row >= run.first_row) & (row < run.first_row + run.count)
  return jnp.where(changed, new.astype(old.dtype), old)


def _load(
  source: Ref,
  pairing: jax.Array | int,
  start: jax.Array,
  shape: tuple[int, ...],
) -> jax.Array:
  """Lane rows from any offset, which hardware loads 128 lanes at a time."""
  heads, rows, _ = shape
  columns = [
    source[0, pairing, pl.ds(at, heads), pl.ds(start, rows), :]
    for at in range(0, source.shape[2], heads)
  ]
  return columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=-1)


def _change_scales(
  source: Ref,  # VMEM float32 [1, chunk, 1, scale lanes]
  page_size: int,
  old: jax.Array,  # float32 [1, scale lanes]
  run: tpu_runs.Run,
) -> jax.Array:
  row = lax.broadcasted_iota(jnp.int32, old.shape, 1) & (page_size - 1)

  def body(i: jax.Array, scales: jax.Array) -> jax.Array:
    new = source[0, run.source_row + i]
    return jnp.where(row == run.first_row + i, new, scales)

  return lax.fori_loop(0, run.count, body, old)


def write_kv(
  operands: operands_lib.WriteOperands, options: operands_lib.WriteOptions
) -> tuple[jax.Array, ...]:
  """`api.write_kv`."""
  num_tokens = operands.k.shape[0]
  pages = [operands.k_pages, operands.v_pages]
  if operands.k_scales is not None and operands.v_scales is not None:
    pages += [operands.k_scales, operands.v_scales]
  chunk = tpu_tiles.write_tiles(operands, options).chunk
  num_chunks = -(-num_tokens // chunk)
  sources = (
    _source(
      operands.k, operands.k_pages, operands.k_scales, chunk, options.k_geometry
    ),
    _source(
      operands.v, operands.v_pages, operands.v_scales, chunk, options.v_geometry
    ),
  )
  # A run is looked for up to a tile past the last token.
  tail = max(
    tpu_tiles.TILE_ROWS * options.k_geometry.fold, options.k_geometry.page_size
  )
  slots = jnp.pad(operands.slots, (0, tail), constant_values=-1)
  in_hbm = pl.BlockSpec(memory_space=pl.ANY)
  num_sources = len(jax.tree.leaves(sources))
  return tuple(
    pl.pallas_call(
      functools.partial(
        _kernel, options=options, num_tokens=num_tokens, chunk=chunk
      ),
      out_shape=tuple(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pages),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(num_chunks,),
        in_specs=[
          jax.tree.map(_chunk_spec, sources),
          tuple(in_hbm for _ in pages),
        ],
        out_specs=tuple(in_hbm for _ in pages),
        scratch_shapes=[_scratch(operands, options)],
      ),
      input_output_aliases={1 + num_sources + i: i for i in range(len(pages))},
      compiler_params=tpu_tiles.COMPILER_PARAMS,
      name="kvjax_write_kv",
    )(slots, sources, tuple(pages))
  )


def _chunk_spec(x: jax.Array) -> pl.BlockSpec:
  zeros = (0,) * (x.ndim - 1)
  return pl.BlockSpec((1, *x.shape[1:]), lambda c, _: (c, *zeros))


def _scratch(
  operands: operands_lib.WriteOperands, options: operands_lib.WriteOptions
) -> Any:
  ring = tpu_tiles.write_tiles(operands, options).ring
  rings = []
  for pages, geometry in (
    (operands.k_pages, options.k_geometry),
    (operands.v_pages, options.v_geometry),
  ):
    rows = tpu_tiles.tile_rows(geometry)
    shape = (ring, geometry.kv_heads, rows, geometry.lane)
    rings.append(pltpu.VMEM(shape, pages.dtype))
  scale_rings = []
  if operands.k_scales is not None:
    shape = (ring, *operands.k_scales.shape[1:])
    scale_rings = [pltpu.VMEM(shape, jnp.float32)] * 2
  return Scratch(
    runs=tpu_runs.Scratch.types(ring),
    rings=tuple(rings),
    scale_rings=tuple(scale_rings),
    semaphores=pltpu.SemaphoreType.DMA((len(rings) + len(scale_rings), ring)),
  )


def _source(
  x: jax.Array,  # [tokens, kv_heads, head_dim]
  pages: jax.Array,
  scales: jax.Array | None,
  chunk: int,
  geometry: page_shape.PageGeometry,
) -> Source:
  """A side's rows as the kernel reads them, chunk by chunk."""
  tokens, kv_heads, _ = x.shape
  factors = None
  if scales is None:
    x = x.astype(pages.dtype)
  else:
    x, factors = quantize.quantize_rows(x, pages.dtype)
    # Every lane of a head holds the row's scale: the kernel only selects.
    factors = jnp.repeat(factors, geometry.page_size, axis=1)
    spare = scales.shape[-1] - factors.shape[1]
    factors = jnp.pad(factors, ((0, -tokens % chunk), (0, spare)))
    factors = factors.reshape(-1, chunk, 1, scales.shape[-1])
  fold = geometry.fold
  x = x.astype(jnp.float32)
  spare = geometry.stored_dim - geometry.head_dim
  x = jnp.pad(x, ((0, -tokens % chunk), (0, 0), (0, spare)))
  x = x.reshape(-1, chunk, kv_heads, geometry.stored_dim).swapaxes(1, 2)
  # A tile's worth on both sides, for runs that begin within a tile.
  pad = tpu_tiles.TILE_ROWS * fold
  pairings = [
    jnp.pad(x, ((0, 0), (0, 0), (pad + i, pad + fold - i), (0, 0)))
    for i in range(fold)
  ]
  chunks = x.shape[0]
  lane = page_shape.TPU_LANE
  columns = geometry.lane // lane
  rows = jnp.stack(
    [p.reshape(chunks, kv_heads, -1, columns, lane) for p in pairings], axis=1
  )
  rows = jnp.moveaxis(rows, -2, 2)
  rows = rows.reshape(chunks, fold, columns * kv_heads, -1, lane)
  return Source(rows=rows, scales=factors)
