"""Attention over pages against dense attention over the same rows.

Three shapes: decode of full contexts, decode of ragged ones, and one prefill
chunk behind cached rows.  Pages are a random permutation.  Every function is
held to a float64 answer before anything is timed, and then they take turns.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from kvjax.experiments import common
from pallas_kernels import bits
from pallas_kernels import checks
from pallas_kernels import page_shape
from pallas_kernels import paged_attention

DEFAULT = "pages"
DENSE, BEST_DENSE = "jax.nn, [B, T, Kh, D]", "einsum, [B, Kh, T, D]"
# The largest error of a row, as a share of its largest value.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}

Attention = Callable[[], jax.Array]


@dataclasses.dataclass(frozen=True)
class Rows:
  """Keys and values without pages, and the queries that read them."""

  q: np.ndarray  # [sequences, queries, q_heads, head_dim]
  k: np.ndarray  # [sequences, context, kv_heads, head_dim]
  v: np.ndarray  # the same
  lengths: np.ndarray  # int32 [sequences]

  @property
  def num_bytes(self) -> int:
    """Bytes of K and V that an attention has to read."""
    row = self.k.dtype.itemsize * self.k.shape[2] * self.k.shape[3]
    return int(self.lengths.sum()) * 2 * row


def run(
  config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> dict[str, object]:
  """Verifies, times and reports.

  Args:
    config: see `configs/decode_latency.py`.
    workdir: gets `summary.json`.

  Returns:
    The summary; ratios are medians over rounds of times in the same round.

  Raises:
    ExperimentError: if an answer is wrong, or a value makes no sense.
  """
  shapes = make_shapes(config)
  summary: dict[str, object] = {
    "jax_version": jax.__version__,
    "platform": jax.default_backend(),
    "device": jax.devices()[0].device_kind,
  }
  table, worst = [], 0.0
  for name, rows in shapes.items():
    functions = dense_functions(rows) | paged_functions(rows, config)
    errors = {of: relative_error(rows, f) for of, f in functions.items()}
    check_errors(errors, config.dtype)
    paged = [errors[of] for of in functions if of.startswith(DEFAULT)]
    worst = max(worst, *paged)
    functions["stream"] = stream_read(rows)
    timings = common.interleave(
      {of: in_flight(f, config.calls) for of, f in functions.items()},
      rounds=config.rounds,
      warm_ups=2,
    )
    summary |= measures(name, rows, timings, config.calls)
    table += [
      [name, of, 1e3 * timing.median / config.calls, errors.get(of)]
      for of, timing in timings.items()
    ]
  summary["max_relative_error"] = worst
  common.print_table(["shape", "attention", "ms", "relative error"], table)
  print()
  ratios = {key: value for key, value in summary.items() if "ratio" in key}
  common.print_table(["ratio", "value"], [list(row) for row in ratios.items()])
  return common.write_summary(workdir, summary)


def make_shapes(config: ml_collections.ConfigDict) -> dict[str, Rows]:
  """Normal rows of the three shapes.

  Raises:
    ExperimentError: a dtype without a tolerance, or lengths that do not fit.
  """
  if config.dtype not in TOLERANCE:
    raise common.ExperimentError(
      f"dtype={config.dtype!r}, expected one of {', '.join(TOLERANCE)}"
    )
  for name in ("shortest", "prefill_rows"):
    if not 1 <= config[name] <= config.context:
      raise common.ExperimentError(
        f"{name}={config[name]}, expected 1 to context={config.context}"
      )
  rng = np.random.default_rng(config.seed)
  dtype = jnp.dtype(config.dtype)
  draw = lambda *shape: rng.standard_normal(shape, np.float32).astype(dtype)

  def rows(lengths: np.ndarray, queries: int) -> Rows:
    shape = (len(lengths), config.context, config.kv_heads, config.head_dim)
    return Rows(
      q=draw(len(lengths), queries, config.q_heads, config.head_dim),
      k=draw(*shape),
      v=draw(*shape),
      lengths=lengths.astype(np.int32),
    )

  full = np.full(config.sequences, config.context)
  ragged = np.linspace(config.shortest, config.context, config.sequences)
  return {
    "decode": rows(full, 1),
    "ragged_decode": rows(ragged.round(), 1),
    "prefill": rows(full[:1], config.prefill_rows),
  }


def paged_functions(
  rows: Rows, config: ml_collections.ConfigDict
) -> dict[str, Attention]:
  """Attention over pages: as a caller gets it, and named implementations."""
  operands = paged_operands(rows, config.page_size)
  names = dict.fromkeys([None, *config.implementations])
  return {
    DEFAULT if name is None else f"{DEFAULT}, {name}": functools.partial(
      jax.jit(
        lambda operands, name=name: paged_attention.paged_attention(
          **operands, implementation=name
        )[0]
      ),
      operands,
    )
    for name in names
  }


def paged_operands(rows: Rows, page_size: int) -> dict[str, jax.Array]:
  """The same rows in pages in a random order, NaN where nothing is."""
  sequences, context, kv_heads, head_dim = rows.k.shape
  width = -(-context // page_size)
  num_pages = 1 + sequences * width
  order = np.random.default_rng(1).permutation(num_pages - 1)
  table = (1 + order).astype(np.int32).reshape(sequences, width)
  platform = jax.default_backend()
  shape = page_shape.page_shape(
    kv_heads, page_size, head_dim, platform=platform
  )
  lane = shape[1] * shape[2] // page_size
  seen = np.arange(context) < rows.lengths[:, None]

  def pages(x: np.ndarray) -> jax.Array:
    x = np.where(seen[..., None, None], x, np.asarray(np.nan, x.dtype))
    padding = (0, width * page_size - context)
    x = np.pad(x, ((0, 0), padding, (0, 0), (0, lane - head_dim)))
    x = x.reshape(sequences * width, page_size, kv_heads, lane)
    pool = np.full((num_pages, *shape), np.nan, x.dtype)
    pool[table.ravel()] = x.swapaxes(1, 2).reshape(-1, *shape)
    stored = bits.storage_dtype(x.dtype, platform=platform)
    return jnp.asarray(pool.view(stored))

  used = -(-rows.lengths // page_size)
  table[np.arange(width) >= used[:, None]] = 0
  checks.check_tables(
    table, rows.lengths, page_size=page_size, num_pages=num_pages
  )
  operands = {
    "q": jnp.asarray(rows.q.reshape(-1, *rows.q.shape[2:])),
    "k_pages": pages(rows.k),
    "v_pages": pages(rows.v),
    "page_table": jnp.asarray(table),
    "context_lens": jnp.asarray(rows.lengths),
  }
  queries = rows.q.shape[1]
  if queries > 1:
    starts = queries * np.arange(sequences + 1)
    operands["query_starts"] = jnp.asarray(starts, jnp.int32)
  return operands


def dense_functions(rows: Rows) -> dict[str, Attention]:
  """What a user would write over a dense cache, and the best layout of one."""
  q, k, v = jnp.asarray(rows.q), jnp.asarray(rows.k), jnp.asarray(rows.v)
  lengths = jnp.asarray(rows.lengths)
  queries = rows.q.shape[1]
  if queries == 1:
    user = lambda q, k, v, lengths: jax.nn.dot_product_attention(
      q, k, v, key_value_seq_lengths=lengths
    )
  else:
    user = lambda q, k, v, lengths: jax.nn.dot_product_attention(
      q, k, v, mask=_seen(lengths, queries, k.shape[1])[:, None]
    )
  k_best = jnp.asarray(rows.k.swapaxes(1, 2))
  v_best = jnp.asarray(rows.v.swapaxes(1, 2))
  return {
    DENSE: functools.partial(jax.jit(user), q, k, v, lengths),
    BEST_DENSE: functools.partial(
      jax.jit(_best_dense), q, k_best, v_best, lengths
    ),
  }


def _seen(lengths: jax.Array, queries: int, context: int) -> jax.Array:
  """Which rows the last `queries` rows see, `[sequences, queries, context]`."""
  behind = jnp.arange(queries, dtype=jnp.int32) - queries
  position = lengths[:, None, None] + behind[None, :, None]
  return jnp.arange(context, dtype=jnp.int32)[None, None] <= position


def _best_dense(
  q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array
) -> jax.Array:
  sequences, queries, _, head_dim = q.shape
  _, kv_heads, context, _ = k.shape
  scale = jnp.asarray(head_dim**-0.5, q.dtype)
  # Queries and the heads of a group are rows of one product.
  rows = (q * scale).reshape(sequences, queries, kv_heads, -1, head_dim)
  rows = rows.swapaxes(1, 2)
  shape = rows.shape
  rows = rows.reshape(sequences, kv_heads, -1, head_dim)
  logits = jnp.einsum(
    "bhqd,bhtd->bhqt", rows, k, preferred_element_type=jnp.float32
  )
  seen = jnp.repeat(_seen(lengths, queries, context), shape[3], axis=1)
  logits = jnp.where(seen[:, None], logits, -jnp.inf)
  weights = jax.nn.softmax(logits).astype(v.dtype)
  out = jnp.einsum("bhqt,bhtd->bhqd", weights, v).reshape(shape)
  return out.swapaxes(1, 2).reshape(q.shape)


def stream_read(rows: Rows) -> Attention:
  """Reads as many bytes as an attention must, once, in order."""
  length = rows.num_bytes // 4
  stream = jnp.ones((max(1, length // 1024), 1024), jnp.float32)
  return functools.partial(jax.jit(lambda x: x.sum(0)), stream)


def in_flight(function: Attention, calls: int) -> Callable[[], object]:
  """Several calls that are waited for together."""
  return lambda: [function() for _ in range(calls)]


def relative_error(rows: Rows, function: Attention) -> float:
  """The largest error of an output row, as a share of its largest value."""
  out = np.asarray(function(), np.float64).reshape(rows.q.shape)
  worst = 0.0
  queries, group = rows.q.shape[1], rows.q.shape[2] // rows.k.shape[2]
  for sequence, length in enumerate(rows.lengths):
    k = rows.k[sequence, :length].astype(np.float64).repeat(group, axis=1)
    v = rows.v[sequence, :length].astype(np.float64).repeat(group, axis=1)
    q = rows.q[sequence].astype(np.float64) * rows.q.shape[3] ** -0.5
    logits = np.einsum("ihd,thd->hit", q, k, optimize=True)
    behind = np.arange(queries)[:, None] - queries
    logits[:, np.arange(length) > length + behind] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("hit,thd->ihd", weights, v, optimize=True)
    error = np.abs(out[sequence] - want).max(-1) / np.abs(want).max(-1)
    worst = max(worst, float(error.max()))  # A NaN loses here, not below.
    if np.isnan(error).any():
      return float("inf")
  return worst


def check_errors(errors: dict[str, float], dtype: str) -> None:
  """Raises where an answer over pages is wrong; nothing is timed then.

  Raises:
    ExperimentError: naming the implementation and its error.
  """
  for of, error in errors.items():
    if of.startswith(DEFAULT) and not error <= TOLERANCE[dtype]:
      raise common.ExperimentError(
        f"{of} is wrong: relative error {error:.1e}, above"
        f" {TOLERANCE[dtype]:.0e} in {dtype}"
      )


def measures(
  name: str, rows: Rows, timings: dict[str, common.Timing], calls: int
) -> dict[str, object]:
  """One shape's entries of the summary."""
  pages = timings[DEFAULT]
  seconds = pages.median / calls
  found: dict[str, object] = {
    f"{name}_seconds": seconds,
    f"{name}_bytes_per_second": rows.num_bytes / seconds,
  }
  against = common.median_ratio(pages, timings[DENSE])
  if name == "prefill":
    return found | {
      "prefill_ratio_vs_dense": against,
      "prefill_ratio_vs_best_dense": common.median_ratio(
        pages, timings[BEST_DENSE]
      ),
    }
  best = common.median_ratio(pages, timings[BEST_DENSE])
  share = common.median_ratio(timings["stream"], pages)
  stream = "share_of_stream_read"
  return found | {
    f"{name}_ratio_vs_jax_attention": against,
    f"{name}_ratio_vs_best_dense": best,
    stream if name == "decode" else f"{name}_{stream}": share,
  }
