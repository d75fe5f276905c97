"""From a logical K/V coordinate to the byte that holds it.

    (request, token, layer, k or v, head, lane)
      -> cache group          which layers share the page's meaning
      -> page, generation     the request's table, at a version
      -> physical slot        where the pool keeps that page now
      -> element, byte        the group's declared axes and strides

A slot id names a token row of a pool; it is no address. Checks run in the
order that keeps other requests' rows unseen: request length, table bounds,
page generation, valid rows.

Reference: §0x03.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from collections.abc import Mapping
from typing import NamedTuple

from host_allocator import arguments
from host_allocator import errors
from host_allocator import layout as layout_lib


class TableEntry(NamedTuple):
  """A page as a table names it."""

  page: int
  generation: int


@dataclasses.dataclass(frozen=True)
class PageRecord:
  """A page as its pool knows it.

  Attributes:
    generation: raised whenever the page is given to new rows.
    slot: the page's place along the array's page axis.
    valid_rows: rows written, from the first.
  """

  generation: int
  slot: int
  valid_rows: int


@dataclasses.dataclass(frozen=True)
class PoolSnapshot:
  """The pages of one cache group, and where its arrays begin.

  Attributes:
    num_slots: length of the page axis.
    bases: byte address of the "k" and "v" array, or of the one "kv" array.
    pages: page id -> record, for every page a table may name.
  """

  num_slots: int
  bases: Mapping[str, int]
  pages: Mapping[int, PageRecord]


@dataclasses.dataclass(frozen=True)
class RequestSnapshot:
  """One request's view: its length and a page table per cache group."""

  context_length: int
  tables: tuple[tuple[TableEntry, ...], ...]
  table_version: int = 0


@dataclasses.dataclass(frozen=True)
class AddressSnapshot:
  """Everything an address depends on, frozen at one moment."""

  layout: layout_lib.CacheLayout
  pools: tuple[PoolSnapshot, ...]
  requests: Mapping[str, RequestSnapshot]


class Address(NamedTuple):
  """Where one scalar lies.

  Attributes:
    group: index of the cache group.
    layer: index of the layer within the group.
    logical_page: index into the request's table.
    row: row within the page.
    page: page id.
    generation: the page's generation.
    slot: the page's place in the array.
    slot_id: `slot * page_size + row`, a row of the pool.
    element: offset into the array in scalars.
    byte: offset into the array in bytes.
    address: byte address.
  """

  group: int
  layer: int
  logical_page: int
  row: int
  page: int
  generation: int
  slot: int
  slot_id: int
  element: int
  byte: int
  address: int


def translate(
  snapshot: AddressSnapshot,
  request: str,
  *,
  token: int,
  layer: int,
  kind: str,
  head: int,
  lane: int,
) -> Address:
  """Finds the byte of one K or V scalar as `request` may read it.

  `address = base + scalar_bytes * sum(coordinate[a] * stride[a])`

  Args:
    snapshot: layout, pools and requests of one moment.
    request: key into `snapshot.requests`.
    token: position in the request, from 0.
    layer: layer of this worker, over all groups.
    kind: "k" or "v".
    head: K/V head of this worker.
    lane: scalar within the head.

  Returns:
    The address and every step to it.

  Raises:
    AddressError: reasons, in the order checked: unknown_request,
      token_not_visible, unknown_layer, table_too_short, (StaleHandle),
      row_not_written, unknown_kind, head_out_of_range, lane_out_of_range.
    StaleHandle: the table names a page, or a generation of it, that the
      pool does not hold.

  Reference: §0x03I.
  """
  view = _view(snapshot, request)
  token = _visible(request, view, token)
  index, layer_local = _owner(snapshot.layout, layer)
  group, pool = snapshot.layout.groups[index], snapshot.pools[index]
  logical_page, row = divmod(token, group.page_size)
  entry, record = _resolve(view, pool, index, logical_page, group.name)
  if row >= record.valid_rows:
    raise errors.AddressError(
      "row_not_written",
      f"row {row} of page {entry.page} in group {group.name!r}, which has"
      f" {record.valid_rows} valid rows",
    )
  base, width = _array(group, pool, kind)
  head = _within("head", head, group.num_kv_heads)
  lane = _within("lane", lane, width)
  coordinate = {
    "layer": layer_local,
    "page": record.slot,
    "kv": ("k", "v").index(kind),
    "head": head,
    "row": row,
    "lane": lane,
  }
  strides = group.strides(pool.num_slots, kind)
  axes = zip(group.axis_order, strides, strict=True)
  element = sum(coordinate[axis] * stride for axis, stride in axes)
  byte = element * group.scalar_bytes
  return Address(
    group=index,
    layer=layer_local,
    logical_page=logical_page,
    row=row,
    page=entry.page,
    generation=entry.generation,
    slot=record.slot,
    slot_id=record.slot * group.page_size + row,
    element=element,
    byte=byte,
    address=base + byte,
  )


def _view(snapshot: AddressSnapshot, request: str) -> RequestSnapshot:
  known = isinstance(request, str) and request in snapshot.requests
  if not known:
    raise errors.AddressError("unknown_request", f"no request {request!r}")
  return snapshot.requests[request]


def _visible(request: str, view: RequestSnapshot, token: int) -> int:
  token = _whole("token_not_visible", "token", token)
  if not 0 <= token < view.context_length:
    raise errors.AddressError(
      "token_not_visible",
      f"token {token} of request {request!r}, which has"
      f" {view.context_length} tokens",
    )
  return token


def _owner(layout: layout_lib.CacheLayout, layer: int) -> tuple[int, int]:
  layer = _whole("unknown_layer", "layer", layer)
  owner = layout.layer_groups.get(layer)
  if owner is None:
    raise errors.AddressError(
      "unknown_layer", f"layer {layer}, of {layout.num_layers} layers"
    )
  return owner


def _resolve(
  view: RequestSnapshot,
  pool: PoolSnapshot,
  index: int,
  logical_page: int,
  group_name: str,
) -> tuple[TableEntry, PageRecord]:
  table = view.tables[index]
  if logical_page >= len(table):
    raise errors.AddressError(
      "table_too_short",
      f"page {logical_page} of a table of {len(table)} in group {group_name!r}",
    )
  entry = table[logical_page]
  record = pool.pages.get(entry.page)
  if record is None or record.generation != entry.generation:
    held = "nothing" if record is None else f"generation {record.generation}"
    raise errors.StaleHandle(
      f"page {entry.page} at generation {entry.generation} in group"
      f" {group_name!r}, where the pool holds {held}"
    )
  return entry, record


def _array(
  group: layout_lib.CacheGroup, pool: PoolSnapshot, kind: str
) -> tuple[int, int]:
  if not isinstance(kind, str) or kind not in ("k", "v"):
    raise errors.AddressError("unknown_kind", f"kind {kind!r}, not 'k' or 'v'")
  width = group.value_dim if kind == "v" else group.head_dim
  return pool.bases["kv" if "kv" in group.axis_order else kind], width


def _whole(reason: str, name: str, value: int) -> int:
  refusal = functools.partial(errors.AddressError, reason)
  return arguments.whole(name, value, refusal=refusal)


def _within(name: str, value: int, limit: int) -> int:
  value = _whole(f"{name}_out_of_range", name, value)
  if not 0 <= value < limit:
    raise errors.AddressError(
      f"{name}_out_of_range", f"{name} {value} of {limit}"
    )
  return value


class Finding(NamedTuple):
  """Something that is wrong with a snapshot."""

  reason: str
  message: str


def verify(snapshot: AddressSnapshot) -> tuple[Finding, ...]:
  """Checks a whole snapshot; empty where every address in it is sound."""
  findings = list(_verify_pools(snapshot))
  if findings:
    return tuple(findings)
  for name, view in snapshot.requests.items():
    findings.extend(_verify_request(snapshot, name, view))
  return tuple(findings)


def verify_successor(
  predecessor: AddressSnapshot, successor: AddressSnapshot
) -> tuple[Finding, ...]:
  """Checks that whatever changed between two snapshots says so.

  A request whose table or length changed has a higher table version, a page
  given away has a higher generation, and nothing else went backwards.

  Reference: §0x03H.
  """
  findings = list(verify(successor))
  for name, old in predecessor.requests.items():
    new = successor.requests.get(name)
    if new is None:
      continue
    changed = (new.tables, new.context_length) != (
      old.tables,
      old.context_length,
    )
    if new.table_version < old.table_version + changed:
      findings.append(
        Finding(
          "stale_table_version",
          f"request {name!r} at table version {new.table_version} after"
          f" {old.table_version}",
        )
      )
  for old_pool, new_pool in zip(
    predecessor.pools, successor.pools, strict=True
  ):
    findings.extend(
      Finding(
        "generation_went_back",
        f"page {page} at generation {new_pool.pages[page].generation} after"
        f" {record.generation}",
      )
      for page, record in old_pool.pages.items()
      if page in new_pool.pages
      and new_pool.pages[page].generation < record.generation
    )
  return tuple(findings)


def extents(
  snapshot: AddressSnapshot,
) -> tuple[tuple[int, int, str], ...]:
  """Returns (first byte, end, name) of every array, by address."""
  found = []
  for group, pool in zip(snapshot.layout.groups, snapshot.pools, strict=True):
    for kind, base in pool.bases.items():
      shape = group.shape(pool.num_slots, kind)
      size = math.prod(shape) * group.scalar_bytes
      found.append((base, base + size, f"{group.name}.{kind}"))
  return tuple(sorted(found))


def _verify_pools(snapshot: AddressSnapshot) -> Iterator[Finding]:
  layout = snapshot.layout
  if len(snapshot.pools) != len(layout.groups):
    yield Finding(
      "pool_count",
      f"{len(snapshot.pools)} pools for {len(layout.groups)} groups",
    )
    return
  for group, pool in zip(layout.groups, snapshot.pools, strict=True):
    expected = {"kv"} if "kv" in group.axis_order else {"k", "v"}
    if set(pool.bases) != expected:
      yield Finding(
        "missing_base",
        f"group {group.name!r} has bases {sorted(pool.bases)}, not"
        f" {sorted(expected)}",
      )
    yield from _verify_pages(group, pool)
  spans = extents(snapshot)
  for (_, end, left), (start, _, right) in itertools.pairwise(spans):
    if start < end:
      yield Finding("overlapping_arrays", f"{right} begins inside {left}")


def _verify_pages(
  group: layout_lib.CacheGroup, pool: PoolSnapshot
) -> Iterator[Finding]:
  owners: dict[int, int] = {}
  for page, record in pool.pages.items():
    if not 0 <= record.slot < pool.num_slots:
      yield Finding(
        "slot_out_of_range",
        f"page {page} of group {group.name!r} in slot {record.slot} of"
        f" {pool.num_slots}",
      )
    if record.slot in owners:
      yield Finding(
        "slot_used_twice",
        f"pages {owners[record.slot]} and {page} of group {group.name!r} in"
        f" slot {record.slot}",
      )
    owners[record.slot] = page
    if not 0 <= record.valid_rows <= group.page_size:
      yield Finding(
        "invalid_tail",
        f"page {page} of group {group.name!r} has {record.valid_rows} valid"
        f" rows of {group.page_size}",
      )


def _verify_request(
  snapshot: AddressSnapshot, name: str, view: RequestSnapshot
) -> Iterator[Finding]:
  layout = snapshot.layout
  if len(view.tables) != len(layout.groups):
    yield Finding(
      "table_count",
      f"request {name!r} has {len(view.tables)} tables for"
      f" {len(layout.groups)} groups",
    )
    return
  for index, group in enumerate(layout.groups):
    table, pool = view.tables[index], snapshot.pools[index]
    needed = group.pages_for(view.context_length)
    if len(table) != needed:
      yield Finding(
        "table_length",
        f"request {name!r} has {len(table)} pages in group {group.name!r},"
        f" not the {needed} of {view.context_length} tokens",
      )
      continue
    for logical_page in range(len(table)):
      try:
        entry, record = _resolve(view, pool, index, logical_page, group.name)
      except errors.StaleHandle as error:
        yield Finding(error.reason, f"request {name!r}: {error}")
        continue
      rows = view.context_length - logical_page * group.page_size
      if record.valid_rows < min(rows, group.page_size):
        yield Finding(
          "row_not_written",
          f"request {name!r} sees {min(rows, group.page_size)} rows of page"
          f" {entry.page} in group {group.name!r}, which has"
          f" {record.valid_rows}",
        )
