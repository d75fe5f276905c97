"""What the model knows of an allocator, and what it says must happen next."""

import dataclasses

from host_allocator import allocator as allocators
from host_allocator import layout
from tests.host_allocator import brute_force

MAX_SEQUENCES = 5
MAX_LENGTH = 24


@dataclasses.dataclass
class Live:
  """What the model knows of an open sequence.

  `keys` are its tokens, or what they stand for under a side input.
  """

  handle: object
  root: tuple
  tokens: list[int]
  keys: list
  length: int
  want_logits: bool
  cancelled: bool = False


@dataclasses.dataclass
class Config:
  """How to build a world."""

  index: str | None = "radix"
  page_sizes: tuple[int, ...] = (4,)
  num_pages: tuple[int, ...] = (8,)
  tail_policy: str = "copy_rows"
  eviction: str = "lru"
  whole_edges: bool = False


class View:
  """An allocator, a memory for each group, and what should be in them."""

  def __init__(self, config: Config) -> None:
    self.config = config
    groups = tuple(
      layout.CacheGroup(f"g{i}", 1, 1, 1, size)
      for i, size in enumerate(config.page_sizes)
    )
    self.layout = layout.CacheLayout(groups)
    self.allocator = allocators.KVAllocator(
      self.layout,
      num_pages=config.num_pages,
      max_sequences=MAX_SEQUENCES,
      max_length=MAX_LENGTH,
      prefix_index=config.index,
      tail_policy=config.tail_policy,
      eviction=config.eviction,
      evict_whole_edges=config.whole_edges,
    )
    self.histories = brute_force.Histories()
    self.memories = [
      brute_force.Memory(count, size)
      for count, size in zip(config.num_pages, config.page_sizes, strict=True)
    ]
    # Rows that a page's owners may rely on, for the rule on writing in place.
    self.valid: list[dict[int, int]] = [{} for _ in groups]
    self.live: list[Live] = []
    self.plan = None
    self.evicted_for_plan = False
    self.kept: tuple | None = None
    self.members: list[tuple[Live, int]] = []
    self.leases: list[tuple] = []
    self.receipts: list[tuple] = []
    self.closed_namespaces: set[str] = set()
    self.residents = self.read_residents()
    self.last_epoch = 0
    self.tally: dict[str, int] = {}

  # What the allocator shows --------------------------------------------------

  def pages(self, live: Live, group: int) -> list[int]:
    return live.handle.pages(group).tolist()

  def read_residents(self) -> set[brute_force.Resident]:
    """Every bundle the index could hand out, from its nodes."""
    index, unit = self.allocator.index, self.layout.bundle_tokens
    found = set()
    for root in index.roots():
      paths = {id(root.top): ()}
      for node in index.nodes(root):
        start, end = node.start, index.end(node)
        keys = tuple(
          key if key >= 0 else self.allocator.side_input_keys._marks[key]
          for key in node.key[: end - start].tolist()
        )
        path = paths[id(node.parent)] + keys
        paths[id(node)] = path
        for begin in range(start, end, unit):
          stop = min(begin + unit, end)
          pages = tuple(
            tuple(
              node.pages[group][
                (begin - start) // size : -(-(stop - start) // size)
              ].tolist()
            )
            for group, size in enumerate(self.config.page_sizes)
          )
          found.add(brute_force.Resident(root.key, path[:stop], pages))
    return found

  def held(self, group: int) -> dict[int, int]:
    """Page -> holders, from tables and leases."""
    count: dict[int, int] = {}
    for live in self.live:
      for page in self.pages(live, group):
        count[page] = count.get(page, 0) + 1
    for lease, _ in self.leases:
      for page in lease.group_pages[group].tolist():
        count[page] = count.get(page, 0) + 1
    return count

  def available(self, group: int) -> int:
    return self.config.num_pages[group] - len(self.held(group))

  def needed(self, batch, group: int) -> int:
    """Pages a step must reserve: fresh ones, and one for each forced copy."""
    size, need = self.config.page_sizes[group], 0
    holders = self.table_holders(group)
    for live, count in batch:
      present = self.present(live)
      start, stop = max(live.length, present), live.length + count
      need += brute_force.pages_needed(stop, size)
      need -= brute_force.pages_needed(start, size)
      if start % size and stop > start:
        page = self.pages(live, group)[start // size]
        borrowed = self.borrowed(live, group)
        shared = holders[page] > 1 or borrowed
        need += shared or self.valid[group].get(page, 0) > start % size
    return need

  def table_holders(self, group: int) -> dict[int, int]:
    count: dict[int, int] = {}
    for live in self.live:
      pages = self.pages(live, group)
      if self.borrowed(live, group):
        pages = pages[:-1]
      for page in pages:
        count[page] = count.get(page, 0) + 1
    return {**dict.fromkeys(self.held(group), 0), **count}

  def borrowed(self, live: Live, group: int) -> bool:
    """Whether the last page is an index's, to be copied before writing."""
    return bool(self.allocator.rows.leased[group][live.handle.row])

  def present(self, live: Live) -> int:
    return int(self.allocator.rows.present[live.handle.row])

  def written_pages(self) -> list[dict[int, int]]:
    """Page -> valid rows after the open step, for pages it writes."""
    result = []
    for g, size in enumerate(self.config.page_sizes):
      part, pages = self.plan.groups[g], {}
      for i, (live, count) in enumerate(self.members):
        table = dict(enumerate(self.pages(live, g)))
        for member, column, page in zip(
          part.members.tolist(),
          part.columns.tolist(),
          part.pages.tolist(),
          strict=True,
        ):
          if member == i:
            table[column] = page
        start = max(live.length, self.present(live))
        stop = live.length + count
        for column in range(
          start // size, brute_force.pages_needed(stop, size)
        ):
          if stop > start:
            pages[table[column]] = min(stop - column * size, size)
      result.append(pages)
    return result

  def count_written_under_lease(self, written):
    for g, pages in enumerate(written):
      leased = {p for lease, _ in self.leases for p in lease.group_pages[g]}
      if leased & set(pages):
        self.count("append under a lease")

  def private_tails(self, live: Live, length: int) -> list[tuple[int, int]]:
    """Pages whose valid rows a truncation lowers: nobody else knows them."""
    found = []
    if length >= self.present(live):
      return found
    for g, size in enumerate(self.config.page_sizes):
      if not length % size:
        continue
      page = self.pages(live, g)[length // size]
      known = {p for r in self.residents for p in r.pages[g]}
      last = length // size == len(self.pages(live, g)) - 1
      if last and self.borrowed(live, g):
        continue
      if self.held(g)[page] == 1 and page not in known:
        found.append((g, page))
    return found

  def root_key(self, namespace, salt):
    return tuple(self.allocator.namespaces.authorize(namespace, salt=salt))

  def contents(self) -> frozenset:
    return frozenset((r.root, r.tokens) for r in self.read_residents())

  def receipt_rows(self, receipt) -> list[list[int]]:
    return [
      memory.read(pages.tolist(), receipt.matched_tokens)
      for memory, pages in zip(self.memories, receipt.group_pages, strict=True)
    ]

  def in_step(self, live: Live) -> bool:
    return self.plan is not None and any(
      live is member for member, _ in self.members
    )

  def count(self, name: str) -> None:
    self.tally[name] = self.tally.get(name, 0) + 1
