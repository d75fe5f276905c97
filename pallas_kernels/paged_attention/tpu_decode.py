"""Paged decode for TPU: one query row for each sequence.

A grid step is a sequence: all KV heads of a page are one copy, and all heads'
products of a block one batched product.  A query sees the rows [first, end) of
its sequence, which is all that causality, windows and lengths come to.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import page_shape
from pallas_kernels.paged_attention import operands as operands_lib
from pallas_kernels.paged_attention import tpu_block
from pallas_kernels.paged_attention import tpu_calls
from pallas_kernels.paged_attention import tpu_stream
from pallas_kernels.paged_attention import tpu_tiles

Ref = Any


@dataclasses.dataclass(frozen=True)
class Static:
  """What the kernel is compiled for."""

  k_geometry: page_shape.PageGeometry
  v_geometry: page_shape.PageGeometry
  scale: float
  soft_cap: float | None
  sequences: int
  pages_per_block: int

  @property
  def block_rows(self) -> int:
    """Token rows of a block."""
    return self.pages_per_block * self.k_geometry.page_size


def _kernel(
  first_ref: Ref,  # SMEM int32 [sequences]
  end_ref: Ref,  # SMEM int32 [sequences]
  next_live_ref: Ref,  # SMEM int32 [sequences + 1]
  q_ref: Ref,  # VMEM [1, kv_heads, fold * group, k_lane]
  top_ref: Ref,  # VMEM float32 [kv_heads, fold * group, 1]
  arrays: tpu_calls.StreamArrays,
  out_ref: Ref,  # VMEM [1, kv_heads, group, v_head_dim]
  lse_ref: Ref,  # VMEM float32 [1, kv_heads, group, 1]
  scratch: tpu_calls.StreamScratch,
  *,
  static: Static,
) -> None:
  sequence = pl.program_id(0)
  stream = tpu_calls.stream(
    arrays,
    scratch,
    first_row=first_ref,
    end_row=end_ref,
    next_live=next_live_ref,
    sequence_of=lambda item: item,
    num_items=static.sequences,
    pages_per_block=static.pages_per_block,
    geometry=static.k_geometry,
  )
  low, high = first_ref[sequence], end_ref[sequence]
  fold = static.k_geometry.fold
  q = q_ref[0]
  rows = q.shape[1]
  shape = (rows, static.block_rows // fold)

  def compute(
    first_row: jax.Array, half: jax.Array, state: tpu_block.State
  ) -> tpu_block.State:
    @pl.when((first_row < low) | (first_row + static.block_rows > high))
    def _() -> None:
      scratch.blank(half, fold, first_row, (low, high))

    row = tpu_block.fold_rows(shape, fold, first_row)
    seen = ((row >= low) & (row < high))[None]
    factors = scratch.factors(half, static.k_geometry, first_row, (low, high))
    k_factors, v_factors = (None, None)
    if factors is not None:
      k_factors, v_factors = (
        tpu_block.stack_factors(side, rows) for side in factors
      )
    scores = tpu_block.logits(
      q,
      tpu_block.widen(tpu_block.heads_of(scratch.k, half), q.dtype),
      scale=static.scale,
      k_factors=k_factors,
      soft_cap=static.soft_cap,
    )
    scores = jnp.where(seen, scores, tpu_block.NEG_INF)
    v = tpu_block.widen(tpu_block.heads_of(scratch.v, half), q.dtype)
    return tpu_block.update(state, scores, v, v_factors)

  state = stream.walk(
    sequence,
    compute,
    tpu_block.initial(top_ref[...], static.v_geometry.lane),
  )
  out, lse = tpu_block.finish(state, fold)
  out_ref[0] = out[..., : static.v_geometry.head_dim].astype(out_ref.dtype)
  lse_ref[0] = lse


def decode(
  operands: operands_lib.Operands,
  options: operands_lib.Options,
  tiles: tpu_tiles.DecodeTiles,
) -> tuple[jax.Array, jax.Array]:
  """`api.paged_attention` where each sequence has one query row."""
  sequences, q_heads, _ = operands.q.shape
  kv_heads = options.kv_heads
  group = q_heads // kv_heads
  geometry = options.k_geometry
  static = Static(
    k_geometry=geometry,
    v_geometry=options.v_geometry,
    scale=options.scale,
    soft_cap=options.soft_cap,
    sequences=sequences,
    pages_per_block=tiles.pages_per_block,
  )
  first, end = tpu_calls.seen_rows(operands, options)
  dtype = tpu_block.compute_dtype(operands.q.dtype, operands.k_pages.dtype)
  q = operands.q.reshape(sequences, kv_heads, group, -1).astype(dtype)
  q = tpu_calls.folded_queries(q, geometry)
  top = tpu_calls.sink_tops(operands.sinks, kv_heads, group, geometry.fold)
  rows = geometry.fold * group

  def block(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, *shape), lambda s, *_: (s, 0, 0, 0))

  arrays, array_specs = tpu_calls.stream_arrays(
    operands, options, tiles.pages_per_block
  )
  out, lse = pl.pallas_call(
    functools.partial(_kernel, static=static),
    out_shape=(
      jax.ShapeDtypeStruct(
        (sequences, kv_heads, group, options.v_head_dim), operands.q.dtype
      ),
      jax.ShapeDtypeStruct((sequences, kv_heads, group, 1), jnp.float32),
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(sequences,),
      in_specs=[
        block(kv_heads, rows, geometry.lane),
        pl.BlockSpec((kv_heads, rows, 1), lambda s, *_: (0, 0, 0)),
        array_specs,
      ],
      out_specs=(
        block(kv_heads, group, options.v_head_dim),
        block(kv_heads, group, 1),
      ),
      scratch_shapes=[
        tpu_calls.stream_scratch(operands, options, tiles.pages_per_block)
      ],
    ),
    compiler_params=tpu_calls.COMPILER_PARAMS,
    name="kvjax_paged_decode",
  )(first, end, tpu_stream.next_live(first, end), q, top, arrays)
  return (
    out.reshape(sequences, q_heads, options.v_head_dim),
    lse.reshape(sequences, q_heads),
  )
