"""What a sequence takes over from the prefix index, to the token (R9).

    semantic     what the index has of the prompt
    present      of that, what the table shows: all, or whole bundles
    matched      rows that need not be computed: `present`, but where logits are
                 wanted never the last row of the prompt

Whole pages are held like the sequence's own.  A partly matching page is read
under a lease and copied before the first write, so that its owner can go on
writing behind the rows that matched.
"""

from collections.abc import Iterator

import numpy as np

from host_allocator import holding
from host_allocator import receipts
from host_allocator import sequences
from host_allocator import state as state_lib
from host_allocator.prefix import base

_NOTHING = np.zeros(0, np.intp)


def match(
  state: state_lib.State, sequence: sequences.Sequence
) -> tuple[int, list[np.ndarray]]:
  """Takes over whatever the index has beyond what the table shows.

  Returns:
    S_indexed, the tokens of the prompt that the index has; and the pages that
    were taken over, intp per group.
  """
  row, rows = sequence.row, state.rows
  known = int(rows.num_tokens[row])
  cap = known - sequence.want_logits
  found = state.index.match(sequence, known)
  present = found.num_tokens
  if state.tail_policy == "full_pages":
    present = min(present, cap)
    present -= present % state.bundle
  start = int(rows.published[row])
  start -= start % state.bundle
  if present > rows.present[row]:
    pages, present = _pin_found(state, row, found, start, present)
  else:
    pages, present = [], 0
  if not pages:
    return found.num_tokens, [_NOTHING for _ in state.pools]
  try:
    state.phase("match.pinned")
    holding.note_valid_rows(state, row)
    _take_place(state, sequence, found, present)
  except BaseException:
    _unpin(state, pages, start, present, start)
    raise
  _replace_table(state, row, pages, start, present)
  rows.length[row] = min(present, cap)
  rows.present[row] = present
  state.epoch += 1
  return found.num_tokens, pages


def _take_place(
  state: state_lib.State,
  sequence: sequences.Sequence,
  found: base.PrefixMatch,
  present: int,
) -> None:
  """Makes a match the sequence's place in the index, or changes nothing."""
  row, rows = sequence.row, state.rows
  state.index.detach(sequence)
  published, node = rows.published[row], sequence.node
  lease_node = sequence.lease_node
  try:
    state.index.settle(sequence, found, present)
    state.phase("match.settled")
  except BaseException:
    rows.published[row] = published
    sequence.node, sequence.lease_node = node, lease_node
    raise


def receipt(
  state: state_lib.State,
  sequence: sequences.Sequence,
  semantic_tokens: int,
  pages: list[np.ndarray],
) -> receipts.PrefixMatchReceipt:
  """The record of the match with which a sequence was opened."""
  row, rows = sequence.row, state.rows
  for ids in pages:
    ids.setflags(write=False)
  group_pages = tuple(pages)
  return receipts.PrefixMatchReceipt(
    pool=state.number,
    root=sequence.root.key,
    epoch=state.epoch,
    prompt_tokens=int(rows.num_tokens[row]),
    semantic_tokens=semantic_tokens,
    matched_tokens=int(rows.length[row]),
    copied_rows=int(rows.present[row]) % state.bundle,
    group_pages=group_pages,
    group_generations=holding.generations(state, group_pages),
  )


def keys_in_use(state: state_lib.State) -> Iterator[np.ndarray]:
  """Every index key of every open sequence and of everything indexed."""
  for sequence in state.rows.open_sequences():
    if state.rows.has_own_keys[sequence.row]:
      yield state.rows.keys[sequence.row][: sequence.num_tokens]
  for root in state.index.roots():
    for node in state.index.nodes(root):
      yield node.key[: state.index.end(node) - node.start]


def _pin_found(
  state: state_lib.State,
  row: int,
  found: base.PrefixMatch,
  start: int,
  present: int,
) -> tuple[list[np.ndarray], int]:
  """Pins the pages of a match, as far as there is room to use them.

  Returns:
    The pages per group from the bundle at `start` on, pinned; and the rows that
    they show. No pages, where that is no more than the table shows already.
  """
  pages = _found_pages(state, found, start, present)
  _pin(state, pages, start, present)
  aligned = present - present % state.bundle
  if present == aligned or _copy_fits(
    state, int(state.rows.num_tokens[row]), present
  ):
    return pages, present
  pages = _unpin(state, pages, start, present, aligned)
  if aligned > state.rows.present[row]:
    return pages, aligned
  _unpin(state, pages, start, aligned, start)
  return [], present


def _found_pages(
  state: state_lib.State, found: base.PrefixMatch, start: int, present: int
) -> list[np.ndarray]:
  """A match's pages per group, from the bundle at `start` on."""
  group_pages, path = [], found.path
  while path[-1].start >= present:
    path = path[:-1]
  for group, pool in enumerate(state.pools):
    size = pool.page_size
    # The first may begin before `start`; only the last may go on after its end.
    parts = [node.pages[group] for node in path]
    parts[-1] = parts[-1][: -(-(present - path[-1].start) // size)]
    first = start - path[0].start
    if first > 0:
      parts[0] = parts[0][first // size :]
    # As indices, for which NumPy is three times faster than for int32.
    group_pages.append(np.concatenate(parts, dtype=np.intp))
  return group_pages


def _pin(
  state: state_lib.State, pages: list[np.ndarray], start: int, present: int
) -> None:
  """Holds whole pages, and leases one that matches in part."""
  for pool, ids in zip(state.pools, pages, strict=True):
    full = (present - start) // pool.page_size
    if full < len(ids):
      pool.lease(ids[full:])
      ids = ids[:full]
    pool.hold(ids)


def _unpin(
  state: state_lib.State,
  pages: list[np.ndarray],
  start: int,
  present: int,
  aligned: int,
) -> list[np.ndarray]:
  """Lets go what was pinned past `aligned`; returns what is left."""
  left = []
  for pool, ids in zip(state.pools, pages, strict=True):
    keep = (aligned - start) // pool.page_size
    full = (present - start) // pool.page_size
    pool.drop(ids[keep:full])
    if full < len(ids):
      pool.unlease(ids[full:])
    left.append(ids[:keep])
  return left


def _copy_fits(state: state_lib.State, known: int, present: int) -> bool:
  """Whether the rest of a prompt fits while what matches is pinned.

  If not, whole bundles must do: the page to copy could be the one missing.
  """
  return all(
    -(-known // pool.page_size) - present // pool.page_size <= pool.available
    for pool in state.pools
  )


def _replace_table(
  state: state_lib.State,
  row: int,
  pages: list[np.ndarray],
  start: int,
  present: int,
) -> None:
  """Puts pinned pages into a table in place of the row's own."""
  rows = state.rows
  rows.stride = None
  for group, (pool, ids) in enumerate(zip(state.pools, pages, strict=True)):
    first, have = start // pool.page_size, rows.num_pages(row, group)
    table_row = rows.table_rows[group][row]
    if first < have:
      holding.drop(state, row, group, table_row[first:have].astype(np.intp))
    table_row[first : first + len(ids)] = ids
    is_leased = present % pool.page_size > 0
    rows.leased[group][row] = ids[-1] if is_leased else 0
