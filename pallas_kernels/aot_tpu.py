"""Compiles cases to TPU programs on a machine without a TPU.

Needs, beside JAX, libtpu and no device:

    pip install libtpu

Bundles are the VLIW instructions of a kernel as scheduled: a static figure, never
a time.  The compiler writes them to files if it is told to before it loads, so
nothing else may have compiled for a TPU in the process.
"""

import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import sharding
from jax.experimental import topologies

from pallas_kernels import aot_cases
from pallas_kernels import aot_compile
from pallas_kernels.paged_attention import shapes

PLATFORM = "tpu"
_TOPOLOGIES = {
  "v4": "v4:2x2x1",
  "v5e": "v5e:2x2",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:2x2",
  "7x": "tpu7x:2x2x1",
}
TARGETS = tuple(_TOPOLOGIES)
_BUNDLES = re.compile(r"total scheduled bundles:\s*(\d+)")
# The compiler writes its files in the background.
_DUMP_SECONDS = 2.0


def missing() -> str | None:
  """What has to be installed to compile for these targets, or None."""
  if importlib.util.find_spec("libtpu") is not None:
    return None
  return "libtpu not installed; see pallas_kernels/aot_tpu.py"


def baselines(*, subset: bool) -> Iterator[aot_cases.Case]:
  """The shapes of ours, for JAX's own decode and ragged kernels."""
  for case in aot_cases.cases("tpu", subset=subset):
    if isinstance(case.shape, shapes.AttentionShape):
      decode = case.shape.is_decode
      name = "paged_attention" if decode else "ragged_paged_attention"
      yield aot_cases.Case(f"jax.{name}", "jax", case.shape)


def compile_case(case: aot_cases.Case, target: str) -> aot_cases.Row:
  """Compiles a case for a TPU that is not here.

  Args:
    case: of implementation "tpu" or "jax".
    target: one of `TARGETS`.

  Returns:
    Its row; a compiler's refusal is a row, not an exception.
  """
  return aot_compile.row(case, target, PLATFORM, _baseline_reason, _compile)


def _compile(case: aot_cases.Case, target: str) -> dict[str, Any]:
  """What is known of a compiled case, by the row's fields."""
  if case.implementation == "jax":
    function: aot_compile.Function = (*_baseline(case), ())
  else:
    function = aot_compile.function_of(aot_cases.call_of(case, PLATFORM))
  compiled = compile_function(*function, target)
  return {"vmem_bytes": compiled.vmem_bytes, "bundles": compiled.bundles}


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What compiling a function for a TPU found.

  Attributes:
    text: the optimised program.
    temporary_bytes: what it allocates beside arguments and results.
    vmem_bytes: of its largest kernel.
    bundles: of its kernels together; None where the compiler wrote none.
  """

  text: str
  temporary_bytes: int
  vmem_bytes: int
  bundles: int | None


def compile_function(
  run: Callable[..., Any],
  operands: tuple[Any, ...],
  donated: tuple[int, ...],
  target: str,
) -> Compiled:
  """Compiles a function for a TPU that is not here.

  Args:
    run: takes `operands`.
    operands: pytrees of `jax.ShapeDtypeStruct`.
    donated: which of them the caller gives up.
    target: one of `TARGETS`.
  """
  _dump()
  device = _device(target)
  where = sharding.SingleDeviceSharding(device)
  placed = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), operands
  )
  for file in _dump().iterdir():
    file.unlink()
  with sharding.use_abstract_mesh(_mesh(device)):
    compiled = jax.jit(run, donate_argnums=donated).lower(*placed).compile()
  text = compiled.as_text() or ""
  memory: Any = compiled.memory_analysis()
  kernels = re.findall(r"%(\S+) = [^\n]*custom_call_target=\"tpu_custom", text)
  sizes = re.findall(
    r'"used_scoped_memory_configs":\[\{"memory_space":"1",[^}]*"size":"(\d+)"',
    text,
  )
  return Compiled(
    text=text,
    temporary_bytes=memory.temp_size_in_bytes,
    vmem_bytes=max(map(int, sizes), default=0),
    bundles=_bundles(kernels),
  )


def _bundles(kernels: list[str]) -> int | None:
  """Bundles of the kernels just compiled, once their files are there."""
  end = time.monotonic() + _DUMP_SECONDS
  while time.monotonic() < end:
    found = [_bundles_of(kernel) for kernel in kernels]
    if found and None not in found:
      return sum(x for x in found if x is not None)
    time.sleep(0.05)
  return None


def _bundles_of(kernel: str) -> int | None:
  for file in _dump().glob(f"*-{kernel}-*schedule-analysis_final_bundles.txt"):
    with contextlib.suppress(FileNotFoundError), file.open() as lines:
      match = _BUNDLES.search(lines.read(4096))
      if match is not None:
        return int(match.group(1))
  return None


@functools.cache
def _dump() -> pathlib.Path:
  """Where the compiler writes; asked for before it loads."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix="pallas_kernels_aot_"))
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  flags = (
    os.environ.get("LIBTPU_INIT_ARGS", ""),
    f"--xla_jf_dump_to={folder}",
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_emit_annotations=true",
    "--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*",
  )
  os.environ["LIBTPU_INIT_ARGS"] = " ".join(flags)
  # Nothing asks a metadata server what machine this is.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  # Nobody holds a device, so others may compile at the same time.
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  return folder


@functools.cache
def _device(target: str) -> Any:
  topology = topologies.get_topology_desc(
    platform="tpu", topology_name=_TOPOLOGIES[target]
  )
  return topology.devices[0]


def _mesh(device: Any) -> sharding.AbstractMesh:
  """Traces inside ask what device they are for, and are told this one."""
  return sharding.AbstractMesh(
    (1,),
    ("_",),
    axis_types=(sharding.AxisType.Auto,),
    abstract_device=sharding.AbstractDevice(
      device_kind=device.device_kind,
      num_cores=getattr(device, "num_cores", 1),
      platform="tpu",
    ),
  )


def _baseline_reason(case: aot_cases.Case) -> str | None:
  """What JAX's own kernels have no way to be asked for."""
  shape = case.shape
  assert isinstance(shape, shapes.AttentionShape)
  if shape.kv_dtype == "float8_e4m3fn":
    return "takes no fp8 pages with scales of rows"
  if shape.is_decode and shape.window is not None:
    return "takes no window"
  if not shape.is_decode and shape.kv_dtype == "int8":
    return "takes no int8 pages with scales of rows"
  return None


def _baseline(
  case: aot_cases.Case,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """JAX's own kernel on the same shape, in the layout that it wants."""
  shape = case.shape
  assert isinstance(shape, shapes.AttentionShape)
  if shape.is_decode:
    return decode_baseline(shape, min(shape.width, 128 // shape.page_size or 1))
  return _ragged_baseline(shape)


def decode_baseline(
  shape: shapes.AttentionShape, pages_per_block: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """JAX's own paged attention, and its operands.

  Args:
    shape: of the call; decode.
    pages_per_block: pages that it copies and computes together.
  """
  from jax.experimental.pallas.ops.tpu import paged_attention
  from jax.experimental.pallas.ops.tpu.paged_attention import quantization_utils

  array = jax.ShapeDtypeStruct
  pool = (shape.kv_heads, shape.num_pages, shape.page_size)
  pages: Any = array((*pool, shape.head_dim), jnp.dtype(shape.kv_dtype))
  if shape.kv_dtype == "int8":
    scales: Any = array((*pool, 1), jnp.float32)
    pages = quantization_utils.QuantizedTensor(pages, scales)
  queries = (shape.sequences, shape.q_heads, shape.head_dim)
  operands = (
    array(queries, jnp.dtype(shape.dtype)),
    pages,
    pages,
    array((shape.sequences,), jnp.int32),
    array((shape.sequences, shape.width), jnp.int32),
  )

  def run(*x: Any) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):
      return paged_attention.paged_attention(
        *x,
        attn_logits_soft_cap=shape.soft_cap,
        pages_per_compute_block=pages_per_block,
      )

  return run, operands


def _ragged_baseline(
  shape: shapes.AttentionShape,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  from jax.experimental.pallas.ops.tpu import ragged_paged_attention

  array = jax.ShapeDtypeStruct
  pages = (
    shape.num_pages,
    shape.page_size,
    2 * shape.kv_heads,
    shape.head_dim,
  )
  queries = (
    shape.sequences * shape.queries,
    shape.q_heads,
    shape.head_dim,
  )
  operands = (
    array(queries, jnp.dtype(shape.dtype)),
    array(pages, jnp.dtype(shape.kv_dtype)),
    array((shape.sequences,), jnp.int32),
    array((shape.sequences, shape.width), jnp.int32),
    array((shape.sequences + 1,), jnp.int32),
    array((1,), jnp.int32),
  )

  def run(*x: Any) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):
      return ragged_paged_attention.ragged_paged_attention(
        *x,
        sliding_window=shape.window,
        soft_cap=shape.soft_cap,
        num_kv_pages_per_block=min(shape.width, 128 // shape.page_size or 1),
        num_queries_per_block=32,
      )

  return run, operands
