"""What `aot` compiles: every op over its named shapes, and the row that says how.

A case is an op, an implementation and a shape; a compiler for a platform
(`aot_tpu`, `aot_gpu`) turns a case and a target into a row.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels import page_shape
from pallas_kernels.kv_update import api as update_api
from pallas_kernels.kv_update import operands as update_operands
from pallas_kernels.merge_states import api as merge_api
from pallas_kernels.merge_states import operands as merge_operands
from pallas_kernels.paged_attention import api as attention_api
from pallas_kernels.paged_attention import operands as attention_operands
from pallas_kernels.paged_attention import shapes

COMPILED = "compiled"
UNSUPPORTED = "unsupported"  # `why_unsupported` says so, and `xla` takes over
FAILED = "failed"


def array(shape: tuple[int, ...], dtype: Any) -> Any:
  """A shape where the operands' types say array."""
  return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class MergeShape:
  """The sizes of one merge of states."""

  name: str
  parts: int
  tokens: int
  heads: int
  head_dim: int
  dtype: str


@dataclasses.dataclass(frozen=True)
class UpdateShape:
  """The sizes of one write of rows, or of one copy of them.

  Attributes:
    name: how tables call it.
    rows: tokens to write, or pages to copy rows of.
    kv_heads: KV heads of a page.
    head_dim: elements of a head.
    page_size: token rows of a page.
    num_pages: pages of the pool.
    dtype: of the rows given.
    kv_dtype: of the pages.
  """

  name: str
  rows: int
  kv_heads: int
  head_dim: int
  page_size: int
  num_pages: int
  dtype: str
  kv_dtype: str


Shape = shapes.AttentionShape | MergeShape | UpdateShape


@dataclasses.dataclass(frozen=True)
class Case:
  """An op of an implementation at a shape.

  Attributes:
    op: "paged_attention", "merge_states", "write_kv" or "copy_rows"; of JAX's
      own kernels, their name.
    implementation: "tpu", "gpu", or "jax" for JAX's own.
    shape: its sizes.
  """

  op: str
  implementation: str
  shape: Shape


@dataclasses.dataclass(frozen=True)
class Row:
  """What compiling a case for a target found; one object of the JSON.

  Attributes:
    op: of the case.
    implementation: of the case.
    target: "v5e", "h200" and so on.
    shape: the shape's name.
    status: COMPILED, UNSUPPORTED or FAILED.
    reason: why it is not compiled.
    vmem_bytes: VMEM of a TPU's kernel, shared memory of a GPU's block.
    registers: of a GPU's thread.
    spill_bytes: stored to local memory by a GPU's thread.
    bundles: VLIW bundles of a TPU's kernel, a rolled loop counted once.
  """

  op: str
  implementation: str
  target: str
  shape: str
  status: str
  reason: str | None = None
  vmem_bytes: int | None = None
  registers: int | None = None
  spill_bytes: int | None = None
  bundles: int | None = None


@dataclasses.dataclass(frozen=True)
class Call:
  """A case made ready to trace.

  Attributes:
    run: takes `operands`.
    operands: shapes, of the op's dataclass.
    options: static options, of the op's dataclass.
    op: whose implementations are asked.
    donated: fields of `operands` that the caller gives up.
  """

  run: Callable[[Any], Any]
  operands: Any
  options: Any
  op: dispatch.Op
  donated: tuple[str, ...] = ()


def row_of(case: Case, target: str, status: str, **found: Any) -> Row:
  """The row of a case on a target."""
  return Row(
    op=case.op,
    implementation=case.implementation,
    target=target,
    shape=case.shape.name,
    status=status,
    **found,
  )


def why_unsupported(case: Case, platform: str) -> str | None:
  """What the dispatcher says of a case of ours on a platform.

  Args:
    case: not one of JAX's own.
    platform: "tpu" or "gpu".
  """
  call = call_of(case, platform)
  with dispatch.tracing_for(platform):
    return call.op.why_unsupported(
      case.implementation, call.operands, call.options
    )


def call_of(case: Case, platform: str) -> Call:
  """Makes a case of ours ready to trace.

  Args:
    case: not one of JAX's own.
    platform: whose page layout to use: "tpu" or "gpu".
  """
  makers = {
    "paged_attention": _attention_call,
    "merge_states": _merge_call,
    "write_kv": _write_call,
    "copy_rows": _copy_call,
  }
  return makers[case.op](case, platform)


def pool(
  num_pages: int,
  kv_heads: int,
  page_size: int,
  head_dim: int,
  dtype: str,
  platform: str,
) -> tuple[Any, Any]:
  """One side's pages and, where they are quantised, its scales."""
  shape = page_shape.page_shape(
    kv_heads, page_size, head_dim, platform=platform
  )
  pages = array((num_pages, *shape), dtype)
  if pages.dtype.itemsize > 1:
    return pages, None
  scales = page_shape.scales_shape(kv_heads, page_size)
  return pages, array((num_pages, *scales), jnp.float32)


def _attention_call(case: Case, platform: str) -> Call:
  shape = case.shape
  assert isinstance(shape, shapes.AttentionShape)
  pages, scales = pool(
    shape.num_pages,
    shape.kv_heads,
    shape.page_size,
    shape.head_dim,
    shape.kv_dtype,
    platform,
  )
  tokens = shape.sequences * shape.queries
  starts = array((shape.sequences + 1,), jnp.int32)
  operands = attention_operands.Operands(
    q=array((tokens, shape.q_heads, shape.head_dim), shape.dtype),
    k_pages=pages,
    v_pages=pages,
    page_table=array((shape.sequences, shape.width), jnp.int32),
    context_lens=array((shape.sequences,), jnp.int32),
    query_starts=None if shape.is_decode else starts,
    window=None if shape.window is None else array((), jnp.int32),
    k_scales=scales,
    v_scales=scales,
  )
  options = attention_api.resolve(operands, soft_cap=shape.soft_cap)

  def run(x: attention_operands.Operands) -> Any:
    return attention_api.paged_attention(
      x.q,
      x.k_pages,
      x.v_pages,
      x.page_table,
      x.context_lens,
      x.query_starts,
      window=x.window,
      soft_cap=shape.soft_cap,
      k_scales=x.k_scales,
      v_scales=x.v_scales,
      implementation=case.implementation,
    )

  return Call(run, operands, options, attention_api.OP)


def _merge_call(case: Case, platform: str) -> Call:
  del platform
  shape = case.shape
  assert isinstance(shape, MergeShape)
  states = (shape.parts, shape.tokens, shape.heads)
  operands = merge_operands.Operands(
    outs=array((*states, shape.head_dim), shape.dtype),
    lses=array(states, jnp.float32),
  )

  def run(x: merge_operands.Operands) -> Any:
    return merge_api.merge_states(
      x.outs, x.lses, implementation=case.implementation
    )

  return Call(run, operands, merge_operands.Options(), merge_api.OP)


def _update_pool(case: Case, platform: str) -> tuple[UpdateShape, Any, Any]:
  shape = case.shape
  assert isinstance(shape, UpdateShape)
  pages, scales = pool(
    shape.num_pages,
    shape.kv_heads,
    shape.page_size,
    shape.head_dim,
    shape.kv_dtype,
    platform,
  )
  return shape, pages, scales


def _write_call(case: Case, platform: str) -> Call:
  shape, pages, scales = _update_pool(case, platform)
  rows = array((shape.rows, shape.kv_heads, shape.head_dim), shape.dtype)
  operands = update_operands.WriteOperands(
    k=rows,
    v=rows,
    k_pages=pages,
    v_pages=pages,
    slots=array((shape.rows,), jnp.int32),
    k_scales=scales,
    v_scales=scales,
  )

  def run(x: update_operands.WriteOperands) -> Any:
    return update_api.write_kv(
      x.k,
      x.v,
      x.k_pages,
      x.v_pages,
      x.slots,
      k_scales=x.k_scales,
      v_scales=x.v_scales,
      implementation=case.implementation,
    )

  return Call(
    run,
    operands,
    update_api.resolve_write(operands),
    update_api.WRITE,
    donated=("k_pages", "v_pages", "k_scales", "v_scales"),
  )


def _copy_call(case: Case, platform: str) -> Call:
  shape, pages, _ = _update_pool(case, platform)
  ids = array((shape.rows,), jnp.int32)
  operands = update_operands.CopyOperands(
    pages=pages, source_pages=ids, destination_pages=ids, row_counts=ids
  )
  options = update_operands.CopyOptions(
    geometry=page_shape.geometry_of("pages", pages, shape.head_dim)
  )

  def run(x: update_operands.CopyOperands) -> Any:
    return update_api.copy_rows(
      x.pages,
      x.source_pages,
      x.destination_pages,
      x.row_counts,
      head_dim=shape.head_dim,
      implementation=case.implementation,
    )

  return Call(run, operands, options, update_api.COPY, donated=("pages",))


def cases(implementation: str, *, subset: bool) -> Iterator[Case]:
  """Every case of an implementation of ours.

  Args:
    implementation: "tpu" or "gpu".
    subset: only what CI compiles: each dtype, width, page and mask once.
  """
  for shape in shapes.compile_shapes():
    if not subset or _in_subset(shape):
      yield Case("paged_attention", implementation, shape)
  for shape in _merge_shapes():
    yield Case("merge_states", implementation, shape)
  for shape in _update_shapes():
    for op in ("write_kv", "copy_rows"):
      yield Case(op, implementation, shape)


def _in_subset(shape: shapes.AttentionShape) -> bool:
  """One page size and group, all widths and dtypes; then each other one."""
  group = shape.q_heads // shape.kv_heads
  plain = (shape.page_size, group) == (16, 4)
  masked = shape.window is not None or shape.soft_cap is not None
  other = (shape.head_dim, shape.kv_dtype) == (128, "bfloat16") and (
    group == 4 or shape.page_size == 16
  )
  if masked:
    return shape.head_dim == 128
  return plain or other


def _merge_shapes() -> Iterator[MergeShape]:
  for parts, dtype in ((2, "bfloat16"), (8, "float32")):
    yield MergeShape(f"merge_p{parts}_d128_{dtype}", parts, 64, 16, 128, dtype)


def _update_shapes() -> Iterator[UpdateShape]:
  for head_dim in (64, 128):
    for dtype, kv_dtype in shapes.DTYPES:
      yield UpdateShape(
        f"update_d{head_dim}_p16_{dtype}_{kv_dtype}",
        rows=64,
        kv_heads=4,
        head_dim=head_dim,
        page_size=16,
        num_pages=513,
        dtype=dtype,
        kv_dtype=kv_dtype,
      )
