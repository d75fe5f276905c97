"""Compiles cases to Hopper machine code on a machine without a GPU.

Needs, beside JAX, its CUDA plugin and NVIDIA's compilers, and no driver:

    pip install --no-deps jax-cuda13-plugin==$JAX jax-cuda13-pjrt==$JAX \
      nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterator
from typing import Any

# ptxas then reports each kernel's registers and spills; read once, by C++.
os.environ.setdefault("MOSAIC_GPU_DUMP_PTXAS", "1")

import jax
import jax.numpy as jnp
from jax import sharding
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from pallas_kernels import aot_cases
from pallas_kernels import aot_compile
from pallas_kernels import dispatch
from pallas_kernels.paged_attention import shapes

PLATFORM = "gpu"
NEEDED = ("jax_cuda13_plugin", "jax_plugins.xla_cuda13", "nvidia.cu13")
_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: 9 minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
_DEVICES = {
  "h100": {
    "name": "NVIDIA H100 80GB HBM3",
    "bandwidth": 3_350_000_000_000,
    "memory": 85_000_000_000,
  },
  "h200": {
    "name": "NVIDIA H200",
    "bandwidth": 4_800_000_000_000,
    "memory": 150_000_000_000,
  },
}
TARGETS = tuple(_DEVICES)


@dataclasses.dataclass(frozen=True)
class Assembled:
  """What ptxas said of a kernel."""

  registers: int
  spill_bytes: int


# All targets have the same instructions: one program serves them.
_rows: dict[aot_cases.Case, aot_cases.Row] = {}
# Mosaic GPU assembles equal kernels once a process; what it said then holds.
_assembled: dict[str, Assembled] = {}


def missing() -> str | None:
  """What has to be installed to compile for these targets, or None."""
  absent = [name for name in NEEDED if not _installed(name)]
  if not absent:
    return None
  return f"{', '.join(absent)} not installed; see pallas_kernels/aot_gpu.py"


def _installed(name: str) -> bool:
  try:
    return importlib.util.find_spec(name) is not None
  except ModuleNotFoundError:
    return False


def baselines(*, subset: bool) -> Iterator[aot_cases.Case]:
  """The shapes of ours that JAX's own GPU kernel might accept: decode."""
  for case in aot_cases.cases("gpu", subset=subset):
    shape = case.shape
    if isinstance(shape, shapes.AttentionShape) and shape.is_decode:
      yield aot_cases.Case("jax.paged_attention", "jax", shape)


def compile_case(case: aot_cases.Case, target: str) -> aot_cases.Row:
  """Compiles a case for a GPU that is not here.

  Args:
    case: of implementation "gpu" or "jax".
    target: one of `TARGETS`.

  Returns:
    Its row; a compiler's refusal is a row, not an exception.
  """
  if case not in _rows:
    with uncached():
      _rows[case] = aot_compile.row(
        case, target, PLATFORM, _baseline_reason, _compile
      )
  return dataclasses.replace(_rows[case], target=target)


@functools.cache
def _placement(target: str) -> sharding.SingleDeviceSharding:
  topology = topologies.get_topology_desc(
    platform="cuda",
    topology_name="1x1x1",
    topology="1x1x1",
    target_config=_HOPPER.format(**_DEVICES[target]),
  )
  return sharding.SingleDeviceSharding(topology.devices[0])


def _compile(case: aot_cases.Case, target: str) -> dict[str, int]:
  """Compiles to machine code; what is known of it, by the row's fields."""
  if case.implementation == "jax":
    run, operands = _baseline(case)
    with _device(target):
      lower(run, operands, target).compile()
    return {}
  call = aot_cases.call_of(case, PLATFORM)
  run, operands, donated = aot_compile.function_of(call)
  lowered = lower(run, operands, target, donated=donated)
  kernels = sorted(set(_kernels(lowered.as_text())))
  with _captured() as said:
    lowered.compile()
    _remember(kernels, said())
  found = [_assembled[kernel] for kernel in kernels]
  return {
    "registers": max(x.registers for x in found),
    "spill_bytes": max(x.spill_bytes for x in found),
    "vmem_bytes": _module(call).shared_bytes(call.operands, call.options),
  }


def _device(target: str) -> contextlib.AbstractContextManager[Any]:
  """Traces inside ask what GPU they are for, and are told this one."""
  mesh = sharding.AbstractMesh(
    (1,),
    ("_",),
    axis_types=(sharding.AxisType.Auto,),
    abstract_device=sharding.AbstractDevice(
      device_kind=_DEVICES[target]["name"], num_cores=None, platform="gpu"
    ),
  )
  return sharding.use_abstract_mesh(mesh)


def _module(call: aot_cases.Call) -> Any:
  """The module that runs a call on a GPU."""
  with dispatch.tracing_for(PLATFORM):
    return call.op.select("gpu", call.operands, call.options)


@contextlib.contextmanager
def uncached() -> Generator[None]:
  """Compiles inside are done: JAX cannot read such programs back."""
  folder = jax.config.values["jax_compilation_cache_dir"]
  jax.config.update("jax_compilation_cache_dir", None)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


def lower(
  run: Callable[..., Any],
  arguments: tuple[Any, ...],
  target: str,
  donated: tuple[int, ...] = (),
) -> jax.stages.Lowered:
  """Lowers a function for a GPU that is not here.

  Args:
    run: the function.
    arguments: trees of `jax.ShapeDtypeStruct`.
    target: one of `TARGETS`.
    donated: which arguments the caller gives up.
  """
  place = functools.partial(_placed, where=_placement(target))
  return jax.jit(run, donate_argnums=donated).lower(
    *jax.tree.map(place, arguments)
  )


def _placed(
  x: jax.ShapeDtypeStruct, where: sharding.Sharding
) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def _kernels(text: str) -> Iterator[str]:
  """The hash of each Mosaic GPU kernel in a lowered program."""
  for match in re.finditer(r'kernel_hash = "((?:[^"\\]|\\.)*)"', text):
    yield match.group(1)


def _remember(kernels: list[str], said: str) -> None:
  """Notes what ptxas said of kernels that it had not assembled before."""
  new = [kernel for kernel in kernels if kernel not in _assembled]
  blocks = re.findall(
    r"(\d+) bytes spill stores.*?Used (\d+) registers", said, re.DOTALL
  )
  if len(blocks) != len(new):
    raise RuntimeError(
      f"ptxas reported {len(blocks)} kernels, expected {len(new)}: {said[:500]}"
    )
  for kernel, (spill_bytes, registers) in zip(new, blocks, strict=True):
    _assembled[kernel] = Assembled(int(registers), int(spill_bytes))


@contextlib.contextmanager
def _captured() -> Generator[Callable[[], str]]:
  """Collects what C++ prints to stdout and stderr; the caller reads it."""
  sys.stdout.flush()
  sys.stderr.flush()
  with tempfile.TemporaryFile() as file:
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    for descriptor in (1, 2):
      os.dup2(file.fileno(), descriptor)
    try:
      yield lambda: _read(file)
    finally:
      for descriptor, original in zip((1, 2), saved, strict=True):
        os.dup2(original, descriptor)
        os.close(original)


def _read(file: Any) -> str:
  file.seek(0)
  return file.read().decode(errors="replace")


def _baseline_reason(case: aot_cases.Case) -> str | None:
  """What JAX's own kernel has no way to be asked for."""
  shape = case.shape
  assert isinstance(shape, shapes.AttentionShape)
  if shape.window is not None:
    return "takes no window"
  return None


def _baseline(
  case: aot_cases.Case,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """JAX's own paged attention, deprecated and Triton, on the same shape."""
  from jax.experimental.pallas.ops.gpu import paged_attention

  shape = case.shape
  assert isinstance(shape, shapes.AttentionShape)
  array = jax.ShapeDtypeStruct
  pool = (shape.kv_heads, shape.num_pages, shape.page_size)
  pages = array((*pool, shape.head_dim), jnp.dtype(shape.kv_dtype))
  scales = None
  if pages.dtype.itemsize == 1:
    scales = array(pool, jnp.float32)
  queries = (shape.sequences, shape.q_heads, shape.head_dim)
  operands = (
    array(queries, jnp.dtype(shape.dtype)),
    pages,
    pages,
    array((shape.sequences, shape.width), jnp.int32),
    array((shape.sequences,), jnp.int32),
    scales,
    scales,
  )

  def run(*x: jax.Array) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):
      return paged_attention.paged_attention(
        *x[:5],
        k_scales_pages=x[5],
        v_scales_pages=x[6],
        k_splits=math.gcd(shape.width, 16),
        attn_logits_soft_cap=shape.soft_cap,
      )

  return run, operands
