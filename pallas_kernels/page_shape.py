"""How token rows lie in the physical array of a page pool.

In meaning a page is `[kv_heads, page_size, head_dim]`, row-major.  The array
that holds it is `[num_pages, kv_heads, page_size // fold, lane]`: the same
bytes, except where a narrow head is padded to a full lane row.

    head_dim 128            head_dim 64 on TPU         head_dim 96 on TPU
    lane 128, fold 1        lane 128, fold 2           lane 128, fold 1
    | row 0           |     | row 0   | row 1   |      | row 0      |pad|
    | row 1           |     | row 2   | row 3   |      | row 1      |pad|
"""

import dataclasses
import numbers

import jax

from pallas_kernels import errors

TPU_LANE = 128
SCALE_LANE = 128


def round_up(value: int, multiple: int) -> int:
  """The least multiple of `multiple` that is at least `value`."""
  return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class PageGeometry:
  """The shape of one page and of the rows in it.

  Attributes:
    kv_heads: KV heads of a page.
    page_size: token rows of a page.
    head_dim: elements of one row of one head that mean something.
    lane: width of the physical array's last axis, in elements.
    fold: token rows that share a lane row.
  """

  kv_heads: int
  page_size: int
  head_dim: int
  lane: int
  fold: int = 1

  @property
  def stored_dim(self) -> int:
    """Elements that one row of one head takes, padding included."""
    return self.lane // self.fold

  @property
  def shape(self) -> tuple[int, int, int]:
    """The physical shape of one page."""
    return (self.kv_heads, self.page_size // self.fold, self.lane)


def page_geometry(
  kv_heads: int, page_size: int, head_dim: int, *, platform: str
) -> PageGeometry:
  """Chooses how pages of a cache group lie on a platform.

  Args:
    kv_heads: KV heads of the group.
    page_size: token rows of a page.
    head_dim: elements of one row of one head.
    platform: "cpu", "gpu" or "tpu".

  Returns:
    The geometry; its `.shape` is one page of the array.

  Raises:
    KernelArgumentError: a size is not positive, or an odd page of 64-wide
      heads is asked of a TPU, where two rows share a lane row.
  """
  sizes = {"kv_heads": kv_heads, "page_size": page_size, "head_dim": head_dim}
  for name, value in sizes.items():
    if value < 1:
      raise errors.KernelArgumentError(f"{name}={value}, expected at least 1")
  if platform != "tpu":
    return PageGeometry(kv_heads, page_size, head_dim, head_dim)
  if head_dim == 64:
    if page_size % 2:
      raise errors.KernelArgumentError(
        f"{page_size=} with head_dim=64 on a TPU, expected an even page size:"
        " two rows share a lane row"
      )
    return PageGeometry(kv_heads, page_size, head_dim, TPU_LANE, fold=2)
  lane = round_up(head_dim, TPU_LANE)
  return PageGeometry(kv_heads, page_size, head_dim, lane)


def page_shape(
  kv_heads: int, page_size: int, head_dim: int, *, platform: str
) -> tuple[int, int, int]:
  """The physical shape of one page; a pool is `[num_pages, *page_shape]`.

  Args and raises as `page_geometry`.

  >>> page_shape(3, 16, 64, platform="cpu")
  (3, 16, 64)
  >>> page_shape(3, 16, 64, platform="tpu")
  (3, 8, 128)
  >>> page_shape(8, 16, 80, platform="tpu")
  (8, 16, 128)
  """
  return page_geometry(kv_heads, page_size, head_dim, platform=platform).shape


def scales_shape(kv_heads: int, page_size: int) -> tuple[int, int]:
  """The shape of one quantised page's float32 scales.

  The scale of head h and row r is element `[0, h * page_size + r]`.

  >>> scales_shape(3, 16)
  (1, 128)
  """
  return (1, round_up(kv_heads * page_size, SCALE_LANE))


def geometry_of(
  name: str, pages: jax.Array | jax.ShapeDtypeStruct, head_dim: int
) -> PageGeometry:
  """Reads the geometry back from a pool's array.

  Args:
    name: the argument's name, for errors.
    pages: `[num_pages, kv_heads, page_size // fold, lane]`.
    head_dim: elements of one row of one head.

  Raises:
    KernelArgumentError: no layout has that shape at that head_dim.
  """
  if len(pages.shape) != 4 or 0 in pages.shape:
    raise errors.KernelArgumentError(
      f"{name} has shape {pages.shape}, expected"
      " [num_pages, kv_heads, page_size, head_dim], each 1 or more"
    )
  if not isinstance(head_dim, numbers.Integral):
    raise errors.KernelArgumentError(
      f"{name} of {head_dim=}, expected an integer"
    )
  _, kv_heads, rows, lane = pages.shape
  if lane == head_dim:
    return PageGeometry(kv_heads, rows, head_dim, lane)
  if head_dim == 64 and lane == TPU_LANE:
    return PageGeometry(kv_heads, rows * 2, head_dim, lane, fold=2)
  if lane == round_up(head_dim, TPU_LANE):
    return PageGeometry(kv_heads, rows, head_dim, lane)
  raise errors.KernelArgumentError(
    f"{name} has shape {pages.shape}, whose last axis is {lane}; expected"
    f" head_dim={head_dim}, or on a TPU a multiple of {TPU_LANE} that holds it"
  )
