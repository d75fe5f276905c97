"""A running allocator's addresses, checked against arrays on the device."""

import ctypes

import jax.numpy as jnp
import numpy as np
import pytest

from host_allocator import address
from host_allocator import allocator as allocators
from host_allocator import errors
from host_allocator import layout
from host_allocator import ledger
from host_allocator import snapshots
from host_allocator import tables
from tests.host_allocator import brute_force

# Pages of 2 and 4 rows; the second group counts tokens before heads.
LAYOUT = layout.CacheLayout(
  (
    layout.CacheGroup("lower", 2, 3, 5, 2, "float32", layers=(0, 2)),
    layout.CacheGroup(
      "upper",
      1,
      2,
      3,
      4,
      "int8",
      v_head_dim=4,
      layers=(1,),
      axis_order=("layer", "page", "row", "head", "lane"),
    ),
  )
)
NUM_PAGES = (12, 6)


class Device:
  """Page arrays whose every scalar says whose row it belongs to."""

  def __init__(self):
    self.histories = brute_force.Histories()
    self.allocator = allocators.KVAllocator(
      LAYOUT, num_pages=NUM_PAGES, max_sequences=4, max_length=24
    )
    self.memories = [
      brute_force.Memory(count, group.page_size)
      for count, group in zip(NUM_PAGES, LAYOUT.groups, strict=True)
    ]

  def compute(self, *sequences):
    allocator = self.allocator
    plan = allocator.plan([(s, s.num_tokens - s.length) for s in sequences])
    shape = tables.StepShape(plan.num_tokens + 1, len(sequences))
    packing = tables.Packing(shape, allocator.table_widths)
    buffer = allocator.pack(plan, packing)
    contents = []
    for sequence in sequences:
      rows = self.histories.of("", sequence.tokens.tolist())
      contents += rows[sequence.length :]
    for group, memory in enumerate(self.memories):
      moves = zip(*(part.tolist() for part in plan.copies[group]), strict=True)
      memory.copy(list(moves))
      slots = packing.field(buffer, "slots", group)[: plan.num_tokens]
      memory.write(slots.tolist(), contents)
    allocator.commit(plan)

  def arrays(self):
    """K and V of each group, filled from the memories, on the device."""
    found = []
    for group, memory in zip(LAYOUT.groups, self.memories, strict=True):
      rows = np.asarray(memory.rows)
      by_kind = {}
      for kind in "kv":
        shape = group.shape(len(rows), kind)
        values = np.empty(shape, group.dtype)
        for index in np.ndindex(*shape):
          at = dict(zip(group.axis_order, index, strict=True))
          values[index] = scalar(rows[at["page"], at["row"]], kind, at)
        by_kind[kind] = jnp.asarray(values)
      found.append(by_kind)
    return found


def scalar(content, kind, at):
  """A small number that depends on every coordinate."""
  mixed = 31 * int(content) + 7 * at["layer"] + 5 * at["head"] + 3 * at["lane"]
  return (mixed + 11 * (kind == "v")) % 127


@pytest.fixture
def device():
  """Shared, copied, truncated and recycled pages behind three sequences."""
  device = Device()
  first = device.allocator.open(list(range(11)))
  device.compute(first)
  second = device.allocator.fork(first)
  device.allocator.append([first, second], [70, 71])
  device.compute(first, second)
  third = device.allocator.open([*range(6), 80, 81])
  assert third.matched_tokens == 6
  device.compute(third)
  device.allocator.truncate(second, 7)
  return device


def test_every_visible_scalar_is_the_byte_that_is_named(device):
  arrays = device.arrays()
  bases = [
    {kind: array.unsafe_buffer_pointer() for kind, array in by_kind.items()}
    for by_kind in arrays
  ]
  views = [
    {kind: np.asarray(array) for kind, array in by_kind.items()}
    for by_kind in arrays
  ]
  snapshot = snapshots.addresses_of(device.allocator, bases)
  assert address.verify(snapshot) == ()
  layers = {0: (0, 0), 2: (0, 1), 1: (1, 0)}
  for sequence in device.allocator.rows.open_sequences():
    contents = device.histories.of("", sequence.tokens.tolist())
    for token in range(sequence.length):
      for layer, (index, local) in layers.items():
        group = LAYOUT.groups[index]
        page = int(sequence.pages(index)[token // group.page_size])
        for kind, width in (("k", group.head_dim), ("v", group.value_dim)):
          at = {
            "layer": local,
            "page": page,
            "row": token % group.page_size,
            "head": token % group.num_kv_heads,
            "lane": token % width,
          }
          found = address.translate(
            snapshot,
            str(sequence.row),
            token=token,
            layer=layer,
            kind=kind,
            head=at["head"],
            lane=at["lane"],
          )
          array = views[index][kind]
          start, _ = array.__array_interface__["data"]
          offsets = zip(group.axis_order, array.strides, strict=True)
          expected = start + sum(at[axis] * step for axis, step in offsets)
          assert found.address == expected
          held = ctypes.string_at(found.address, array.itemsize)
          value = np.frombuffer(held, array.dtype)[0]
          assert value == scalar(contents[token], kind, at)


def test_a_table_of_recycled_pages_is_refused(device):
  bases = [{"k": 0, "v": 2**20}, {"k": 2**21, "v": 2**22}]
  before = snapshots.addresses_of(device.allocator, bases)
  victim = device.allocator.rows.open_sequences()[0]
  for sequence in device.allocator.rows.open_sequences():
    device.allocator.close(sequence)
  device.compute(device.allocator.open(list(range(200, 224))))
  after = snapshots.addresses_of(device.allocator, bases)
  assert not victim.is_open
  mixed = address.AddressSnapshot(LAYOUT, after.pools, before.requests)
  with pytest.raises(errors.StaleHandle, match="generation"):
    address.translate(mixed, "0", token=0, layer=0, kind="k", head=0, lane=0)


def test_the_ledger_of_shared_pages_reconciles(device):
  found = snapshots.ledger_of(device.allocator)
  assert ledger.verify(found) == ()
  lengths = [s.length for s in device.allocator.rows.open_sequences()]
  assert lengths == [12, 7, 8]
  assert found.total.logical_bytes == 27 * LAYOUT.row_bytes
  for group, part in enumerate(found.groups):
    pages = {
      int(page)
      for sequence in device.allocator.rows.open_sequences()
      for page in sequence.pages(group)
    }
    assert part.unique_pages == len(pages)
    assert part.page_references == sum(
      -(-length // LAYOUT.groups[group].page_size) for length in lengths
    )
    assert part.live_bytes == part.capacity_bytes


def test_a_ledger_inside_a_step_counts_what_the_step_holds(device):
  sequence = device.allocator.open([300, 301, 302])
  plan = device.allocator.plan([(sequence, 3)])
  found = snapshots.ledger_of(device.allocator)
  assert ledger.verify(found) == ()
  expected = [
    pages * group.page_bytes
    for pages, group in zip((2, 1), LAYOUT.groups, strict=True)
  ]
  assert [part.step_bytes for part in found.groups] == expected
  device.allocator.abort(plan)
