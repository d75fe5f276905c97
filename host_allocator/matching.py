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


def match(state: state_lib.State, sequence: sequences.Sequence) -> int:
  """Takes over whatever the index has beyond what the table shows.

  Returns:
    S_indexed, the tokens of the prompt that the index has.
  """
  row, rows = sequence.row, state.rows
  known = int(rows.num_tokens[row])
  cap = known - sequence.want_logits
  found = state.index.match(sequence, known)
  present = found.num_tokens
  if state.tail_policy == "full_pages":
    present = min(present, cap)
    present -= present % state.bundle
  elif present % state.bundle and not _copy_fits(state, known, present):
    present -= present % state.bundle
  if present > rows.present[row]:
    _take_over(state, sequence, found, present)
    rows.length[row] = min(present, cap)
    rows.present[row] = present
    rows.private[row] = False
    state.epoch += 1
  return found.num_tokens


def receipt(
  state: state_lib.State, sequence: sequences.Sequence, semantic_tokens: int
) -> receipts.PrefixMatchReceipt:
  """The record of a match that has just been made."""
  row, rows = sequence.row, state.rows
  group_pages = holding.table_pages(state, row)
  present = int(rows.present[row])
  return receipts.PrefixMatchReceipt(
    epoch=state.epoch,
    namespace=sequence.root.key[0],
    namespace_generation=sequence.root.key[1],
    prompt_tokens=int(rows.num_tokens[row]),
    semantic_tokens=semantic_tokens,
    matched_tokens=int(rows.length[row]),
    copied_rows=present % state.bundle,
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


def _copy_fits(state: state_lib.State, known: int, present: int) -> bool:
  """Whether the rest of a prompt fits while its last page is only read.

  If not, whole bundles must do: the page to copy could be the one missing.
  """
  for pool in state.pools:
    rest = -(-known // pool.page_size) - present // pool.page_size
    if present % pool.page_size and rest > pool.available - 1:
      return False
  return True


def _take_over(
  state: state_lib.State,
  sequence: sequences.Sequence,
  found: base.PrefixMatch,
  present: int,
) -> None:
  """Puts a match's pages into the table in place of the sequence's own."""
  row, rows = sequence.row, state.rows
  start = int(rows.published[row])
  start -= start % state.bundle
  for group, pool in enumerate(state.pools):
    size, table_row = pool.page_size, rows.table_rows[group][row]
    first, full, last = start // size, present // size, -(-present // size)
    own = table_row[first : rows.num_pages(row, group)].copy()
    for node in found.path:
      offset = node.start // size
      column = max(offset, first)
      stop = min(last, -(-state.index.end(node) // size))
      ids = node.pages[group][column - offset : stop - offset]
      table_row[column:stop] = ids
    pool.hold(table_row[first:full])
    if full < last:
      pool.lease(table_row[full:last])
    if len(own):
      holding.drop(state, row, group, own)
    rows.leased[group][row] = table_row[full] if full < last else 0
  state.index.settle(sequence, found, present)
