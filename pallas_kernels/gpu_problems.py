"""Problems that `gpu_check` poses, and what the right answers are."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import page_shape
from pallas_kernels.kv_update import quantize
from pallas_kernels.paged_attention import api

Operands = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Problem:
  """One call of paged attention, by its sizes.

  Attributes:
    name: how tables call it.
    lengths: rows of each sequence.
    counts: query rows of each sequence; None is decode.
    q_heads: query heads.
    kv_heads: KV heads.
    head_dim: elements of a head.
    page_size: token rows of a page.
    kv_dtype: of the pages.
    window: positions a query sees, or None.
    soft_cap: bound of the logits, or None.
  """

  name: str
  lengths: tuple[int, ...]
  counts: tuple[int, ...] | None = None
  q_heads: int = 8
  kv_heads: int = 2
  head_dim: int = 128
  page_size: int = 16
  kv_dtype: str = "bfloat16"
  window: int | None = None
  soft_cap: float | None = None

  @property
  def tokens(self) -> int:
    """Query rows of the call."""
    return len(self.lengths) if self.counts is None else sum(self.counts)

  @property
  def is_rectangular(self) -> bool:
    """Whether a dense cache could hold it: equal lengths, equal counts."""
    return len(set(self.lengths)) == 1 == len(set(self.counts or (1,)))

  @property
  def width(self) -> int:
    """Pages of the longest sequence."""
    return max(1, -(-max(self.lengths) // self.page_size))

  @property
  def num_pages(self) -> int:
    """Pages of a pool that holds every table, the null page and a spare."""
    return len(self.lengths) * self.width + 2

  @property
  def pool_shape(self) -> tuple[int, ...]:
    """The shape of K's pages, and of V's."""
    shape = page_shape.page_shape(
      self.kv_heads, self.page_size, self.head_dim, platform="gpu"
    )
    return (self.num_pages, *shape)


def call(
  implementation: str, problem: Problem, operands: Operands
) -> tuple[jax.Array, jax.Array]:
  """`paged_attention` on a problem.

  Args:
    implementation: who answers.
    problem: what is asked.
    operands: what it is asked of; the op's by name, others are left out.
  """
  given = {
    name: x for name, x in operands.items() if not name.startswith("dense")
  }
  return api.paged_attention(
    **given,
    window=problem.window,
    soft_cap=problem.soft_cap,
    implementation=implementation,
  )


def table_of(problem: Problem, rng: np.random.Generator) -> np.ndarray:
  """A permuted page table, int32 [sequences, width]; page 0 is not in it."""
  ids = 1 + rng.permutation(len(problem.lengths) * problem.width)
  return ids.reshape(-1, problem.width).astype(np.int32)


def indices(problem: Problem, seed: int = 0) -> dict[str, Any]:
  """The integer operands: table, lengths and query starts."""
  table = table_of(problem, np.random.default_rng(seed))
  starts = None
  if problem.counts is not None:
    starts = jnp.asarray(np.cumsum([0, *problem.counts]), jnp.int32)
  return {
    "page_table": jnp.asarray(table),
    "context_lens": jnp.asarray(problem.lengths, jnp.int32),
    "query_starts": starts,
  }


def random_operands(problem: Problem) -> dict[str, Any]:
  """Operands to time: everything normal, drawn where it will be read."""
  keys = jax.random.split(jax.random.key(0), 3)
  shape = (problem.tokens, problem.q_heads, problem.head_dim)
  made = {
    "q": jax.random.normal(keys[0], shape, jnp.bfloat16),
    **indices(problem),
  }
  for side, key in (("k", keys[1]), ("v", keys[2])):
    made |= _random_pool(problem, side, key)
  return made


def _random_pool(problem: Problem, side: str, key: jax.Array) -> dict[str, Any]:
  rows = jax.random.normal(key, problem.pool_shape, jnp.bfloat16)
  if jnp.dtype(problem.kv_dtype).itemsize > 1:
    return {f"{side}_pages": rows.astype(problem.kv_dtype)}
  pages, factors = quantize.quantize_rows(rows, jnp.dtype(problem.kv_dtype))
  scales = jnp.zeros((problem.num_pages, *_scales_shape(problem)), jnp.float32)
  flat = factors.reshape(problem.num_pages, -1)
  return {
    f"{side}_pages": pages,
    f"{side}_scales": scales.at[:, 0, : flat.shape[1]].set(flat),
  }


def _scales_shape(problem: Problem) -> tuple[int, int]:
  return page_shape.scales_shape(problem.kv_heads, problem.page_size)


def poisoned_operands(
  problem: Problem,
) -> tuple[dict[str, Any], tuple[np.ndarray, np.ndarray]]:
  """Operands with NaN in every row that no sequence owns, and the answers.

  Returns:
    `(operands, (out, lse))`, the answers in float64.
  """
  made = random_operands(problem)
  owned = np.zeros((problem.num_pages, problem.page_size), bool)
  table = np.asarray(made["page_table"])
  for sequence, length in enumerate(problem.lengths):
    row = np.arange(length)
    page = table[sequence, row // problem.page_size]
    owned[page, row % problem.page_size] = True
  answers = attend(problem, made)
  lost = jnp.asarray(~owned)
  for side in "kv":
    pages = made[f"{side}_pages"]
    if pages.dtype != jnp.int8:
      made[f"{side}_pages"] = jnp.where(
        lost[:, None, :, None], jnp.asarray(jnp.nan, pages.dtype), pages
      )
    if f"{side}_scales" in made:
      heads = jnp.repeat(lost[:, None], problem.kv_heads, axis=1)
      flat = heads.reshape(problem.num_pages, 1, -1)
      scales = made[f"{side}_scales"]
      poison = jnp.where(flat, jnp.nan, scales[..., : flat.shape[-1]])
      made[f"{side}_scales"] = scales.at[..., : flat.shape[-1]].set(poison)
  return made, answers


def attend(
  problem: Problem, operands: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
  """The definition of attention, in NumPy and float64, on the host.

  Args:
    problem: its sizes.
    operands: without poison.

  Returns:
    `(out, lse)`: [tokens, q_heads, head_dim] and [tokens, q_heads].
  """
  q = np.asarray(operands["q"], np.float64)
  k, v = (_rows(problem, operands, side) for side in "kv")
  counts = problem.counts or (1,) * len(problem.lengths)
  out = np.zeros(q.shape)
  lse = np.full(q.shape[:2], -np.inf)
  token = 0
  for sequence, (length, count) in enumerate(
    zip(problem.lengths, counts, strict=True)
  ):
    for position in range(length - count, length):
      first = 0
      if problem.window is not None:
        first = max(0, position - problem.window + 1)
      seen = slice(first, position + 1)
      out[token], lse[token] = _one_query(
        problem, q[token], k[sequence][seen], v[sequence][seen]
      )
      token += 1
  return out, lse


def _rows(
  problem: Problem, operands: dict[str, Any], side: str
) -> Sequence[np.ndarray]:
  """Each sequence's rows, float64 [length, kv_heads, head_dim]."""
  pages = np.asarray(operands[f"{side}_pages"].astype(jnp.float32), np.float64)
  if f"{side}_scales" in operands:
    scales = np.asarray(operands[f"{side}_scales"], np.float64)
    count = problem.kv_heads * problem.page_size
    factors = scales[:, 0, :count]
    pages = pages * factors.reshape(*pages.shape[:3], 1)
  found = []
  for table, length in zip(
    np.asarray(operands["page_table"]), problem.lengths, strict=True
  ):
    rows = pages[table].transpose(0, 2, 1, 3)
    rows = rows.reshape(-1, problem.kv_heads, problem.head_dim)
    found.append(rows[:length])
  return found


def _one_query(
  problem: Problem,
  q: np.ndarray,  # [q_heads, head_dim]
  k: np.ndarray,  # [seen, kv_heads, head_dim]
  v: np.ndarray,  # [seen, kv_heads, head_dim]
) -> tuple[np.ndarray, np.ndarray]:
  """Attention of one query row over the rows that it sees."""
  if not len(k):
    return np.zeros(q.shape), np.full(len(q), -np.inf)
  group = problem.q_heads // problem.kv_heads
  k, v = (np.repeat(x, group, axis=1) for x in (k, v))
  logits = np.einsum("hd,rhd->hr", q, k) / np.sqrt(problem.head_dim)
  if problem.soft_cap is not None:
    logits = problem.soft_cap * np.tanh(logits / problem.soft_cap)
  top = logits.max(1, keepdims=True)
  weights = np.exp(logits - top)
  total = weights.sum(1, keepdims=True)
  out = np.einsum("hr,rhd->hd", weights / total, v)
  return out, (top + np.log(total))[:, 0]
