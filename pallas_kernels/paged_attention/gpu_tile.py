"""What one tile of keys does to one tile of queries, on Hopper.

The body that the decode and the ragged kernel share: logits by WGMMA, online
softmax in base 2, values by WGMMA.  All refs are in shared memory.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.paged_attention import gpu_tiles
from pallas_kernels.paged_attention import operands as operands_lib

Ref = Any
MATRIX = plgpu.Layout.WGMMA
ROWS = MATRIX.reduce(1)  # one value for each row
COLUMNS = MATRIX.reduce(0)  # one value for each column
LOG2E = math.log2(math.e)
# Columns that one pass over a tile holds in registers.
CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Spec:
  """The static facts of a kernel.

  Attributes:
    head_dim: elements of a query and a key.
    v_head_dim: elements of a value.
    page_size: token rows of a page.
    table_width: pages of a table's row.
    key_rows: rows of K and V that one step reads.
    stages: steps whose copies are in shared memory at once.
    scale: multiplies the logits.
    soft_cap: bounds them, or None.
    dtype: of queries and of matrix products.
    page_dtype: of stored rows; one byte wide means scaled.
    one_table: whether K and V share their page table.
    workers: warpgroups that compute on the same tiles of keys.
    interpret: whether the kernel runs on the CPU, interpreted.
  """

  head_dim: int
  v_head_dim: int
  page_size: int
  table_width: int
  key_rows: int
  stages: int
  scale: float
  soft_cap: float | None
  dtype: Any
  page_dtype: Any
  one_table: bool
  workers: int
  interpret: bool

  @property
  def quantized(self) -> bool:
    """Whether stored rows have scales."""
    return jnp.dtype(self.page_dtype).itemsize == 1

  @property
  def pages_per_step(self) -> int:
    """Pages that one step touches; a step may also be part of one page."""
    return max(1, self.key_rows // self.page_size)

  @property
  def parts(self) -> int:
    """Steps that one page takes."""
    return max(1, self.page_size // self.key_rows)

  @property
  def copy_rows(self) -> int:
    """Rows that one copy moves."""
    return min(self.key_rows, self.page_size)


def spec_of(
  operands: operands_lib.Operands,
  options: operands_lib.Options,
  tiles: gpu_tiles.DecodeTiles | gpu_tiles.PrefillTiles,
  *,
  workers: int,
) -> Spec:
  """The static facts of a call's kernel.

  Args:
    operands: of the call.
    options: of the call.
    tiles: how its work is cut.
    workers: warpgroups that compute on the same tiles of keys.
  """
  return Spec(
    head_dim=options.head_dim,
    v_head_dim=options.v_head_dim,
    page_size=options.page_size,
    table_width=operands.page_table.shape[1],
    key_rows=tiles.key_rows,
    stages=tiles.stages,
    scale=options.scale,
    soft_cap=options.soft_cap,
    dtype=operands.q.dtype,
    page_dtype=operands.k_pages.dtype,
    one_table=operands.v_page_table is None,
    workers=workers,
    interpret=_compat.gpu_interpreter() is not None,
  )


@dataclasses.dataclass(frozen=True)
class Team:
  """Warpgroups that compute on the same tiles of keys, seen from one of them.

  Attributes:
    index: which one this is.
    size: how many there are.
    barrier: where they meet, None for a team of one.
  """

  index: jax.Array | int = 0
  size: int = 1
  barrier: Ref | None = None

  def each(self, ref: Ref, piece: Callable[[Any, Any], None]) -> None:
    """Shares out the 64 x 64 pieces of a tile, given as row and column."""
    rows, columns = ref.shape
    places = itertools.product(
      range(0, rows, gpu_tiles.QUERY_ROWS), range(0, columns, CHUNK)
    )
    for number, place in enumerate(places):
      if self.size == 1:
        piece(*place)
      else:
        pl.when(self.index == number % self.size)(
          functools.partial(piece, *place)
        )

  def meet(self) -> None:
    """Makes everyone's writes to shared memory visible to everyone."""
    plgpu.commit_smem()
    if self.barrier is not None:
      plgpu.barrier_arrive(self.barrier.at[0])
      plgpu.barrier_wait(self.barrier.at[0])


@dataclasses.dataclass(frozen=True)
class State:
  """The running softmax of a query tile, logits in base 2."""

  out: jax.Array  # float32 [rows, v_head_dim], not normalised
  top: jax.Array  # float32 [rows], the largest logit
  total: jax.Array  # float32 [rows], sum of exp2(logit - top)


jax.tree_util.register_dataclass(
  State, data_fields=("out", "top", "total"), meta_fields=()
)


def tiled(rows: tuple[int, ...], columns: int, dtype: Any) -> Any:
  """Shared memory for a matrix that WGMMA reads: 8-row tiles, swizzled."""
  itemsize = jnp.dtype(dtype).itemsize
  width = min(128, CHUNK * itemsize)
  return plgpu.SMEM(
    (*rows, columns),
    dtype,
    transforms=(
      plgpu.TilingTransform((8, width // itemsize)),
      plgpu.SwizzleTransform(width),
    ),
  )


def laid_out(value: jax.Array, layout: Any, spec: Spec) -> jax.Array:
  """A value in registers in the given layout."""
  # JAX 0.10 interprets no cast, and an interpreted value has no layout.
  return value if spec.interpret else plgpu.layout_cast(value, layout)


def index_of(
  shape: tuple[int, int], axis: int, first: jax.Array, spec: Spec
) -> jax.Array:
  """`first` plus the index along an axis, as a matrix in registers."""
  if spec.interpret:
    return first + lax.broadcasted_iota(jnp.int32, shape, axis)
  return first + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=MATRIX)


def empty_state(spec: Spec) -> State:
  """The state of a query tile that has seen no key."""
  rows = gpu_tiles.QUERY_ROWS
  out = jnp.zeros((rows, spec.v_head_dim), jnp.float32)
  top = jnp.full((rows,), -jnp.inf, jnp.float32)
  return State(
    out=laid_out(out, MATRIX, spec),
    top=laid_out(top, ROWS, spec),
    total=laid_out(jnp.zeros_like(top), ROWS, spec),
  )


def logits(
  q: Ref,  # [64, head_dim]
  k: Ref,  # [key_rows, head_dim]
  k_scales: Ref | None,  # float32 [key_rows]
  spec: Spec,
) -> jax.Array:
  """Scaled and capped logits in base 2, float32 [64, key_rows]."""
  found = _q_dot_k(q, k, spec)
  shape = found.shape
  if k_scales is not None:
    factors = laid_out(k_scales[...], COLUMNS, spec)
    found = found * lax.broadcast_in_dim(factors, shape, (1,))
  if spec.soft_cap is None:
    return found * (spec.scale * LOG2E)
  return _tanh(found * (spec.scale / spec.soft_cap)) * (spec.soft_cap * LOG2E)


def _tanh(x: jax.Array) -> jax.Array:
  """tanh to float32's precision: the hardware's own is off by 5e-4."""
  return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2E)))


def _q_dot_k(q: Ref, k: Ref, spec: Spec) -> jax.Array:
  if spec.interpret and not _compat.GPU_INTERPRETS_TRANSPOSED:
    rows, keys = q[...].astype(jnp.float32), k[...].astype(jnp.float32)
    plgpu.commit_smem()  # As WGMMA's wait does, before the next copy.
    return jnp.dot(rows, keys.T)

  def product(acc: Ref) -> jax.Array:
    plgpu.wgmma(acc, q, _compat.gpu_transposed(k))
    return acc[...]

  shape = (gpu_tiles.QUERY_ROWS, spec.key_rows)
  return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


def key_index(first_row: jax.Array, spec: Spec) -> jax.Array:
  """The row of each key of a tile, int32 [64, key_rows]."""
  shape = (gpu_tiles.QUERY_ROWS, spec.key_rows)
  return index_of(shape, 1, first_row, spec)


def softmax_step(state: State, found: jax.Array) -> tuple[jax.Array, State]:
  """Weights of a tile's keys, and the state rescaled for them.

  Args:
    state: before the tile.
    found: logits in base 2, -inf where not seen.
  """
  top = jnp.maximum(state.top, found.max(axis=1))
  # A row that has seen nothing must not compute -inf - -inf.
  base = jnp.where(top == -jnp.inf, jnp.zeros_like(top), top)
  fade = jnp.exp2(state.top - base)
  weights = jnp.exp2(found - lax.broadcast_in_dim(base, found.shape, (0,)))
  out = state.out * lax.broadcast_in_dim(fade, state.out.shape, (0,))
  total = state.total * fade + weights.sum(axis=1)
  return weights, State(out=out, top=top, total=total)


def accumulate(
  out: jax.Array,  # float32 [64, v_head_dim]
  weights: jax.Array,  # [64, key_rows] in the products' dtype
  v: Ref,  # [key_rows, v_head_dim]
  *,
  interpret: bool,
) -> Any:
  """`out + weights @ v`, in the accumulator's own registers."""
  if interpret:
    # JAX interprets no WGMMA of registers, nor one that goes on from a value.
    values = v[...].astype(jnp.float32)
    plgpu.commit_smem()  # As WGMMA's wait does, before the next copy.
    return out + jnp.dot(weights.astype(jnp.float32), values)

  def add(acc: Ref) -> None:
    plgpu.wgmma(acc, weights, v)

  return pl.run_state(add)(plgpu.ACC.init(out))


def zero_unseen(
  v: Ref,  # [key_rows, columns]
  first_row: jax.Array,
  lo: jax.Array,
  hi: jax.Array,
  spec: Spec,
  team: Team,
) -> None:
  """Zeroes rows outside lo..hi: no weight, not even 0, may meet a NaN."""

  def piece(row: int, column: int) -> None:
    part = piece_of(v, row, column)
    index = index_of(part.shape, 0, first_row + row, spec)
    value = laid_out(part[...], MATRIX, spec)
    part[...] = jnp.where(
      (index >= lo) & (index < hi), value, jnp.zeros_like(value)
    )

  team.each(v, piece)
  team.meet()


def piece_of(ref: Ref, row: int, column: int) -> Ref:
  """64 rows and columns of a tile."""
  return ref.at[pl.ds(row, gpu_tiles.QUERY_ROWS), pl.ds(column, CHUNK)]


def finish(state: State) -> tuple[jax.Array, jax.Array]:
  """The normalised output and its natural-log LSE."""
  seen = state.total > 0
  total = jnp.where(seen, state.total, jnp.ones_like(state.total))
  out = state.out * lax.broadcast_in_dim(1 / total, state.out.shape, (0,))
  lse = (state.top + jnp.log(total) * LOG2E) * (1 / LOG2E)
  return out, jnp.where(seen, lse, jnp.full_like(lse, -jnp.inf))
