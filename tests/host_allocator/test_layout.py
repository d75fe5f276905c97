"""Layouts: sizes over unequal groups, digests, and bytes of real arrays."""

import ctypes
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from host_allocator import address
from host_allocator import errors
from host_allocator import layout

TOKEN_MAJOR = ("layer", "page", "row", "head", "lane")
INTERLEAVED = ("layer", "page", "kv", "head", "row", "lane")


def group(name="kv", **changes):
  fields = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 8, "page_size": 4}
  return layout.CacheGroup(name, **{**fields, **changes})


def test_unequal_pages_meet_at_the_least_common_multiple():
  both = layout.CacheLayout(
    (
      group("a", page_size=16, num_layers=3, layers=(0, 2, 3)),
      group("b", page_size=24, dtype="bfloat16", layers=(1, 4)),
    )
  )
  assert both.bundle_tokens == 48
  assert both.bundle_pages == (3, 2)
  assert both.pages_for(0) == (0, 0)
  assert both.pages_for(17) == (2, 1)
  assert both.pages_for(48) == (3, 2)
  assert both.pages_for(49) == (4, 3)
  assert both.row_bytes == 3 * 3 * 16 * 4 + 2 * 3 * 16 * 2
  assert both.bundle_bytes == 48 * both.row_bytes
  assert both.layer_groups == {0: (0, 0), 2: (0, 1), 3: (0, 2)} | {
    1: (1, 0),
    4: (1, 1),
  }


def test_unnamed_groups_take_the_layers_left_over_in_order():
  both = layout.CacheLayout((group("a"), group("b", layers=(1, 3))))
  assert both.layer_groups[0] == (0, 0)
  assert both.layer_groups[2] == (0, 1)
  assert both.layer_groups[3] == (1, 1)


def test_quantized_rows_count_their_scales():
  plain = group(dtype="bfloat16", v_head_dim=4)
  small = dataclasses.replace(plain, quantization="int8")
  assert plain.row_bytes == 2 * 3 * (8 + 4) * 2
  assert small.row_bytes == 2 * 3 * (8 + 4) + 2 * 3 * 2 * 4
  assert dataclasses.replace(plain, quantization="fp8").scalar_bytes == 1


def test_padded_lanes_are_stored_and_counted_apart():
  padded = group(head_dim=80, lane_multiple=128, dtype="float16")
  assert padded.stored_head_dim() == 128
  assert padded.row_bytes == 2 * 3 * 160 * 2
  assert padded.padding_row_bytes == 2 * 3 * 96 * 2
  assert padded.shape(7) == (2, 7, 3, 4, 128)


@pytest.mark.parametrize(
  "change",
  [
    {"name": "other"},
    {"num_layers": 1},
    {"num_kv_heads": 1},
    {"head_dim": 4},
    {"v_head_dim": 4},
    {"page_size": 8},
    {"dtype": "float16"},
    {"quantization": "int8"},
    {"axis_order": TOKEN_MAJOR},
    {"lane_multiple": 16},
    {"layers": (1, 0)},
  ],
)
def test_whatever_changes_the_reading_of_bytes_changes_the_digest(change):
  first = layout.CacheLayout((group(),))
  second = layout.CacheLayout((dataclasses.replace(group(), **change),))
  assert first.digest != second.digest
  assert first.digest == layout.CacheLayout((group(),)).digest


def test_uniform_is_one_group_of_all_layers():
  uniform = layout.CacheLayout.uniform(
    num_layers=2, num_kv_heads=3, head_dim=8, page_size=4
  )
  assert uniform == layout.CacheLayout((group(),))


@pytest.mark.parametrize(
  "groups",
  [
    (),
    (group("a"), group("a")),
    (group("a", layers=(0, 1)), group("b", layers=(1, 2))),
    (group("a", layers=(0, 1)), group("b", layers=(3, 4))),
    (group("a", layers=(0, 9)),),
  ],
)
def test_groups_that_do_not_fit_together_are_refused(groups):
  with pytest.raises(errors.LayoutError):
    layout.CacheLayout(groups)


def device_arrays(group_, num_slots):
  """Distinct numbers in arrays shaped as the group says, on the device."""
  kinds = ("kv",) if "kv" in group_.axis_order else ("k", "v")
  arrays = {}
  for number, kind in enumerate(kinds):
    shape = group_.shape(num_slots, kind[0])
    size = int(np.prod(shape))
    values = np.arange(size, dtype=np.int64) + number * size
    arrays[kind] = jnp.asarray(
      values.reshape(shape).astype(np.dtype(group_.dtype))
    )
  return arrays


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"axis_order": TOKEN_MAJOR, "dtype": "float16", "v_head_dim": 5},
    {"axis_order": INTERLEAVED},
    {"head_dim": 6, "lane_multiple": 8},
    {"axis_order": ("page", "layer", "lane", "row", "head")},
  ],
)
def test_the_named_byte_is_the_byte_of_the_device_array(changes):
  kv = group(**changes)
  slots = 5
  arrays = device_arrays(kv, slots)
  views = {kind: np.asarray(array) for kind, array in arrays.items()}
  bases = {
    kind: array.unsafe_buffer_pointer() for kind, array in arrays.items()
  }
  pool = address.PoolSnapshot(
    slots,
    bases,
    {1: address.PageRecord(3, 4, 4), 2: address.PageRecord(1, 2, 3)},
  )
  view = address.RequestSnapshot(
    7, ((address.TableEntry(1, 3), address.TableEntry(2, 1)),)
  )
  snapshot = address.AddressSnapshot(
    layout.CacheLayout((kv,)), (pool,), {"r": view}
  )
  assert not address.verify(snapshot)
  for token, layer, kind, head, lane in [
    (0, 0, "k", 0, 0),
    (3, 1, "v", 2, 4),
    (4, 0, "v", 1, 1),
    (6, 1, "k", 2, 5),
  ]:
    found = address.translate(
      snapshot, "r", token=token, layer=layer, kind=kind, head=head, lane=lane
    )
    array = views["kv" if "kv" in views else kind]
    spot = {
      "layer": layer,
      "page": (4, 2)[token // 4],
      "kv": "kv".index(kind),
      "head": head,
      "row": token % 4,
      "lane": lane,
    }
    index = tuple(spot[axis] for axis in kv.axis_order)
    start, _ = array.__array_interface__["data"]
    steps = zip(index, array.strides, strict=True)
    assert found.address == start + sum(i * step for i, step in steps)
    held = ctypes.string_at(found.address, array.itemsize)
    assert held == array[index].tobytes()
