"""Byte ledgers: exact integers that say what they count, and reconcile.

Three views of the same requests, which never stand in for one another:

    rectangular   reserved   = logical + slack
    references    capacity   = logical + tail          every table counted
    unique pages  capacity   = materialized + tail     shared pages once
    pool          total      = live + evictable + reserved + free

Sharing saves twice, on different lines: payload (logical - materialized) and
capacity (reference capacity - unique capacity).

Reference: §0x02, §0x0D.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

from host_allocator import arguments
from host_allocator import errors
from host_allocator import layout as layout_lib


class Finding(NamedTuple):
  """One contradiction."""

  reason: str
  message: str


@dataclasses.dataclass(frozen=True)
class RequestPages:
  """What one request has in one cache group.

  Attributes:
    num_tokens: rows the request can read.
    pages: page ids in token order.
    reserved_tokens: rows a contiguous allocator would have set aside for it;
      None where nobody asks.
  """

  num_tokens: int
  pages: tuple[int, ...]
  reserved_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class PoolPages:
  """One pool at one moment, its pages counted by state.

  Attributes:
    total: pages that can be allocated.
    live: pages with a reference.
    evictable: pages without, whose rows an index still knows.
    reserved: pages of the open step.
    free: the others.
    valid_rows: page id -> rows written, for every page a request names.
  """

  total: int
  live: int
  evictable: int
  reserved: int
  free: int
  valid_rows: Mapping[int, int]


@dataclasses.dataclass(frozen=True)
class GroupLedger:
  """The bytes of one cache group, or of all of them added up.

  Attributes:
    logical_bytes: rows of every request, shared ones once per request.
    reserved_bytes: what contiguous reservations would hold, or None.
    page_references: entries of all page tables.
    reference_capacity_bytes: those entries as if each had its own page.
    unique_pages: different pages among them.
    materialized_bytes: rows written in those pages.
    capacity_bytes: all rows of those pages.
    pool_bytes: all pages; live, evictable, held by a step, free below.
  """

  logical_bytes: int
  reserved_bytes: int | None
  page_references: int
  reference_capacity_bytes: int
  reference_tail_bytes: int
  unique_pages: int
  materialized_bytes: int
  capacity_bytes: int
  tail_bytes: int
  pool_bytes: int
  live_bytes: int
  evictable_bytes: int
  step_bytes: int
  free_bytes: int

  @property
  def slack_bytes(self) -> int | None:
    """Reserved by contiguous allocation and not used by a row."""
    if self.reserved_bytes is None:
      return None
    return self.reserved_bytes - self.logical_bytes

  @property
  def deduplicated_bytes(self) -> int:
    """Payload that sharing saved: rows read by more than one request."""
    return self.logical_bytes - self.materialized_bytes

  @property
  def avoided_capacity_bytes(self) -> int:
    """Pages that sharing saved."""
    return self.reference_capacity_bytes - self.capacity_bytes

  @property
  def idle_bytes(self) -> int:
    """Pages that no request reads and no step holds."""
    return self.pool_bytes - self.live_bytes - self.step_bytes


@dataclasses.dataclass(frozen=True)
class Ledger:
  """A ledger for each cache group, in layout order."""

  layout: layout_lib.CacheLayout
  groups: tuple[GroupLedger, ...]

  @property
  def total(self) -> GroupLedger:
    """All groups together."""
    sums: dict[str, int | None] = {}
    for field in dataclasses.fields(GroupLedger):
      values = [getattr(group, field.name) for group in self.groups]
      sums[field.name] = None if None in values else sum(values)
    return GroupLedger(**sums)  # pyrefly: ignore[bad-argument-type]


def measure(
  layout: layout_lib.CacheLayout,
  requests: Sequence[Sequence[RequestPages]],
  pools: Sequence[PoolPages],
) -> Ledger:
  """Counts the bytes of requests and pools.

  Args:
    layout: the cache groups.
    requests: for each group, its requests.
    pools: for each group, its pool.

  Returns:
    A reconciled ledger.

  Raises:
    Unreconciled: the counts contradict each other; the first contradiction
      that `verify_snapshot` finds.

  Reference: §0x02B to §0x02D.
  """
  findings = verify_snapshot(layout, requests, pools)
  if findings:
    raise errors.Unreconciled(*findings[0])
  groups = tuple(
    _measure_group(group, views, pool)
    for group, views, pool in zip(layout.groups, requests, pools, strict=True)
  )
  return Ledger(layout=layout, groups=groups)


def _measure_group(
  group: layout_lib.CacheGroup,
  requests: Sequence[RequestPages],
  pool: PoolPages,
) -> GroupLedger:
  row, page = group.row_bytes, group.page_bytes
  logical = sum(request.num_tokens for request in requests) * row
  references = sum(len(request.pages) for request in requests)
  unique = {name for request in requests for name in request.pages}
  materialized = sum(pool.valid_rows[name] for name in unique) * row
  reserved = [request.reserved_tokens for request in requests]
  return GroupLedger(
    logical_bytes=logical,
    reserved_bytes=(
      None
      if None in reserved
      else sum(tokens or 0 for tokens in reserved) * row
    ),
    page_references=references,
    reference_capacity_bytes=references * page,
    reference_tail_bytes=references * page - logical,
    unique_pages=len(unique),
    materialized_bytes=materialized,
    capacity_bytes=len(unique) * page,
    tail_bytes=len(unique) * page - materialized,
    pool_bytes=pool.total * page,
    live_bytes=pool.live * page,
    evictable_bytes=pool.evictable * page,
    step_bytes=pool.reserved * page,
    free_bytes=pool.free * page,
  )


def verify_snapshot(
  layout: layout_lib.CacheLayout,
  requests: Sequence[Sequence[RequestPages]],
  pools: Sequence[PoolPages],
) -> tuple[Finding, ...]:
  """Checks counts before they are added up; empty where they agree."""
  count = len(layout.groups)
  if len(requests) != count or len(pools) != count:
    message = f"{len(requests)} request lists, {len(pools)} pools, {count=}"
    return (Finding("group_count", message),)
  for number in _numbers(requests, pools):
    if not arguments.is_whole(number):
      return (Finding("not_a_whole_number", f"{number!r} among the counts"),)
  if len({len(views) for views in requests}) > 1:
    sizes = [len(views) for views in requests]
    return (Finding("half_bundle", f"requests by group: {sizes}"),)
  findings: list[Finding] = []
  for group, views, pool in zip(layout.groups, requests, pools, strict=True):
    findings.extend(_verify_pool(group, pool))
    for request in views:
      findings.extend(_verify_request(group, request, pool))
    named = {name for request in views for name in request.pages}
    if len(named) > pool.live:
      findings.append(
        Finding(
          "live_below_unique",
          f"{len(named)} pages in tables of group {group.name!r} and"
          f" {pool.live} live",
        )
      )
  for same in zip(*requests, strict=True):
    if len({request.num_tokens for request in same}) > 1:
      lengths = [request.num_tokens for request in same]
      findings.append(
        Finding("half_bundle", f"one request's lengths by group: {lengths}")
      )
  return tuple(findings)


def _numbers(
  requests: Sequence[Sequence[RequestPages]], pools: Sequence[PoolPages]
) -> Iterator[object]:
  """Every count and page id of a snapshot."""
  for pool in pools:
    yield from (pool.total, pool.live, pool.evictable, pool.reserved, pool.free)
    yield from (*pool.valid_rows, *pool.valid_rows.values())
  for request in itertools.chain.from_iterable(requests):
    yield from (request.num_tokens, *request.pages)
    if request.reserved_tokens is not None:
      yield request.reserved_tokens


def _verify_pool(
  group: layout_lib.CacheGroup, pool: PoolPages
) -> list[Finding]:
  findings = []
  states = (pool.live, pool.evictable, pool.reserved, pool.free)
  if min(states) < 0:
    findings.append(
      Finding("negative_count", f"pool of group {group.name!r}: {pool}")
    )
  if sum(states) != pool.total:
    findings.append(
      Finding(
        "pool_not_partitioned",
        f"live, evictable, reserved and free of group {group.name!r} are"
        f" {states}, together not the {pool.total} of the pool",
      )
    )
  for page, rows in pool.valid_rows.items():
    if not 0 <= rows <= group.page_size:
      findings.append(
        Finding(
          "valid_rows_out_of_range",
          f"page {page} of group {group.name!r} has {rows} valid rows of"
          f" {group.page_size}",
        )
      )
    if not 1 <= page <= pool.total:
      findings.append(
        Finding(
          "page_out_of_range",
          f"page {page} of group {group.name!r}, which has 1..{pool.total}",
        )
      )
  return findings


def _verify_request(
  group: layout_lib.CacheGroup, request: RequestPages, pool: PoolPages
) -> list[Finding]:
  if request.num_tokens < 0:
    message = f"a request of {request.num_tokens} tokens"
    return [Finding("negative_count", message)]
  findings = []
  reserved = request.reserved_tokens
  if reserved is not None and reserved < request.num_tokens:
    findings.append(
      Finding(
        "reservation_below_rows",
        f"{reserved} rows reserved for {request.num_tokens}",
      )
    )
  needed = group.pages_for(request.num_tokens)
  if len(request.pages) != needed:
    findings.append(
      Finding(
        "table_length",
        f"{len(request.pages)} pages of group {group.name!r} for"
        f" {request.num_tokens} tokens, which take {needed}",
      )
    )
  if len(set(request.pages)) != len(request.pages):
    findings.append(
      Finding("page_named_twice", f"one table names {request.pages}")
    )
  for index, page in enumerate(request.pages):
    if page not in pool.valid_rows:
      findings.append(
        Finding("unknown_page", f"page {page} of group {group.name!r}")
      )
      continue
    rows = min(request.num_tokens - index * group.page_size, group.page_size)
    if pool.valid_rows[page] < rows:
      findings.append(
        Finding(
          "row_not_written",
          f"a request reads {rows} rows of page {page} in group"
          f" {group.name!r}, which has {pool.valid_rows[page]}",
        )
      )
  return findings


def verify(ledger: Ledger) -> tuple[Finding, ...]:
  """Checks every identity of a finished ledger; empty where all hold."""
  if len(ledger.groups) != len(ledger.layout.groups):
    return (Finding("group_count", f"{len(ledger.groups)} group ledgers"),)
  findings: list[Finding] = []
  for group, found in zip(ledger.layout.groups, ledger.groups, strict=True):
    page = group.page_bytes
    identities = {
      "reference_capacity": (
        found.reference_capacity_bytes,
        found.page_references * page,
      ),
      "reference_tail": (
        found.reference_capacity_bytes,
        found.logical_bytes + found.reference_tail_bytes,
      ),
      "unique_capacity": (found.capacity_bytes, found.unique_pages * page),
      "unique_tail": (
        found.capacity_bytes,
        found.materialized_bytes + found.tail_bytes,
      ),
      "pool": (
        found.pool_bytes,
        found.live_bytes
        + found.evictable_bytes
        + found.step_bytes
        + found.free_bytes,
      ),
    }
    findings.extend(
      Finding(
        f"{name}_unreconciled", f"{left} is not {right} in {group.name!r}"
      )
      for name, (left, right) in identities.items()
      if left != right
    )
    findings.extend(_verify_bounds(group, found))
  return tuple(findings)


def _verify_bounds(
  group: layout_lib.CacheGroup, found: GroupLedger
) -> list[Finding]:
  findings = []
  for field in dataclasses.fields(found):
    value = getattr(found, field.name)
    if value is not None and value < 0:
      findings.append(
        Finding("negative_count", f"{field.name} of {group.name!r} is {value}")
      )
  if found.unique_pages > found.page_references:
    findings.append(
      Finding(
        "unique_above_references",
        f"{found.unique_pages} pages from {found.page_references} references",
      )
    )
  if found.capacity_bytes > found.live_bytes:
    findings.append(
      Finding(
        "live_below_unique",
        f"{found.capacity_bytes} bytes in tables, {found.live_bytes} live",
      )
    )
  if found.slack_bytes is not None and found.slack_bytes < 0:
    findings.append(
      Finding("reservation_below_rows", f"slack is {found.slack_bytes} bytes")
    )
  for name in ("logical_bytes", "materialized_bytes"):
    if getattr(found, name) % group.row_bytes:
      findings.append(
        Finding(
          "not_whole_rows",
          f"{name} is {getattr(found, name)}, not a multiple of"
          f" {group.row_bytes}",
        )
      )
  return findings
