"""A running allocator as the records that ledgers and addresses are made of.

Snapshots copy what they need, so they stay as they are while the allocator
goes on; take them between steps.
"""

from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np

from host_allocator import address
from host_allocator import errors
from host_allocator import holding
from host_allocator import ledger
from host_allocator import metadata
from host_allocator import sequences
from host_allocator import state as state_lib


def ledger_of(
  state: state_lib.State,
  reserved_tokens: Mapping[sequences.Sequence, int] | None = None,
) -> ledger.Ledger:
  """Counts the bytes of an allocator's open sequences and pools.

  Args:
    state: the allocator.
    reserved_tokens: rows that a contiguous allocator would set aside for each
      open sequence; None leaves that view out.

  Raises:
    Unreconciled: the allocator's counts contradict each other, or an open
      sequence has no reservation among those given.

  Reference: §0x02, §0x0D.
  """
  with state.lock:
    opened = state.rows.open_sequences()
    if reserved_tokens is not None:
      _check_reserved(opened, reserved_tokens)
    requests = tuple(
      tuple(
        ledger.RequestPages(
          num_tokens=int(state.rows.present[sequence.row]),
          pages=tuple(state.rows.pages(sequence.row, group).tolist()),
          reserved_tokens=(
            None if reserved_tokens is None else reserved_tokens[sequence]
          ),
        )
        for sequence in opened
      )
      for group in range(len(state.pools))
    )
    pools = tuple(
      ledger.PoolPages(
        total=usage.total,
        live=usage.live,
        evictable=usage.evictable,
        reserved=usage.reserved,
        free=usage.free,
        valid_rows=_named_rows(state, group, requests[group]),
      )
      for group, usage in enumerate(pool.usage() for pool in state.pools)
    )
  return ledger.measure(state.layout, requests, pools)


def _check_reserved(
  opened: Sequence[sequences.Sequence],
  reserved_tokens: Mapping[sequences.Sequence, int],
) -> None:
  lacking = [each for each in opened if each not in reserved_tokens]
  if lacking:
    raise errors.Unreconciled(
      "reservation_missing", f"nothing is reserved for {lacking[0]!r}"
    )


def _named_rows(
  state: state_lib.State, group: int, views: Sequence[ledger.RequestPages]
) -> dict[int, int]:
  valid = holding.valid_rows(state, group)
  return {page: int(valid[page]) for view in views for page in view.pages}


def record_counts(
  state: state_lib.State, group: int = 0
) -> metadata.RecordCounts:
  """Counts the bookkeeping records of one cache group.

  A hash entry is a whole page that an index knows.

  Reference: §0x02E.
  """
  with state.lock:
    pool = state.pools[group]
    valid = holding.valid_rows(state, group)
    whole = (pool.entries > 0) & (valid == pool.page_size)
    opened = state.rows.open_sequences()
    return metadata.RecordCounts(
      map_entries=sum(
        len(state.rows.pages(sequence.row, group)) for sequence in opened
      ),
      page_descriptors=pool.num_pages,
      hash_entries=int(np.count_nonzero(whole)),
      requests=len(opened),
      free_entries=pool.num_free + pool.num_evictable,
    )


def addresses_of(
  state: state_lib.State,
  bases: Sequence[Mapping[str, int]],
) -> address.AddressSnapshot:
  """Returns what `address.translate` needs, requests named by their row.

  The arrays are as `kvjax.pages` makes them: page p lies in slot p, the null
  page in slot 0.

  Args:
    state: the allocator.
    bases: for each group the byte address of its "k" and "v" array, or of its
      one "kv" array.

  Reference: §0x03.
  """
  with state.lock:
    opened = state.rows.open_sequences()
    requests = {
      str(sequence.row): address.RequestSnapshot(
        context_length=int(state.rows.length[sequence.row]),
        tables=tuple(
          _entries(state, sequence.row, group)
          for group in range(len(state.pools))
        ),
        table_version=int(state.rows.versions[sequence.row]),
      )
      for sequence in opened
    }
    pools = tuple(
      _pool(state, group, bases[group]) for group in range(len(state.pools))
    )
  return address.AddressSnapshot(state.layout, pools, requests)


def _entries(
  state: state_lib.State, row: int, group: int
) -> tuple[address.TableEntry, ...]:
  generations = state.pools[group].generations
  # A row computed for its logits only may show a page more than are visible.
  count = state.layout.groups[group].pages_for(int(state.rows.length[row]))
  return tuple(
    address.TableEntry(page, int(generations[page]))
    for page in state.rows.pages(row, group)[:count].tolist()
  )


def _pool(
  state: state_lib.State, group: int, bases: Mapping[str, int]
) -> address.PoolSnapshot:
  pool = state.pools[group]
  valid = holding.valid_rows(state, group)
  held = pool.references + pool.leases + pool.entries > 0
  return address.PoolSnapshot(
    num_slots=pool.num_pages + 1,
    bases=dict(bases),
    pages={
      page: address.PageRecord(
        int(pool.generations[page]), page, int(valid[page])
      )
      for page in np.flatnonzero(held).tolist()
    },
  )
