"""The public op: validates a call, resolves it, and selects who runs it."""

import math
import numbers

import jax

from pallas_kernels import checks
from pallas_kernels import dispatch
from pallas_kernels import errors
from pallas_kernels import gradients
from pallas_kernels import page_shape
from pallas_kernels import pools
from pallas_kernels.paged_attention import operands as operands_lib

OP = dispatch.Op("pallas_kernels.paged_attention", "paged_attention")


def paged_attention(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  page_table: jax.Array,
  context_lens: jax.Array,
  query_starts: jax.Array | None = None,
  *,
  query_positions: jax.Array | None = None,
  key_starts: jax.Array | None = None,
  v_page_table: jax.Array | None = None,
  scale: float | None = None,
  causal: bool = True,
  window: jax.Array | int | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
  k_scales: jax.Array | None = None,
  v_scales: jax.Array | None = None,
  v_head_dim: int | None = None,
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attends from ragged query rows to the rows that page tables list.

  For query i of sequence s at position x_i, over rows r of s at positions
  y_r = key_starts[s] + r:

      logit_r = soft_cap * tanh(scale * q_i . k_r / soft_cap)
      seen: r < context_lens[s], y_r <= x_i (causal), x_i - y_r < window
      lse = log(sum_seen exp(logit_r) + exp(sink)),  out = sum exp(.. - lse) v_r

  Values are trusted: `pallas_kernels.check_tables` checks them on the host.
  Bytes of rows that no query sees may be anything, NaN included.

  Args:
    q: `[tokens, q_heads, head_dim]`, sequence after sequence.  Rows past the
      last query start are padding.
    k_pages: `[pages, *page_shape]`, see `page_shape` and `bits`.
    v_pages: the same for V.
    page_table: int32 `[sequences, width]`, ids into `k_pages`; padded entries
      must be in range.
    context_lens: int32 `[sequences]`, rows of each sequence, those of this
      call's queries included.
    query_starts: int32 `[sequences + 1]`, first query row of each sequence and
      the end of the last; None where each sequence has exactly one.
    query_positions: int32 `[tokens]`; by default a sequence's queries are its
      last rows: `context_len - queries + i + key_start`.
    key_starts: int32 `[sequences]`, the position of row 0; default 0.
    v_page_table: int32, as `page_table`, for V; default `page_table`.
    scale: default `head_dim ** -0.5`.
    causal: whether a query sees no key after its own position.
    window: how many positions back a query sees, itself included; may be
      traced.
    soft_cap: the bound of the logits, applied after scale and before masks.
    sinks: `[q_heads]`, a logit per head that joins the denominator, and so the
      LSE, with no value.  Give it to one part of a split only.
    k_scales: float32 `[pages, *scales_shape]` for int8 and fp8 pages.
    v_scales: the same for V.
    v_head_dim: elements of a V row where they differ from K's.
    implementation: one of `dispatch.IMPLEMENTATIONS`, or None for the first
      that can run the call.

  Returns:
    `(out, lse)`: out `[tokens, q_heads, v_head_dim]` of q's dtype, lse float32
    `[tokens, q_heads]`, natural logarithm.  A row that sees nothing, and every
    padded row, is `(0, -inf)`.

  Raises:
    KernelArgumentError: an argument's shape or dtype; names what it expected.
    KernelUnsupported: the named implementation cannot run it, and why.
    InferenceOnly: under differentiation.
  """
  required = {
    "q": q,
    "k_pages": k_pages,
    "v_pages": v_pages,
    "page_table": page_table,
    "context_lens": context_lens,
  }
  optional = {
    "v_page_table": v_page_table,
    "query_starts": query_starts,
    "query_positions": query_positions,
    "key_starts": key_starts,
    "sinks": sinks,
    "k_scales": k_scales,
    "v_scales": v_scales,
  }
  arrays = checks.require_arrays(required, optional)
  for name in ("q", "k_pages", "v_pages"):
    arrays[name] = gradients.inference_only("paged_attention", arrays[name])
  operands = operands_lib.Operands(**arrays, window=_resolve_window(window))
  options = resolve(
    operands,
    scale=scale,
    causal=causal,
    soft_cap=soft_cap,
    v_head_dim=v_head_dim,
  )
  module = OP.select(implementation, operands, options)
  return module.paged_attention(operands, options)


def resolve(
  operands: operands_lib.Operands,
  *,
  scale: float | None = None,
  causal: bool = True,
  soft_cap: float | None = None,
  v_head_dim: int | None = None,
) -> operands_lib.Options:
  """Checks operands against each other and resolves the static options.

  Args:
    operands: arrays, or `jax.ShapeDtypeStruct`s.
    scale: as `paged_attention`, and so the rest.
    causal: ...
    soft_cap: ...
    v_head_dim: ...

  Raises:
    KernelArgumentError: as `paged_attention`.
  """
  q = operands.q
  checks.require_shape("q", q, "[tokens, q_heads, head_dim]", [None] * 3)
  _, q_heads, head_dim = q.shape
  k = page_shape.geometry_of("k_pages", operands.k_pages, head_dim)
  v = page_shape.geometry_of(
    "v_pages",
    operands.v_pages,
    head_dim if v_head_dim is None else v_head_dim,
  )
  if (k.kv_heads, k.page_size) != (v.kv_heads, v.page_size):
    raise errors.KernelArgumentError(
      f"k_pages has shape {operands.k_pages.shape} and v_pages"
      f" {operands.v_pages.shape}, expected equal kv_heads and page_size"
    )
  if operands.v_page_table is None:
    pools.require_equal_counts(operands)
  if q_heads % k.kv_heads:
    raise errors.KernelArgumentError(
      f"q has shape {q.shape}, expected its {q_heads} heads to be a multiple"
      f" of the pages' {k.kv_heads} KV heads"
    )
  _check_indices(operands)
  if q.dtype not in pools.FLOAT_DTYPES:
    raise errors.KernelArgumentError(
      f"q has dtype {q.dtype}, expected one of"
      f" {pools.dtype_names(pools.FLOAT_DTYPES)}"
    )
  pools.require_dtypes(operands)
  pools.require_scales(operands, k)
  if scale is not None:
    scale = checks.require_finite("scale", scale)
  if soft_cap is not None:
    soft_cap = checks.require_finite("soft_cap", soft_cap)
    if not soft_cap > 0:
      raise errors.KernelArgumentError(f"{soft_cap=}, expected above 0 or None")
  return operands_lib.Options(
    k_geometry=k,
    v_geometry=v,
    scale=1 / math.sqrt(head_dim) if scale is None else scale,
    causal=causal,
    soft_cap=soft_cap,
  )


def _resolve_window(
  window: jax.Array | int | None,
) -> jax.Array | int | None:
  if window is None:
    return None
  if isinstance(window, (int, numbers.Integral)):
    if window < 1:
      raise errors.KernelArgumentError(
        f"{window=}, expected at least 1, the query itself, or None"
      )
    return min(int(window), 2**31 - 1)  # Of NumPy integers too.
  if not hasattr(window, "shape") or not hasattr(window, "dtype"):
    raise errors.KernelArgumentError(
      f"{window=}, expected an integer, an int32 array or None"
    )
  checks.require_shape("window", window, "[]", [])
  checks.require_int32("window", window)  # As given: JAX would cut it short.
  return window


def _check_indices(operands: operands_lib.Operands) -> None:
  """Shapes and dtypes of everything that counts or points."""
  tokens, q_heads, _ = operands.q.shape
  table = operands.page_table
  checks.require_shape("page_table", table, "[sequences, width]", [None, None])
  sequences = table.shape[0]
  expected = {
    "page_table": ("[sequences, width]", table.shape),
    "v_page_table": ("[sequences, width]", table.shape),
    "context_lens": ("[sequences]", (sequences,)),
    "query_starts": ("[sequences + 1]", (sequences + 1,)),
    "query_positions": ("[tokens]", (tokens,)),
    "key_starts": ("[sequences]", (sequences,)),
  }
  for name, (axes, shape) in expected.items():
    array = getattr(operands, name)
    if array is not None:
      checks.require_shape(name, array, axes, shape)
      checks.require_int32(name, array)
  if operands.is_decode and tokens != sequences:
    raise errors.KernelArgumentError(
      f"q has shape {operands.q.shape}, expected one row for each of the"
      f" {sequences} sequences of page_table, or query_starts"
    )
  if operands.sinks is not None:
    checks.require_shape("sinks", operands.sinks, "[q_heads]", (q_heads,))
