"""Re-derives every invariant from scratch, and digests the committed state."""

import hashlib
import itertools

import numpy as np

from host_allocator import holding
from host_allocator import pages as pages_lib
from host_allocator import state as state_lib
from host_allocator.prefix import base


def audit(state: state_lib.State) -> tuple[str, ...]:
  """What is wrong with an allocator's state, in words.

  Args:
    state: Between its methods, or inside an open step.

  Returns:
    Findings; empty where every invariant of DESIGN.md's R1 to R9 holds.
  """
  findings: list[str] = []
  for group, pool in enumerate(state.pools):
    name = state.layout.groups[group].name
    for finding in (
      *_audit_references(state, group),
      *_audit_partition(state, group),
      *_audit_entries(state, group),
      *_audit_valid_rows(state, group),
    ):
      findings.append(f"group {name!r}: {finding}")
    if pool.references[0] or pool.leases[0] or pool.entries[0]:
      findings.append(f"group {name!r}: the null page is in use")
  findings.extend(_audit_sequences(state))
  findings.extend(_audit_tree(state))
  return tuple(findings)


def state_digest(state: state_lib.State) -> str:
  """SHA-256 of tokens, tables, counts and index contents.

  Generations, epochs and recency are left out, and so is how the index cuts its
  paths into nodes: what can be told apart is what is digested.
  """
  digest = hashlib.sha256()
  for sequence in state.rows.open_sequences():
    row = sequence.row
    fields = (row, sequence.num_tokens, sequence.length)
    digest.update(repr(fields).encode())
    digest.update(sequence.tokens.tobytes())
    for group in range(len(state.pools)):
      digest.update(state.rows.pages(row, group).tobytes())
      digest.update(repr(int(state.rows.leased[group][row])).encode())
  for group, pool in enumerate(state.pools):
    for counts in (pool.references, pool.leases, pool.entries):
      digest.update(counts.tobytes())
    reserved = _reserved(state, group)
    free = np.sort(np.concatenate([pool.free_pages, reserved]))
    digest.update(free.tobytes())
    # Rows of free pages are nobody's.
    held = pool.references + pool.leases + pool.entries > 0
    valid_rows = holding.valid_rows(state, group)
    digest.update(np.where(held, valid_rows, 0).tobytes())
  for root in sorted(state.index.roots(), key=lambda root: repr(root.key)):
    digest.update(repr(root.key).encode())
    for line in sorted(_indexed_bundles(state, root)):
      digest.update(line)
  return digest.hexdigest()


def _reserved(state: state_lib.State, group: int) -> np.ndarray:
  plan = state.open_plan
  if plan is None:
    return np.zeros(0, np.int32)
  return plan.groups[group].pages


def _indexed_bundles(state: state_lib.State, root: base.Root) -> list[bytes]:
  """One line for each bundle under a root: its path, and its pages."""
  size = state.layout.bundle_tokens
  lines = []
  paths = {id(root.top): hashlib.sha256(b"")}
  for node in state.index.nodes(root):
    path = paths[id(node.parent)].copy()
    end = state.index.end(node)
    for start in range(node.start, end, size):
      stop = min(start + size, end)
      path.update(node.key[start - node.start : stop - node.start].tobytes())
      line = [path.digest()]
      for pool, ids in zip(state.pools, node.pages, strict=True):
        first = (start - node.start) // pool.page_size
        last = -(-(stop - node.start) // pool.page_size)
        line.append(ids[first:last].astype(np.int32).tobytes())
      lines.append(b"|".join(line))
    paths[id(node)] = path
  return lines


def _audit_references(state: state_lib.State, group: int) -> list[str]:
  """R3: references and leases are what tables and leases add up to."""
  pool, rows = state.pools[group], state.rows
  references = np.zeros(pool.num_pages + 1, np.int64)
  leases = np.zeros(pool.num_pages + 1, np.int64)
  findings = []
  for sequence in rows.open_sequences():
    row = sequence.row
    pages = rows.pages(row, group)
    if len(pages) and not 1 <= pages.min() <= pages.max() <= pool.num_pages:
      findings.append(f"row {row} holds pages outside 1..{pool.num_pages}")
      continue
    if rows.table_rows[group][row][len(pages) :].any():
      findings.append(f"row {row} has table entries past its rows")
    leased = int(rows.leased[group][row])
    if leased:
      if pages[-1] != leased:
        findings.append(f"row {row} leases page {leased}, not its last")
      leases[leased] += 1
      pages = pages[:-1]
    np.add.at(references, pages, 1)
  for lease in state.held_leases.values():
    np.add.at(leases, lease.group_pages[group], 1)
  for label, derived, kept in (
    ("table references", references, pool.references),
    ("leases", leases, pool.leases),
  ):
    for page in np.flatnonzero(derived != kept).tolist():
      findings.append(
        f"page {page} counts {kept[page]} {label}, {derived[page]} are there"
      )
  return findings


def _audit_partition(state: state_lib.State, group: int) -> list[str]:
  """free + evictable + live + reserved = pool, each page in one of them."""
  pool = state.pools[group]
  held = (pool.references + pool.leases)[1:] > 0
  evictable = ~held & (pool.entries[1:] > 0)
  free = np.zeros(pool.num_pages + 1, np.int64)
  np.add.at(free, pool.free_pages, 1)
  reserved = np.zeros(pool.num_pages + 1, np.int64)
  np.add.at(reserved, _reserved(state, group), 1)
  times = held.astype(np.int64) + evictable + free[1:] + reserved[1:]
  findings = [
    f"page {page + 1} is in {times[page]} states"
    for page in np.flatnonzero(times != 1).tolist()
  ]
  for label, derived, kept in (
    ("evictable", int(evictable.sum()), pool.num_evictable),
    ("reserved", int(reserved.sum()), pool.num_reserved),
  ):
    if derived != kept:
      findings.append(f"{kept} pages count as {label}, {derived} are")
  return findings


def _audit_entries(state: state_lib.State, group: int) -> list[str]:
  """Index entries are what the nodes add up to."""
  pool = state.pools[group]
  entries = np.zeros(pool.num_pages + 1, np.int64)
  for root in state.index.roots():
    for node in state.index.nodes(root):
      size = state.index.end(node) - node.start
      np.add.at(entries, node.pages[group][: -(-size // pool.page_size)], 1)
  return [
    f"page {page} counts {pool.entries[page]} index entries,"
    f" {entries[page]} are there"
    for page in np.flatnonzero(entries != pool.entries).tolist()
  ]


def _audit_valid_rows(state: state_lib.State, group: int) -> list[str]:
  """R4: what a table or an index shows was computed."""
  pool, rows = state.pools[group], state.rows
  valid_rows = holding.valid_rows(state, group)
  views = [
    (
      f"row {sequence.row}",
      rows.pages(sequence.row, group),
      int(rows.present[sequence.row]),
    )
    for sequence in rows.open_sequences()
  ]
  for root in state.index.roots():
    for node in state.index.nodes(root):
      size = state.index.end(node) - node.start
      views.append(
        ("the index", node.pages[group][: -(-size // pool.page_size)], size)
      )
  findings = []
  for viewer, pages, num_rows in views:
    # Pages outside the pool are found with the references.
    if len(pages) and pages.max() <= pool.num_pages:
      shown = _rows_shown(pool, len(pages), num_rows)
      for page in pages[valid_rows[pages] < shown].tolist():
        findings.append(
          f"{viewer} shows more of page {page} than its {valid_rows[page]}"
          " valid rows"
        )
  return findings


def _rows_shown(
  pool: pages_lib.PagePool, num_pages: int, num_rows: int
) -> np.ndarray:
  shown = np.full(num_pages, pool.page_size)
  shown[-1] -= num_pages * pool.page_size - num_rows
  return shown


def _audit_sequences(state: state_lib.State) -> list[str]:
  """Lengths are ordered, and nobody writes where others may read."""
  findings = []
  rows = state.rows
  for sequence in rows.open_sequences():
    row = sequence.row
    length, present = int(rows.length[row]), int(rows.present[row])
    known, published = int(rows.num_tokens[row]), int(rows.published[row])
    if not length <= present <= known or not published <= present:
      findings.append(
        f"row {row} has {length=} {present=} {known=} {published=}"
      )
  closed = np.ones(rows.max_sequences, np.bool_)
  closed[[sequence.row for sequence in rows.open_sequences()]] = False
  for table in rows.tables:
    if table[closed].any():
      findings.append("a closed row has table entries")
  return findings


def _audit_tree(state: state_lib.State) -> list[str]:
  """Nodes join, children are told apart, published paths are the tables'."""
  findings = []
  nodes = set()
  for root in state.index.roots():
    findings.extend(_audit_children(root.top, 0))
    for node in state.index.nodes(root):
      nodes.add(id(node))
      findings.extend(_audit_node(state, node))
  findings.extend(_audit_places(state, nodes))
  return findings


def _audit_node(state: state_lib.State, node: base.Node) -> list[str]:
  """A node joins its parent, which finds it by its first bundle."""
  parent = node.parent
  if parent is None or parent.children is None:
    return [f"a node at {node.start} hangs on nothing"]
  findings, size = [], state.layout.bundle_tokens
  end, parent_end = state.index.end(node), state.index.end(parent)
  if node.start != parent_end or node.start % size or end <= node.start:
    findings.append(f"a node covers {node.start}..{end} after {parent_end}")
  first = node.key[: min(size, end - node.start)].tobytes()
  if parent.children.by_key.get(first) is not node:
    findings.append(f"a node at {node.start} is filed under another key")
  if node.children is not None:
    if not node.children or end % size:
      findings.append(f"a node that ends at {end} has a children's list")
    findings.extend(_audit_children(node, end))
  if node.owner >= 0:
    owner = state.rows.sequences[node.owner]
    if owner is None or owner.node is not node or node.children:
      findings.append(f"row {node.owner} does not grow the node it owns")
  return findings


def _audit_children(node: base.Node, end: int) -> list[str]:
  """No child's first bundle is the beginning of another's."""
  if node.children is None:
    return []
  firsts = sorted(node.children.by_key)
  return [
    f"a child at {end} is part of its sibling"
    for one, following in itertools.pairwise(firsts)
    if following.startswith(one)
  ]


def _audit_places(state: state_lib.State, nodes: set[int]) -> list[str]:
  """A sequence's published rows are the path to its place (R11)."""
  findings = []
  size = state.layout.bundle_tokens
  for sequence in state.rows.open_sequences():
    row, node = sequence.row, sequence.node
    if node is None or not sequence.root.alive:
      continue
    depth = int(state.rows.published[row])
    depth -= depth % size
    while node.start >= depth and node.parent is not None:
      node = node.parent
    while node.parent is not None:
      if id(node) not in nodes:
        findings.append(f"row {row} is published under a forgotten node")
        break
      keys = state.rows.keys[row][node.start : depth]
      if not np.array_equal(node.key[: len(keys)], keys):
        findings.append(f"row {row} is published under other tokens")
      for group, pool in enumerate(state.pools):
        first, last = node.start // pool.page_size, depth // pool.page_size
        ids = state.rows.table_rows[group][row][first:last]
        if not np.array_equal(node.pages[group][: len(ids)], ids):
          findings.append(f"row {row} is published in other pages")
      depth = node.start
      node = node.parent
  return findings
