"""Batches of ragged sequences, laid out in pages that are otherwise poison."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import page_shape

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


@dataclasses.dataclass
class Batch:
  """Queries and, for each sequence, its keys and values without pages.

  All floats hold values that `dtype` (or the quantised pages) represents
  exactly, so that an oracle in float64 starts from the same numbers.
  """

  q: np.ndarray  # float32 [tokens, q_heads, head_dim]
  keys: list[np.ndarray]  # float32 [rows, kv_heads, head_dim] each
  values: list[np.ndarray]  # the same
  counts: list[int]  # queries of each sequence
  page_size: int
  dtype: str = "float32"
  kv_dtype: str = "float32"
  decode: bool = False
  key_starts: np.ndarray | None = None  # int32 [sequences]
  positions: np.ndarray | None = None  # int32 [tokens]

  @property
  def lengths(self) -> list[int]:
    """Rows of each sequence."""
    return [len(keys) for keys in self.keys]

  @property
  def starts(self) -> np.ndarray:
    """First query row of each sequence, and the end of the last."""
    return np.cumsum([0, *self.counts]).astype(np.int32)

  def take(self, order: Sequence[int]) -> "Batch":
    """The same sequences in another order, or fewer; without padding."""
    starts = self.starts
    rows = [np.arange(starts[s], starts[s + 1]) for s in order]
    rows = np.concatenate([np.zeros(0, int), *rows])
    pick = lambda array, at: None if array is None else array[at]
    return dataclasses.replace(
      self,
      q=self.q[rows],
      keys=[self.keys[s] for s in order],
      values=[self.values[s] for s in order],
      counts=[self.counts[s] for s in order],
      key_starts=pick(self.key_starts, np.asarray(order)),
      positions=pick(self.positions, rows),
    )


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
  """The nearest values of `dtype`, as float32."""
  return x.astype(jnp.dtype(dtype)).astype(np.float32)


def quantized(rows: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
  """NumPy's own quantiser: `[..., head_dim]` to raw values and scales."""
  peak = np.abs(rows).max(-1)
  scale = np.where(peak == 0, 1.0, peak / LARGEST[dtype]).astype(np.float32)
  raw = rows / scale[..., None]
  if dtype == "int8":
    return np.rint(raw).astype(np.int8), scale
  return raw.astype(ml_dtypes.float8_e4m3fn), scale


def make(
  lengths: Sequence[int],
  counts: Sequence[int] | None = None,
  *,
  q_heads: int = 4,
  kv_heads: int = 2,
  head_dim: int = 64,
  page_size: int = 8,
  dtype: str = "float32",
  kv_dtype: str | None = None,
  padding: int = 0,
  seed: int = 0,
) -> Batch:
  """Normal q, k and v; decode where `counts` is None.

  Args:
    lengths: rows of each sequence, its queries' included.
    counts: queries of each sequence.
    q_heads: query heads, and so on as the ops name them.
    kv_heads: ...
    head_dim: ...
    page_size: ...
    dtype: of queries, and of pages that are not quantised.
    kv_dtype: "int8" or "float8_e4m3fn" for quantised pages.
    padding: query rows behind the last sequence's.
    seed: of everything random.
  """
  rng = np.random.default_rng(seed)
  kv_dtype = kv_dtype or dtype
  tokens = (len(lengths) if counts is None else sum(counts)) + padding
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)

  def rows(length: int) -> np.ndarray:
    x = draw(length, kv_heads, head_dim)
    if kv_dtype not in LARGEST:
      return rounded(x, kv_dtype)
    raw, scale = quantized(x, kv_dtype)
    return raw.astype(np.float32) * scale[..., None]

  return Batch(
    q=rounded(draw(tokens, q_heads, head_dim), dtype),
    keys=[rows(length) for length in lengths],
    values=[rows(length) for length in lengths],
    counts=[1] * len(lengths) if counts is None else list(counts),
    page_size=page_size,
    dtype=dtype,
    kv_dtype=kv_dtype,
    decode=counts is None,
  )


def paged(
  batch: Batch,
  platform: str,
  *,
  tail: str = "null",
  width: int | None = None,
  own_v_table: bool = False,
  spare_pages: int = 3,
  poison: float = np.nan,
  seed: int = 1,
) -> dict[str, np.ndarray | None]:
  """The operands of `paged_attention`, by name.

  Page ids are a random permutation; page tails, unowned pages and the null page
  hold `poison`.

  Args:
    batch: the sequences.
    platform: whose page layout to use.
    tail: what table entries past a sequence's pages hold: "null", "largest"
      (the last page of the pool) or "other" (another sequence's page).
    width: table entries a sequence; by default more than the most used.
    own_v_table: whether V lies in other pages than K.
    spare_pages: pages that nobody owns, at least.
    poison: what rows that nobody owns hold.
    seed: of the permutation.
  """
  rng = np.random.default_rng(seed)
  used = [-(-length // batch.page_size) for length in batch.lengths]
  # Rounded, so that batches of other lengths share a compiled function.
  width = _round_up(max(used, default=0) + 1, 16) if width is None else width
  num_pages = _round_up(1 + sum(used) + spare_pages, 32)
  arrays: dict[str, np.ndarray | None] = {"q": _cast(batch.q, batch.dtype)}
  for side, rows in (("k", batch.keys), ("v", batch.values)):
    if side == "k" or own_v_table:
      table = _table(rng, used, width, num_pages, tail)
    arrays |= _pool(side, rows, table, used, num_pages, batch, platform, poison)
    if side == "k":
      arrays["page_table"] = table
  arrays["v_page_table"] = table if own_v_table else None
  arrays["context_lens"] = np.asarray(batch.lengths, np.int32)
  arrays["query_starts"] = None if batch.decode else batch.starts
  arrays["query_positions"] = batch.positions
  arrays["key_starts"] = batch.key_starts
  return arrays


def _round_up(value: int, multiple: int) -> int:
  return -(-value // multiple) * multiple


def _cast(x: np.ndarray, dtype: str) -> np.ndarray:
  return x.astype(jnp.dtype(dtype))


def _table(
  rng: np.random.Generator,
  used: list[int],
  width: int,
  num_pages: int,
  tail: str,
) -> np.ndarray:
  ids = 1 + rng.permutation(num_pages - 1).astype(np.int32)
  filler = {"null": 0, "largest": num_pages - 1, "other": ids[0]}[tail]
  table = np.full((len(used), width), filler, np.int32)
  ends = np.cumsum(used)
  for sequence, count in enumerate(used):
    table[sequence, :count] = ids[ends[sequence] - count : ends[sequence]]
  return table


def _pool(
  side: str,
  rows: list[np.ndarray],
  table: np.ndarray,
  used: list[int],
  num_pages: int,
  batch: Batch,
  platform: str,
  poison: float,
) -> dict[str, np.ndarray | None]:
  """One side's pages, and its scales where they are quantised."""
  kv_heads, head_dim = batch.keys[0].shape[1:]
  size = batch.page_size
  logical = np.full((num_pages, kv_heads, size, head_dim), poison, np.float32)
  factors = np.full((num_pages, kv_heads, size), poison, np.float32)
  for sequence, count in enumerate(used):
    for page in range(count):
      part = rows[sequence][page * size : (page + 1) * size]
      at = table[sequence, page]
      if batch.kv_dtype in LARGEST:
        part, scale = quantized(part, batch.kv_dtype)
        factors[at, :, : len(scale)] = scale.T
      logical[at, :, : len(part)] = part.astype(np.float32).transpose(1, 0, 2)
  if batch.kv_dtype == "int8":
    logical = np.nan_to_num(logical, nan=77)
  pages = physical(logical, platform, poison)
  scales = None
  if batch.kv_dtype in LARGEST:
    scales = physical_scales(factors, poison)
  return {
    f"{side}_pages": _cast(pages, batch.kv_dtype),
    f"{side}_scales": scales,
  }


def physical(
  logical: np.ndarray, platform: str, poison: float = 0.0
) -> np.ndarray:
  """`[pages, kv_heads, page_size, head_dim]` as a platform lays it out."""
  num_pages, kv_heads, size, head_dim = logical.shape
  shape = page_shape.page_shape(kv_heads, size, head_dim, platform=platform)
  missing = int(np.prod(shape)) // (kv_heads * size) - head_dim
  padded = np.pad(logical, ((0, 0), (0, 0), (0, 0), (0, missing)))
  if missing:
    unowned = np.isnan(logical).all(-1)
    padded[..., head_dim:][unowned] = poison
  return padded.reshape(num_pages, *shape)


def logical(
  pages: np.ndarray, platform: str, page_size: int, head_dim: int
) -> np.ndarray:
  """The inverse of `physical`."""
  num_pages, kv_heads = pages.shape[:2]
  found = np.asarray(pages).reshape(num_pages, kv_heads, page_size, -1)
  assert pages.shape[1:] == page_shape.page_shape(
    kv_heads, page_size, head_dim, platform=platform
  )
  return found[..., :head_dim]


def physical_scales(factors: np.ndarray, poison: float = 0.0) -> np.ndarray:
  """`[pages, kv_heads, page_size]` as `scales_shape` lays it out."""
  num_pages, kv_heads, size = factors.shape
  shape = page_shape.scales_shape(kv_heads, size)
  scales = np.full((num_pages, *shape), poison, np.float32)
  scales[:, 0, : kv_heads * size] = factors.reshape(num_pages, -1)
  return scales


def logical_scales(
  scales: np.ndarray, kv_heads: int, page_size: int
) -> np.ndarray:
  """The inverse of `physical_scales`."""
  found = np.asarray(scales)[:, 0, : kv_heads * page_size]
  return found.reshape(-1, kv_heads, page_size)
