"""What the bytes of a cache mean: groups of layers, their sizes and strides.

A layout is the immutable half of the cache: it says how to read every page
table ever written under it, and owns no page itself.

    CacheLayout
      groups[0] "local"   layers 0, 1, 3, 4   pages of 16 rows
      groups[1] "global"  layers 2, 5         pages of 32 rows
      bundle              32 rows: two pages of "local", one of "global"
"""

import dataclasses
import functools
import hashlib
import json
import math

from host_allocator import arguments
from host_allocator import errors

SCALAR_BYTES = {
  "float64": 8,
  "float32": 4,
  "float16": 2,
  "bfloat16": 2,
  "float8_e4m3fn": 1,
  "float8_e5m2": 1,
  "int8": 1,
}
QUANTIZED_DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn"}
SCALE_BYTES = 4
AXES = ("layer", "page", "head", "row", "lane")
INTERLEAVED_AXES = ("layer", "page", "kv", "head", "row", "lane")
SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True)
class CacheGroup:
  """Layers that share a page pool and one interpretation of its bytes.

  Attributes:
    name: unique within a layout.
    num_layers: layers of this group on this worker.
    num_kv_heads: K/V heads of one layer held by this worker.
    head_dim: scalars of one K head (and of one V head, unless v_head_dim).
    page_size: token rows of one page.
    dtype: of K and V before quantisation.
    v_head_dim: scalars of one V head where it differs from head_dim.
    quantization: None, "int8" or "fp8"; adds a float32 scale for every
      (layer, head, row) of K and of V.
    layers: the model layers in group order; None for the next num_layers
      layers that no earlier group names.
    axis_order: the array's axes, slowest first. With a "kv" axis K and V
      share one array, without it they have one each.
    lane_multiple: stored head widths are rounded up to a multiple of this.
  """

  name: str
  num_layers: int
  num_kv_heads: int
  head_dim: int
  page_size: int
  dtype: str = "float32"
  v_head_dim: int | None = None
  quantization: str | None = None
  layers: tuple[int, ...] | None = None
  axis_order: tuple[str, ...] = AXES
  lane_multiple: int = 1

  def __post_init__(self) -> None:
    if not isinstance(self.name, str) or not self.name:
      raise errors.LayoutError(f"a cache group needs a name, got {self.name!r}")
    for field in (
      "num_layers",
      "num_kv_heads",
      "head_dim",
      "page_size",
      "lane_multiple",
    ):
      _check_positive(self, field)
    if self.v_head_dim is not None:
      _check_positive(self, "v_head_dim")
    if self.dtype not in tuple(SCALAR_BYTES):
      raise errors.LayoutError(
        f"dtype of group {self.name!r} is {self.dtype!r}, not one of"
        f" {tuple(SCALAR_BYTES)}"
      )
    if self.quantization not in (None, *QUANTIZED_DTYPES):
      raise errors.LayoutError(
        f"quantization of group {self.name!r} is {self.quantization!r}, not"
        f" None or one of {tuple(QUANTIZED_DTYPES)}"
      )
    self._check_axes()
    self._check_layers()

  def _check_axes(self) -> None:
    try:
      axes = tuple(self.axis_order)
      is_order = sorted(axes) in (sorted(AXES), sorted(INTERLEAVED_AXES))
    except TypeError:
      axes, is_order = self.axis_order, False
    object.__setattr__(self, "axis_order", axes)
    if not is_order:
      raise errors.LayoutError(
        f"axis_order of group {self.name!r} is {axes}, not an order of"
        f" {AXES}, with or without 'kv'"
      )
    if "kv" in axes and self.value_dim != self.head_dim:
      raise errors.LayoutError(
        f"group {self.name!r} interleaves K and V of different widths"
        f" {self.head_dim} and {self.value_dim}"
      )

  def _check_layers(self) -> None:
    if self.layers is None:
      return
    try:
      layers = tuple(
        arguments.whole("layer", layer, 0, None, errors.LayoutError)
        for layer in self.layers
      )
    except (TypeError, errors.LayoutError) as error:
      raise errors.LayoutError(
        f"layers of group {self.name!r} are {self.layers!r}, not whole numbers"
        " from 0"
      ) from error
    object.__setattr__(self, "layers", layers)
    if len(layers) != self.num_layers or len(set(layers)) != len(layers):
      raise errors.LayoutError(
        f"layers of group {self.name!r} are {layers}, not {self.num_layers}"
        " different ones"
      )

  @property
  def value_dim(self) -> int:
    """Scalars of one V head."""
    return self.head_dim if self.v_head_dim is None else self.v_head_dim

  @property
  def stored_dtype(self) -> str:
    """The dtype of the page arrays."""
    if self.quantization is None:
      return self.dtype
    return QUANTIZED_DTYPES[self.quantization]

  @property
  def scalar_bytes(self) -> int:
    """Bytes of one stored K or V scalar."""
    return SCALAR_BYTES[self.stored_dtype]

  @property
  def k_row_bytes(self) -> int:
    """Bytes of one token's K over all layers of the group."""
    heads = self.num_layers * self.num_kv_heads
    return heads * self.head_dim * self.scalar_bytes

  @property
  def v_row_bytes(self) -> int:
    """Bytes of one token's V over all layers of the group."""
    heads = self.num_layers * self.num_kv_heads
    return heads * self.value_dim * self.scalar_bytes

  @property
  def scale_row_bytes(self) -> int:
    """Bytes of one token's quantisation scales, 0 without quantisation."""
    if self.quantization is None:
      return 0
    return 2 * self.num_layers * self.num_kv_heads * SCALE_BYTES

  @property
  def row_bytes(self) -> int:
    """Bytes of one token row: K, V and their scales over all layers."""
    return self.k_row_bytes + self.v_row_bytes + self.scale_row_bytes

  @property
  def page_bytes(self) -> int:
    """Bytes of one page: page_size rows of all layers, K and V."""
    return self.page_size * self.row_bytes

  def stored_head_dim(self, kind: str = "k") -> int:
    """Returns the width one head of `kind` ("k" or "v") takes in the array."""
    width = self.value_dim if kind == "v" else self.head_dim
    return -(-width // self.lane_multiple) * self.lane_multiple

  @property
  def padding_row_bytes(self) -> int:
    """Bytes of one token row that lane padding adds and nothing reads."""
    width = self.stored_head_dim("k") + self.stored_head_dim("v")
    extra = width - self.head_dim - self.value_dim
    return self.num_layers * self.num_kv_heads * extra * self.scalar_bytes

  def shape(self, num_pages: int, kind: str = "k") -> tuple[int, ...]:
    """Returns the array's shape in axis order, for num_pages pages a layer."""
    sizes = {
      "layer": self.num_layers,
      "page": num_pages,
      "kv": 2,
      "head": self.num_kv_heads,
      "row": self.page_size,
      "lane": self.stored_head_dim(kind),
    }
    return tuple(sizes[axis] for axis in self.axis_order)

  def strides(self, num_pages: int, kind: str = "k") -> tuple[int, ...]:
    """Returns the strides in elements, in axis order.

    `stride[a] = product(shape[b] for b > a)`.

    Reference: §0x03E.
    """
    return row_major_strides(self.shape(num_pages, kind))

  def pages_for(self, num_tokens: int) -> int:
    """Returns the pages that num_tokens rows take: ceil(tokens / page_size)."""
    return -(-num_tokens // self.page_size)


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns element strides of a dense array whose last axis is fastest."""
  strides = [1]
  for size in reversed(shape[1:]):
    strides.append(strides[-1] * size)
  return tuple(reversed(strides))


@dataclasses.dataclass(frozen=True)
class CacheLayout:
  """The cache groups of one worker; equal layouts read bytes alike.

  Attributes:
    groups: at least one, with different names and disjoint layers.
  """

  groups: tuple[CacheGroup, ...]

  def __post_init__(self) -> None:
    try:
      groups = tuple(self.groups)
    except TypeError as error:
      raise errors.LayoutError(f"groups={self.groups!r} is no list") from error
    object.__setattr__(self, "groups", groups)
    if not groups:
      raise errors.LayoutError("a cache layout needs at least one cache group")
    for group in groups:
      if not isinstance(group, CacheGroup):
        raise errors.LayoutError(f"{group!r} is not a CacheGroup")
    names = [group.name for group in groups]
    if len(set(names)) != len(names):
      raise errors.LayoutError(f"cache groups share a name: {names}")
    _ = self.layer_groups  # Refuses a layer that two groups name.

  @classmethod
  def uniform(
    cls,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: str = "float32",
    quantization: str | None = None,
  ) -> "CacheLayout":
    """Returns a layout of one group "kv" that holds every layer."""
    group = CacheGroup(
      name="kv",
      num_layers=num_layers,
      num_kv_heads=num_kv_heads,
      head_dim=head_dim,
      page_size=page_size,
      dtype=dtype,
      quantization=quantization,
    )
    return cls(groups=(group,))

  @functools.cached_property
  def layer_groups(self) -> dict[int, tuple[int, int]]:
    """Model layer -> (group index, index of the layer within the group)."""
    named = {layer for group in self.groups for layer in group.layers or ()}
    total = sum(group.num_layers for group in self.groups)
    if sum(len(group.layers or ()) for group in self.groups) != len(named):
      raise errors.LayoutError("a layer is named by two cache groups")
    unnamed = (layer for layer in range(total) if layer not in named)
    owners: dict[int, tuple[int, int]] = {}
    for index, group in enumerate(self.groups):
      layers = group.layers
      if layers is None:
        layers = tuple(next(unnamed, -1) for _ in range(group.num_layers))
      for local, layer in enumerate(layers):
        owners[layer] = (index, local)
    if sorted(owners) != list(range(total)):
      raise errors.LayoutError(
        f"cache groups hold layers {sorted(owners)}, not every one of"
        f" 0..{total - 1}"
      )
    return owners

  @property
  def num_layers(self) -> int:
    """Layers over all groups."""
    return sum(group.num_layers for group in self.groups)

  @property
  def row_bytes(self) -> int:
    """Bytes of one token row over all groups."""
    return sum(group.row_bytes for group in self.groups)

  @functools.cached_property
  def bundle_tokens(self) -> int:
    """Rows of the least unit that whole pages of every group can hold."""
    return math.lcm(*(group.page_size for group in self.groups))

  @property
  def bundle_bytes(self) -> int:
    """Bytes of bundle_tokens rows over all groups."""
    return self.bundle_tokens * self.row_bytes

  @property
  def bundle_pages(self) -> tuple[int, ...]:
    """Pages of each group in one bundle."""
    return tuple(self.bundle_tokens // group.page_size for group in self.groups)

  def pages_for(self, num_tokens: int) -> tuple[int, ...]:
    """Returns the pages of each group that num_tokens rows take."""
    return tuple(group.pages_for(num_tokens) for group in self.groups)

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 over everything that decides how bytes are read."""
    manifest = {
      "schema_version": SCHEMA_VERSION,
      "groups": [dataclasses.asdict(group) for group in self.groups],
    }
    return canonical_digest(manifest)


def canonical_digest(record: object) -> str:
  """Returns the SHA-256 of a record's one JSON spelling, in hexadecimal."""
  text = json.dumps(record, sort_keys=True, separators=(",", ":"))
  return hashlib.sha256(text.encode()).hexdigest()


def _check_positive(group: CacheGroup, field: str) -> None:
  """Refuses a field below one, and makes it an int, as digests want it."""
  name = f"{field} of group {group.name!r}"
  value = arguments.whole(
    name, getattr(group, field), 1, None, errors.LayoutError
  )
  object.__setattr__(group, field, value)
