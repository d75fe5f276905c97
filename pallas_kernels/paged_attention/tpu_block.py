"""The arithmetic of one block of keys and values, for TPU kernels.

Where heads are 64 wide two rows share a lane row (`fold` 2), and each query is
multiplied twice:

    [q, 0] . [k_0, k_1] = q . k_0        lanes 0..63 of p @ V belong to it
    [0, q] . [k_0, k_1] = q . k_1        lanes 64..127

The two are independent online softmaxes over the even and the odd rows, merged
at the end.  So a block has `fold * rows` score rows, and column c of part e is
row `fold * c + e`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import page_shape

NEG_INF = float("-inf")
Ref = Any


@dataclasses.dataclass(frozen=True)
class State:
  """An online softmax: `out = acc / total`, `lse = top + log(total)`."""

  top: jax.Array  # float32 [..., rows, 1], -inf before anything is seen
  total: jax.Array  # float32 [..., rows, 1]
  acc: jax.Array  # float32 [..., rows, v_lane]


jax.tree_util.register_dataclass(
  State, data_fields=("top", "total", "acc"), meta_fields=()
)


def compute_dtype(q: jnp.dtype, pages: jnp.dtype) -> jnp.dtype:
  """The dtype of the matrix products' operands."""
  wide = jnp.float32 in (jnp.dtype(q), jnp.dtype(pages))
  return jnp.dtype(jnp.float32 if wide else jnp.bfloat16)


def precision(dtype: jnp.dtype) -> lax.Precision:
  """float32 needs all its bits, which interpretation cannot see missing."""
  if dtype == jnp.float32:
    return lax.Precision.HIGHEST
  return lax.Precision.DEFAULT


def initial(top: jax.Array, v_lane: int) -> State:
  """The state before the first block.

  Args:
    top: float32 `[..., rows, 1]`: the sink's logit, which joins the denominator
      and has no value, or -inf.
    v_lane: lanes of a V row.
  """
  return State(
    top=top,
    total=jnp.where(top == NEG_INF, 0.0, 1.0),
    acc=jnp.zeros((*top.shape[:-1], v_lane), jnp.float32),
  )


def widen(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Pages as they are stored to the products' dtype."""
  if x.dtype == dtype:
    return x
  if x.dtype.itemsize == 1:
    return x.astype(jnp.float32).astype(dtype)
  return x.astype(dtype)


def fold_rows(
  shape: tuple[int, int], fold: int, first_row: jax.Array
) -> jax.Array:
  """The row that each score belongs to, int32 `[fold * rows, columns]`."""
  column = lax.broadcasted_iota(jnp.int32, shape, 1)
  if fold == 1:
    return column + first_row
  part = lax.broadcasted_iota(jnp.int32, shape, 0) >= shape[0] // 2
  return 2 * column + part.astype(jnp.int32) + first_row


def blank_unseen(
  buffer: Ref,  # VMEM [2, pages, kv_heads, *lane rows, lane]
  half: jax.Array,
  fold: int,
  first_row: jax.Array,
  seen: tuple[jax.Array, jax.Array],
) -> None:
  """Zeroes a block's rows outside [low, high): nobody wrote them for us.

  A weight of 0 times NaN is NaN, so masking scores is not enough for V, nor for
  K where a row shares its lanes with another.
  """
  pages, shape = buffer.shape[1], buffer.shape[3:]
  page_size = math.prod(shape[:-1]) * fold
  at = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2) * fold
  if len(shape) == 3:
    at += lax.broadcasted_iota(jnp.int32, shape, 0) * (shape[1] * fold)
  if fold == 2:
    lane = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    at += (lane >= shape[-1] // 2).astype(jnp.int32)

  # Once or twice a sequence: not worth the length of an unrolled loop.
  def body(page: jax.Array, _: None) -> None:
    start = first_row + page * page_size
    low, high = seen[0] - start, seen[1] - start

    @pl.when((low > 0) | (high < page_size))
    def _() -> None:
      is_seen = ((at >= low) & (at < high))[None]
      x = buffer[half, page]
      buffer[half, page] = jnp.where(is_seen, x, jnp.zeros_like(x))

  lax.fori_loop(0, pages, body, None)


def head_of(
  buffer: Ref,  # VMEM [2, pages, kv_heads, *lane rows, lane]
  half: jax.Array,
  head: jax.Array,
) -> jax.Array:
  """One head's rows of a block, `[pages * lane rows, lane]`."""
  return buffer[half, :, head].reshape(-1, buffer.shape[-1])


def heads_of(
  buffer: Ref,  # VMEM [2, pages, kv_heads, *lane rows, lane]
  half: jax.Array,
) -> jax.Array:
  """All heads' rows of a block, `[kv_heads, pages * lane rows, lane]`."""
  pages = buffer[half]
  return jnp.stack(
    [
      pages[:, head].reshape(-1, pages.shape[-1])
      for head in range(pages.shape[1])
    ]
  )


def stack_factors(factors: list[list[jax.Array]], rows: int) -> jax.Array:
  """Scales of all heads, to multiply scores by.

  Args:
    factors: `[kv_heads][fold]`, each float32 `[1, columns]`.
    rows: score rows of a head, those of all parts.

  Returns:
    float32 `[kv_heads, rows, columns]`, or one row instead where all are alike.
  """
  if len(factors[0]) == 1:
    return jnp.stack([head[0] for head in factors])
  shape = (rows, factors[0][0].shape[1])
  odd = lax.broadcasted_iota(jnp.int32, shape, 0) >= rows // 2
  return jnp.stack([jnp.where(odd, head[1], head[0]) for head in factors])


def update(
  state: State,
  scores: jax.Array,  # float32 [..., rows, columns], masked with -inf
  v: jax.Array,  # [..., columns, v_lane]
  v_factors: jax.Array | None,  # float32, broadcasts against scores
) -> State:
  """Takes one block into the softmax."""
  top = jnp.maximum(state.top, scores.max(-1, keepdims=True))
  # Nothing computes -inf - -inf: a row that saw nothing yet keeps weight 0.
  safe = jnp.where(top == NEG_INF, 0.0, top)
  shrink = jnp.exp(state.top - safe)
  weights = jnp.exp(scores - safe)
  total = state.total * shrink + weights.sum(-1, keepdims=True)
  if v_factors is not None:
    weights = weights * v_factors
  batch = tuple(range(v.ndim - 2))
  added = lax.dot_general(
    weights.astype(v.dtype),
    v,
    (((v.ndim - 1,), (v.ndim - 2,)), (batch, batch)),
    precision=precision(v.dtype),
    preferred_element_type=jnp.float32,
  )
  return State(top=top, total=total, acc=state.acc * shrink + added)


def logits(
  q: jax.Array,  # [..., rows, lane]
  k: jax.Array,  # [..., columns, lane]
  *,
  scale: float,
  k_factors: jax.Array | None,  # float32, broadcasts against the result
  soft_cap: float | None,
) -> jax.Array:
  """Scaled and capped logits, float32 `[..., rows, columns]`, not masked."""
  scores = _product(q, k)
  scores = scores * scale
  if k_factors is not None:
    scores = scores * k_factors
  if soft_cap is not None:
    scores = soft_cap * jnp.tanh(scores / soft_cap)
  return scores


def _product(q: jax.Array, k: jax.Array) -> jax.Array:
  """`q @ k.T` in float32, batched over heads.

  Keys are turned on their way into the matrix unit, which the compiler does for
  one tile of lanes at a time in a fifth of the instructions (v6e, 7x).  A single
  head has nothing to overlap the second tile's products with.
  """
  lanes = q.shape[-1]
  step = page_shape.TPU_LANE if q.ndim == 2 or q.shape[0] > 1 else lanes
  batch = tuple(range(q.ndim - 2))
  scores = [
    lax.dot_general(
      q[..., lane : lane + step],
      k[..., lane : lane + step],
      (((q.ndim - 1,), (k.ndim - 1,)), (batch, batch)),
      precision=precision(q.dtype),
      preferred_element_type=jnp.float32,
    )
    for lane in range(0, lanes, step)
  ]
  return functools.reduce(jnp.add, scores)


def finish(state: State, fold: int) -> tuple[jax.Array, jax.Array]:
  """The state's `(out, lse)`, the even and odd rows' merged.

  Returns:
    float32 `[..., rows / fold, v_lane]`, of which the first `v_lane / fold`
    lanes mean something, and float32 `[..., rows / fold, 1]`.
  """
  top, total, acc = state.top, state.total, state.acc
  if fold == 2:
    rows = top.shape[-2] // 2
    even, odd = (
      State(*(x[..., part, :] for x in (top, total, acc)))
      for part in (slice(0, rows), slice(rows, None))
    )
    top = jnp.maximum(even.top, odd.top)
    safe = jnp.where(top == NEG_INF, 0.0, top)
    mine, theirs = jnp.exp(even.top - safe), jnp.exp(odd.top - safe)
    total = even.total * mine + odd.total * theirs
    width = acc.shape[-1] // 2
    acc = (even.acc * mine)[..., :width] + (odd.acc * theirs)[..., width:]
  divisor = jnp.where(total == 0.0, 1.0, total)
  lse = jnp.where(total == 0.0, NEG_INF, top + jnp.log(divisor))
  return acc / divisor, lse


def column(row: jax.Array) -> jax.Array:
  """`[1, n]` as `[n, 1]`: from lanes to rows, by a diagonal."""
  n = row.shape[1]
  return jnp.where(_diagonal(n), row, 0.0).sum(1, keepdims=True)


def row(column: jax.Array) -> jax.Array:
  """`[n, 1]` as `[1, n]`: from rows to lanes, by a diagonal."""
  n = column.shape[0]
  return jnp.where(_diagonal(n), column, 0.0).sum(0, keepdims=True)


def _diagonal(n: int) -> jax.Array:
  down = lax.broadcasted_iota(jnp.int32, (n, n), 0)
  return down == lax.broadcasted_iota(jnp.int32, (n, n), 1)
