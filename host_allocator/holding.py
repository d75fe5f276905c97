"""References that tables and leases hold: taken, shared and let go."""

import numpy as np

from host_allocator import receipts
from host_allocator import sequences
from host_allocator import state as state_lib


def table_pages(state: state_lib.State, row: int) -> tuple[np.ndarray, ...]:
  """A row's pages per group, read-only copies."""
  group_pages = []
  for group in range(len(state.pools)):
    pages = state.rows.pages(row, group).astype(np.intp)
    pages.flags.writeable = False
    group_pages.append(pages)
  return tuple(group_pages)


def generations(
  state: state_lib.State, group_pages: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, ...]:
  """The present generations of pages, read-only."""
  found = []
  for pool, pages in zip(state.pools, group_pages, strict=True):
    values = pool.generations[pages]
    values.flags.writeable = False
    found.append(values)
  return tuple(found)


def share(
  state: state_lib.State,
  parent: sequences.Sequence,
  child: sequences.Sequence,
) -> None:
  """Gives a fresh child everything its parent has, page by page shared."""
  row, other, rows = parent.row, child.row, state.rows
  known = int(rows.num_tokens[row])
  rows.tokens[other, :known] = rows.tokens[row, :known]
  if rows.has_own_keys[row]:
    rows.give_own_keys(other, rows.keys[row][:known])
  for field in (rows.num_tokens, rows.length, rows.present):
    field[other] = field[row]
  published = int(rows.published[row])
  rows.published[other] = published - published % state.bundle
  note_valid_rows(state, row)
  for group, pool in enumerate(state.pools):
    pages, leased = rows.pages(row, group), rows.leased[group][row]
    rows.table_rows[group][other][: len(pages)] = pages
    rows.leased[group][other] = leased
    if leased:
      pool.lease(pages[-1:])
      pages = pages[:-1]
    pool.hold(pages)
  child.root, child.node = parent.root, parent.node
  child.lease_node = parent.lease_node
  child.priority, child.want_logits = parent.priority, parent.want_logits
  child.matched_tokens = int(rows.length[row])
  child.root.num_sequences += 1


def note_valid_rows(state: state_lib.State, row: int) -> None:
  """Writes down the valid rows of a last page that is no longer private.

  While it was, they were its sequence's length, and every step would only have
  repeated them.
  """
  if state.rows.private[row]:
    state.rows.private[row] = False
    state.rows.stride = None
    for group, pool in enumerate(state.pools):
      page, offset = _last_page(state, row, group)
      if offset:
        pool.valid_rows[page] = offset


def valid_rows(state: state_lib.State, group: int) -> np.ndarray:
  """Valid rows of every page of a group, private last pages included."""
  counts = state.pools[group].valid_rows.copy()
  for row in np.flatnonzero(state.rows.private).tolist():
    page, offset = _last_page(state, row, group)
    if offset:
      counts[page] = offset
  return counts


def _last_page(state: state_lib.State, row: int, group: int) -> tuple[int, int]:
  """A row's last page and the rows it shows of it; 0 where it shows all."""
  present, size = int(state.rows.present[row]), state.rows.page_sizes[group]
  return int(state.rows.table_rows[group][row][(present - 1) // size]), (
    present % size
  )


def drop(
  state: state_lib.State, row: int, group: int, pages: np.ndarray
) -> None:
  """Lets table entries go, the last of which may be held by lease."""
  rows, pool = state.rows, state.pools[group]
  leased = rows.leased[group][row]
  if leased and len(pages) and pages[-1] == leased:
    pool.unlease(pages[-1:])
    pages = pages[:-1]
    rows.leased[group][row] = 0
  pool.drop(pages)


def cut(
  state: state_lib.State, sequence: sequences.Sequence, length: int
) -> tuple[int, ...]:
  """Drops a sequence's pages past `length`; returns how many per group.

  Rows past `length` in the last page are given up only where nobody else can
  see them; otherwise the next append copies (R5).
  """
  row, rows, dropped = sequence.row, state.rows, []
  state.index.shorten(sequence, length)
  note_valid_rows(state, row)
  for group, pool in enumerate(state.pools):
    keep, have = -(-length // pool.page_size), rows.num_pages(row, group)
    table_row = rows.table_rows[group][row]
    own = table_row[keep:have].astype(np.intp)
    table_row[keep:have] = 0
    drop(state, row, group, own)
    dropped.append(len(own))
    offset = length % pool.page_size
    if offset and not rows.leased[group][row]:
      page = table_row[keep - 1]
      alone = pool.references[page] == 1 and not pool.leases[page]
      if alone and not pool.entries[page]:
        pool.valid_rows[page] = min(int(pool.valid_rows[page]), offset)
  rows.present[row] = length
  rows.length[row] = min(int(rows.length[row]), length)
  rows.versions[row] += 1
  if not any(leased[row] for leased in rows.leased):
    sequence.lease_node = None
  return tuple(dropped)


def release(
  state: state_lib.State, sequence: sequences.Sequence
) -> tuple[int, ...]:
  """Drops everything a sequence holds, and its row; returns pages per group."""
  row, dropped = sequence.row, []
  if sequence.root is not None:
    state.index.release(sequence)
  note_valid_rows(state, row)
  for group in range(len(state.pools)):
    own = state.rows.pages(row, group).astype(np.intp)
    drop(state, row, group, own)
    dropped.append(len(own))
  state.rows.give_back(sequence)
  state.epoch += 1
  return tuple(dropped)


def lease(state: state_lib.State, row: int) -> receipts.Lease:
  """Takes a read lease on all pages of a row."""
  note_valid_rows(state, row)
  group_pages = table_pages(state, row)
  for pool, pages in zip(state.pools, group_pages, strict=True):
    pool.lease(pages)
  state.num_leases += 1
  lent = receipts.Lease(
    state.number,
    state.num_leases,
    group_pages,
    generations(state, group_pages),
    int(state.rows.present[row]),
  )
  state.held_leases[lent.number] = lent
  return lent
