"""Named argument shapes that the tests, the compile table and benchmarks use."""

import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class AttentionShape:
  """The sizes and dtypes of one paged attention call.

  Attributes:
    name: how tables call it.
    sequences: rows of the page table.
    queries: query rows of each sequence; 1 is decode.
    q_heads: query heads.
    kv_heads: KV heads.
    head_dim: elements of a head.
    page_size: token rows of a page.
    context: rows of each sequence, the queries' own included.
    dtype: of the queries.
    kv_dtype: of the pages; int8 and float8_e4m3fn come with scales.
    window: positions a query sees, or None.
    soft_cap: bound of the logits, or None.
    spare_pages: pages of the pool that the batch does not use.
  """

  name: str
  sequences: int
  queries: int
  q_heads: int
  kv_heads: int
  head_dim: int
  page_size: int
  context: int
  dtype: str = "bfloat16"
  kv_dtype: str = "bfloat16"
  window: int | None = None
  soft_cap: float | None = None
  spare_pages: int = 0

  @property
  def is_decode(self) -> bool:
    """Whether each sequence has one query row."""
    return self.queries == 1

  @property
  def width(self) -> int:
    """Pages of a sequence."""
    return -(-self.context // self.page_size)

  @property
  def num_pages(self) -> int:
    """Pages of a pool that holds the batch, the null page and the spare."""
    return self.sequences * self.width + 1 + self.spare_pages


HEAD_DIMS = (64, 128, 256)
GROUPS = (1, 4, 8)
PAGE_SIZES = (16, 64, 128)
DTYPES = (
  ("bfloat16", "bfloat16"),
  ("float32", "float32"),
  ("bfloat16", "int8"),
  ("bfloat16", "float8_e4m3fn"),
)


# More than any chip's VMEM: XLA moves a smaller pool there, and what is compiled
# is a kernel that copies no page from HBM.
_POOL_BYTES = 256 << 20


def in_a_real_pool(shape: AttentionShape) -> AttentionShape:
  """The same call over a pool that does not fit on a chip."""
  row_bytes = shape.kv_heads * shape.head_dim
  spare_pages = _POOL_BYTES // (row_bytes * shape.page_size)
  return dataclasses.replace(shape, spare_pages=spare_pages)


def compile_shapes() -> Iterator[AttentionShape]:
  """The shapes that every kernel is compiled for, decode and ragged."""
  yield from map(in_a_real_pool, _compile_shapes())


def _compile_shapes() -> Iterator[AttentionShape]:
  for head_dim in HEAD_DIMS:
    for group in GROUPS:
      for page_size in PAGE_SIZES:
        for dtype, kv_dtype in DTYPES:
          for phase, sequences, queries in (
            ("decode", 8, 1),
            ("ragged", 4, 64),
          ):
            name = (
              f"{phase}_d{head_dim}_g{group}_p{page_size}_{dtype}_{kv_dtype}"
            )
            yield AttentionShape(
              name=name,
              sequences=sequences,
              queries=queries,
              q_heads=group * 4,
              kv_heads=4,
              head_dim=head_dim,
              page_size=page_size,
              context=1024,
              dtype=dtype,
              kv_dtype=kv_dtype,
            )
  for phase, sequences, queries in (("decode", 8, 1), ("ragged", 4, 64)):
    extras: tuple[dict[str, Any], ...] = ({"window": 256}, {"soft_cap": 30.0})
    for extra in extras:
      for head_dim in HEAD_DIMS:
        label = "_".join(extra)
        yield AttentionShape(
          name=f"{phase}_d{head_dim}_{label}",
          sequences=sequences,
          queries=queries,
          q_heads=16,
          kv_heads=4,
          head_dim=head_dim,
          page_size=16,
          context=1024,
          **extra,
        )


CPU_DECODE = AttentionShape(
  name="cpu_decode",
  sequences=8,
  queries=1,
  q_heads=8,
  kv_heads=2,
  head_dim=64,
  page_size=16,
  context=2048,
  dtype="float32",
  kv_dtype="float32",
)
CPU_PREFILL = dataclasses.replace(
  CPU_DECODE, name="cpu_prefill", sequences=1, queries=512
)
DEVICE_DECODE = AttentionShape(
  name="device_decode",
  sequences=64,
  queries=1,
  q_heads=32,
  kv_heads=8,
  head_dim=128,
  page_size=16,
  context=4096,
)
SMOLLM2_DECODE = AttentionShape(
  name="smollm2_decode",
  sequences=8,
  queries=1,
  q_heads=9,
  kv_heads=3,
  head_dim=64,
  page_size=16,
  context=1408,
  dtype="float32",
  kv_dtype="float32",
)
