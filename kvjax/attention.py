"""`attend`, the one call that model code makes."""

import dataclasses

import jax

from kvjax import errors
from kvjax import pages as pages_lib
from kvjax import step as step_lib
from pallas_kernels import kv_update
from pallas_kernels import paged_attention


def attend(
  q: jax.Array,
  k: jax.Array | None,
  v: jax.Array | None,
  pages: pages_lib.Pages,
  step: step_lib.StepArrays,
  *,
  layer: int | jax.Array,
  group: int = 0,
  scale: float | None = None,
  causal: bool = True,
  window: int | jax.Array | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
  implementation: str | None = None,
) -> tuple[jax.Array, pages_lib.Pages]:
  """Writes this step's K and V into their pages, then attends over them.

  Token i of a sequence sees the rows of its own sequence at positions up to
  its own: `softmax(scale * q @ K.T) @ V`.

  Args:
    q: `[tokens, heads, head_dim]`, or `[batch, time, heads, head_dim]` with
      `batch * time` equal to the step's token rows. Already rotated.
    k: like q with the group's K/V heads, or None (with v) to read without
      writing, for a layer that shares another's K/V.
    v: like k.
    pages: the cache's pages; thread them through every layer.
    step: the step's arrays.
    layer: index within the cache group; may be traced, so that a scan over
      layers carries `pages`.
    group: index of the cache group.
    scale: multiplies the logits; `head_dim ** -0.5` by default.
    causal: whether a token sees only positions up to its own.
    window: a token sees the last `window` positions, its own included.
    soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
    sinks: `[heads]`, logits that join each softmax's denominator only.
    implementation: one of "tpu", "gpu", "xla", "reference"; by default the
      first that supports the call.

  Returns:
    The attention output, shaped like q, and the successor pages. Rows past
    the step's tokens are zero.

  Raises:
    BadRequest: q, k or v does not fit the step or the cache group.

  Reference: PagedAttention (Kwon et al., 2023), section 4.
  """
  _check_shapes(q, k, v, pages, step, group)
  slab = pages.groups[group]
  first_page = layer * slab.pages_per_layer
  if k is not None and v is not None:
    slab = _write(slab, k, v, step.slots(group), first_page, implementation)
    groups = (*pages.groups[:group], slab, *pages.groups[group + 1 :])
    pages = pages_lib.Pages(groups)
  out, _ = paged_attention.paged_attention(
    q.reshape(step.num_tokens, *q.shape[-2:]),
    slab.k,
    slab.v,
    step.page_table(group) + first_page,
    step.context_lens,
    None if step.is_decode else step.query_starts,
    scale=scale,
    causal=causal,
    window=window,
    soft_cap=soft_cap,
    sinks=sinks,
    k_scales=slab.k_scales,
    v_scales=slab.v_scales,
    implementation=implementation,
  )
  return out.reshape(q.shape), pages


def _write(
  slab: pages_lib.GroupPages,
  k: jax.Array,
  v: jax.Array,
  slots: jax.Array,
  first_page: int | jax.Array,
  implementation: str | None,
) -> pages_lib.GroupPages:
  rows = slots + first_page * slab.page_size
  k = k.reshape(rows.shape[0], *k.shape[-2:])
  v = v.reshape(rows.shape[0], *v.shape[-2:])
  if slab.k_scales is None:
    k_pages, v_pages = kv_update.write_kv(
      k,
      v,
      slab.k,
      slab.v,
      rows,
      implementation=implementation,
    )
    scales = (None, None)
  else:
    k_pages, v_pages, *scales = kv_update.write_kv(
      k,
      v,
      slab.k,
      slab.v,
      rows,
      k_scales=slab.k_scales,
      v_scales=slab.v_scales,
      implementation=implementation,
    )
  return dataclasses.replace(
    slab, k=k_pages, v=v_pages, k_scales=scales[0], v_scales=scales[1]
  )


def _check_shapes(
  q: jax.Array,
  k: jax.Array | None,
  v: jax.Array | None,
  pages: pages_lib.Pages,
  step: step_lib.StepArrays,
  group: int,
) -> None:
  """Trace-time checks; they cost nothing in the compiled step."""
  if not 0 <= group < len(pages.groups):
    raise errors.BadRequest(
      f"group={group}, but the cache has {len(pages.groups)} groups"
    )
  slab = pages.groups[group]
  kv_heads = slab.k.shape[1]
  if (k is None) != (v is None):
    raise errors.BadRequest("k and v must be given together, or neither")
  for name, array in (("q", q), ("k", k), ("v", v)):
    if array is None:
      continue
    heads = "heads" if name == "q" else kv_heads
    expected = f"[{step.num_tokens} tokens, {heads}, {slab.head_dim}]"
    rows = array.size // (array.shape[-1] * array.shape[-2])
    if (
      array.ndim not in (3, 4)
      or rows != step.num_tokens
      or array.shape[-1] != slab.head_dim
      or (name != "q" and array.shape[-2] != kv_heads)
    ):
      raise errors.BadRequest(
        f"{name} has shape {array.shape}, expected {expected}, or the same "
        "with a leading batch axis"
      )
  if q.shape[-2] % kv_heads:
    raise errors.BadRequest(
      f"q has {q.shape[-2]} heads, not a multiple of the group's "
      f"{kv_heads} K/V heads"
    )
