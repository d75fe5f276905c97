"""The public ops: validate, resolve and select."""

import dataclasses
from collections.abc import Sequence

import jax

from pallas_kernels import bits
from pallas_kernels import checks
from pallas_kernels import dispatch
from pallas_kernels import errors
from pallas_kernels import gradients
from pallas_kernels import page_shape
from pallas_kernels import pools
from pallas_kernels.kv_update import operands as operands_lib

WRITE = dispatch.Op(
  "pallas_kernels.kv_update", "write_kv", "why_write_unsupported"
)
COPY = dispatch.Op(
  "pallas_kernels.kv_update", "copy_rows", "why_copy_unsupported"
)


def write_kv(
  k: jax.Array,
  v: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  slots: jax.Array,
  *,
  k_scales: jax.Array | None = None,
  v_scales: jax.Array | None = None,
  implementation: str | None = None,
) -> tuple[jax.Array, ...]:
  """Writes each token's K and V rows to its slot, in place under donation.

  No two tokens of a call may have the same slot, except in page 0 of a layer
  (the null page), of which nothing is promised.  Padded tokens come last or
  carry a slot of a null page.

  Args:
    k: `[tokens, kv_heads, head_dim]`, rounded to what the pages hold.
    v: `[tokens, kv_heads, v_head_dim]`.
    k_pages: `[pages, *page_shape]`; floating, int8 or float8_e4m3fn.
    v_pages: the same for V.
    slots: int32 `[tokens]`, `page * page_size + row`; must be in range.
    k_scales: float32 `[pages, *scales_shape]` for int8 and fp8 pages; each row
      is quantised on its own, so that it never depends on its neighbours.
    v_scales: the same for V.
    implementation: one of `dispatch.IMPLEMENTATIONS`, or None.

  Returns:
    `(k_pages, v_pages)`, and with scales `(k_pages, v_pages, k_scales,
    v_scales)`.

  Raises:
    KernelArgumentError: shapes or dtypes that do not fit.
    KernelUnsupported: the named implementation cannot run it, and why.
    InferenceOnly: under differentiation.

  Ownership: donate the pages where the call is jitted; the arrays given are
    dead after it, the returned ones are their successors.
  """
  arrays = checks.require_arrays(
    {"k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages, "slots": slots},
    {"k_scales": k_scales, "v_scales": v_scales},
  )
  for name in ("k", "v", "k_pages", "v_pages"):
    arrays[name] = gradients.inference_only("write_kv", arrays[name])
  operands = operands_lib.WriteOperands(**arrays)
  options = resolve_write(operands)
  if not operands.slots.shape[0]:
    written = ("k_pages", "v_pages", "k_scales", "v_scales")
    return tuple(arrays[x] for x in written if arrays[x] is not None)
  if operands.k_scales is None:
    element = bits.element_dtype(operands.k_pages.dtype)
    operands = dataclasses.replace(
      operands, k=operands.k.astype(element), v=operands.v.astype(element)
    )
  module = WRITE.select(implementation, operands, options)
  return module.write_kv(operands, options)


def resolve_write(
  operands: operands_lib.WriteOperands,
) -> operands_lib.WriteOptions:
  """Checks operands against each other and reads the pages' geometry.

  Args:
    operands: arrays, or `jax.ShapeDtypeStruct`s.

  Raises:
    KernelArgumentError: as `write_kv`.
  """
  k, v = operands.k, operands.v
  rows = [*k.shape[:1], None, None]  # No rows are rows, too.
  checks.require_shape("k", k, "[tokens, kv_heads, head_dim]", rows)
  checks.require_shape(
    "v", v, "[tokens, kv_heads, head_dim]", [*k.shape[:2], None]
  )
  checks.require_shape("slots", operands.slots, "[tokens]", k.shape[:1])
  checks.require_int32("slots", operands.slots)
  pools.require_dtypes(operands)
  pools.require_equal_counts(operands)
  options = operands_lib.WriteOptions(
    k_geometry=page_shape.geometry_of("k_pages", operands.k_pages, k.shape[-1]),
    v_geometry=page_shape.geometry_of("v_pages", operands.v_pages, v.shape[-1]),
  )
  sides = (("k", options.k_geometry), ("v", options.v_geometry))
  for side, geometry in sides:
    pages = getattr(operands, f"{side}_pages")
    if geometry.kv_heads != k.shape[1]:
      raise errors.KernelArgumentError(
        f"{side}_pages has shape {pages.shape}, expected the {k.shape[1]} KV"
        f" heads of k {k.shape}"
      )
  if options.k_geometry.page_size != options.v_geometry.page_size:
    raise errors.KernelArgumentError(
      f"k_pages has shape {operands.k_pages.shape} and v_pages"
      f" {operands.v_pages.shape}, expected equal page sizes"
    )
  pools.require_scales(operands, options.k_geometry)
  return options


def copy_rows(
  pages: jax.Array,
  source_pages: jax.Array,
  destination_pages: jax.Array,
  row_counts: jax.Array,
  *,
  head_dim: int,
  implementation: str | None = None,
) -> jax.Array:
  """Copies the first rows of pages onto other pages, in place under donation.

  Everything is read before anything is written.  The cost is that of the
  copies with a count above 0.

  Args:
    pages: `[pages, *page_shape]`.
    source_pages: int32 `[copies]`.
    destination_pages: int32 `[copies]`; none of them is a source, and none is
      named twice, among copies with a count above 0.
    row_counts: int32 `[copies]`, 0 to page_size; 0 copies nothing.
    head_dim: elements of one row of one head.
    implementation: one of `dispatch.IMPLEMENTATIONS`, or None.

  Returns:
    The successor of `pages`.

  Raises:
    KernelArgumentError: shapes or dtypes that do not fit.
    KernelUnsupported: the named implementation cannot run it, and why.
    InferenceOnly: under differentiation.

  Ownership: donate the pages where the call is jitted.
  """
  arrays = checks.require_arrays(
    {
      "pages": pages,
      "source_pages": source_pages,
      "destination_pages": destination_pages,
      "row_counts": row_counts,
    }
  )
  arrays["pages"] = gradients.inference_only("copy_rows", arrays["pages"])
  operands = operands_lib.CopyOperands(**arrays)
  _check_copies(source_pages, destination_pages, row_counts)
  options = operands_lib.CopyOptions(
    geometry=page_shape.geometry_of("pages", operands.pages, head_dim)
  )
  if not source_pages.shape[0]:
    return operands.pages
  module = COPY.select(implementation, operands, options)
  return module.copy_rows(operands, options)


def _check_copies(*arrays: jax.Array) -> None:
  names: Sequence[str] = ("source_pages", "destination_pages", "row_counts")
  for name, array in zip(names, arrays, strict=True):
    checks.require_shape(name, array, "[copies]", arrays[0].shape[:1])
    checks.require_int32(name, array)
