"""Attention by its definition, in float64, one query row at a time."""

import numpy as np

from tests.pallas_kernels import batches

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def attention(
  batch: batches.Batch,
  *,
  scale: float | None = None,
  causal: bool = True,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
  """`(out, lse)` in float64; rows that see nothing are `(0, -inf)`."""
  tokens, q_heads, head_dim = batch.q.shape
  scale = head_dim**-0.5 if scale is None else scale
  out = np.zeros((tokens, q_heads, head_dim))
  lse = np.full((tokens, q_heads), -np.inf)
  for sequence, keys in enumerate(batch.keys):
    first = batch.starts[sequence]
    count = batch.counts[sequence]
    base = 0 if batch.key_starts is None else batch.key_starts[sequence]
    for token in range(first, first + count):
      position = base + len(keys) - count + token - first
      if batch.positions is not None:
        position = batch.positions[token]
      seen = np.arange(len(keys)) + base
      mask = np.ones(len(keys), bool)
      if causal:
        mask &= seen <= position
      if window is not None:
        mask &= position - seen < window
      out[token], lse[token] = _row(
        batch.q[token].astype(np.float64),
        keys[mask].astype(np.float64),
        batch.values[sequence][mask].astype(np.float64),
        scale,
        soft_cap,
        sinks,
      )
  return out, lse


def _row(
  q: np.ndarray,  # [q_heads, head_dim]
  k: np.ndarray,  # [rows, kv_heads, head_dim]
  v: np.ndarray,  # [rows, kv_heads, head_dim]
  scale: float,
  soft_cap: float | None,
  sinks: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
  group = q.shape[0] // k.shape[1]
  k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
  logits = scale * np.einsum("hd,rhd->hr", q, k)
  if soft_cap is not None:
    logits = soft_cap * np.tanh(logits / soft_cap)
  sink = np.full((q.shape[0], 1), -np.inf)
  if sinks is not None:
    sink = sinks.astype(np.float64)[:, None]
  everything = np.concatenate([logits, sink], axis=1)
  top = everything.max(1)
  if (top == -np.inf).all():
    return np.zeros(q.shape), np.full(q.shape[0], -np.inf)
  total = np.exp(everything - top[:, None]).sum(1)
  lse = top + np.log(total)
  weights = np.exp(logits - top[:, None]) / total[:, None]
  return np.einsum("hr,rhd->hd", weights, v), lse


def relative_error(
  out: np.ndarray, lse: np.ndarray, want: tuple[np.ndarray, np.ndarray]
) -> float:
  """The worst error of a row, as a share of the row's largest value.

  NaN, a wrong infinity or a wrong empty row is an infinite error.
  """
  want_out, want_lse = want
  empty = want_lse == -np.inf
  if not np.array_equal(np.asarray(lse) == -np.inf, empty):
    return np.inf
  peak = np.abs(want_out).max(-1)
  error = np.abs(np.asarray(out, np.float64) - want_out).max(-1)
  if np.isnan(error).any() or np.isnan(lse).any() or error[empty].any():
    return np.inf
  seen = ~empty & (peak > 0)
  if error[~seen].any():
    return np.inf
  shares = error[seen] / peak[seen]
  lse_error = np.abs(lse[~empty] - want_lse[~empty])
  lse_error /= np.maximum(1, np.abs(want_lse[~empty]))
  return float(max(shares.max(initial=0), lse_error.max(initial=0)))
