"""§0x08: the mutations of a radix tree over 24 one-row pages, step by step.

Two chats and a few-shot pair run into each other: edges split where a boundary
shows, duplicates go back to the pool, locked paths outlive two evictions.
Our pages 1 to 24 stand for the article's slots. A childless leaf grows in place
here, where the article hangs a new edge below it: so [20, 21] and [22, 23] are
one edge, and of its five evicted edges we count four, with the same eight
slots. Its 18 operations count leases and publications one by one; here they are
part of opening, committing and closing, of which there are fewer.
"""

import pytest

from host_allocator import errors
from tests.article import driver

CHAT_A = [10, 11, 12, 13, 20, 21]
CHAT_B = [10, 11, 12, 13, 30, 31]
SHOT_1, SHOT_2 = [50, 51, 61], [50, 51, 60]


class Trace:
  """The allocator of the trace, and what has been counted so far."""

  def __init__(self):
    self.allocator = driver.make(
      driver.one_group(page_size=1), 24, evict_whole_edges=True
    )
    self.splits = self.released = 0
    split = self.allocator.index._split

    def counted(*arguments):
      self.splits += 1
      return split(*arguments)

    self.allocator.index._split = counted

  def open(self, tokens):
    return self.allocator.open(tokens)

  def compute(self, sequence):
    count = sequence.num_tokens - sequence.length
    plan = self.allocator.plan([(sequence, count)])
    receipt = self.allocator.commit(plan)
    self.released += sum(receipt.released_duplicates)

  def evict(self, target):
    """Wants `target` pages more than are free; returns the pages evicted."""
    before = self.edges()
    free = self.allocator.usage()[0].free
    filler = self.allocator.open([900 + i for i in range(free + target)])
    self.allocator.abort(self.allocator.plan([(filler, filler.num_tokens)]))
    self.allocator.close(filler)
    after = self.edges()
    gone = [tokens for tokens in before if tokens not in after]
    return gone, sum(len(before[tokens]) for tokens in gone)

  def edges(self):
    """Edge tokens -> pages."""
    index, found = self.allocator.index, {}
    for root in index.roots():
      for node in index.nodes(root):
        size = index.end(node) - node.start
        tokens = tuple(node.key[:size].tolist())
        found[tokens] = tuple(node.pages[0][:size].tolist())
    return found

  def check(self):
    assert self.allocator.audit() == ()
    edges = self.edges()
    assert all(len(tokens) == len(ids) for tokens, ids in edges.items())
    usage = self.allocator.usage()[0]
    owned = sum(len(tokens) for tokens in edges)
    assert owned + usage.free == 24
    assert (usage.live, usage.evictable) == (
      owned - usage.evictable,
      owned - usage.live,
    )


@pytest.fixture(scope="module")
def trace():
  return Trace()


def publish(trace, tokens):
  """Computes a prompt and leaves its rows to the tree."""
  sequence = trace.open(tokens)
  trace.compute(sequence)
  trace.allocator.close(sequence)


def test_the_whole_trace(trace):
  allocator = trace.allocator
  # Both chats are under way before either has published anything.
  first, second = trace.open(CHAT_A), trace.open(CHAT_B)
  trace.compute(first)
  assert trace.edges() == {tuple(CHAT_A): (1, 2, 3, 4, 5, 6)}
  trace.check()

  # A match that ends inside an edge splits it and moves no row.
  query = trace.open([10, 11, 12, 99])
  assert query.matched_tokens == 3
  assert query.pages().tolist() == [1, 2, 3]
  assert trace.edges() == {(10, 11, 12): (1, 2, 3), (13, 20, 21): (4, 5, 6)}
  assert trace.splits == 1
  allocator.close(query)
  trace.check()

  # The second chat arrives with six rows, four of which are there already.
  trace.compute(second)
  assert trace.released == 4
  assert second.pages().tolist() == [1, 2, 3, 4, 11, 12]
  assert trace.edges() == {
    (10, 11, 12): (1, 2, 3),
    (13,): (4,),
    (20, 21): (5, 6),
    (30, 31): (11, 12),
  }
  assert trace.splits == 2
  trace.check()

  # A request goes on from the first chat and publishes before it is done.
  chat = trace.open([*CHAT_A, 22, 23])
  assert chat.matched_tokens == 6
  trace.compute(chat)
  allocator.close(first)
  added = set(chat.pages().tolist()) - {1, 2, 3, 4, 5, 6}
  assert len(added) == 2
  trace.check()

  # Two few-shot prompts, side by side.
  one, two = trace.open(SHOT_1), trace.open(SHOT_2)
  trace.compute(one)
  trace.compute(two)
  assert (trace.released, trace.splits) == (6, 3)
  assert {(50, 51), (60,), (61,)} <= set(trace.edges())
  allocator.close(one)
  allocator.close(two)
  trace.check()

  # Locked paths outlive pressure; parents go once they are leaves.
  evicted = evicted_edges = 0
  gone, rows = trace.evict(1)
  assert (gone, rows) == ([(61,)], 1)
  evicted += rows
  evicted_edges += len(gone)
  trace.check()
  gone, rows = trace.evict(3)
  assert (set(gone), rows) == ({(60,), (50, 51)}, 3)
  evicted += rows
  evicted_edges += len(gone)
  trace.check()
  assert allocator.usage()[0].evictable == 0
  with pytest.raises(errors.OutOfPages):
    trace.evict(1)
  allocator.close(next(iter(allocator.rows.open_sequences()[::-1])))
  trace.check()

  # The last request takes over the second chat's rows as a scheduler would.
  handoff = trace.open([*CHAT_B, 7])
  allocator.close(second)
  allocator.close(chat)
  gone, rows = trace.evict(3)
  assert rows == 4, "a whole edge goes, although three rows would do"
  assert gone == [(20, 21, 22, 23)], "the article's [20, 21] and [22, 23]"
  evicted += rows
  evicted_edges += len(gone)
  assert evicted == 8
  assert evicted_edges + 1 == 5
  trace.check()

  receipt = handoff.receipt
  assert receipt.matched_tokens == 6
  assert receipt.group_pages[0].tolist() == [1, 2, 3, 4, 11, 12]
  assert receipt.recomputed_tokens == 1
  assert (handoff.length, handoff.num_tokens) == (6, 7)
  assert trace.edges() == {
    (10, 11, 12): (1, 2, 3),
    (13,): (4,),
    (30, 31): (11, 12),
  }
  usage = allocator.usage()[0]
  assert (usage.total, usage.free) == (24, 18)
  assert (usage.live, usage.evictable, usage.reserved) == (6, 0, 0)
  assert (trace.splits, trace.released) == (3, 6)
  for name in receipt._fields:
    with pytest.raises(AttributeError):
      setattr(receipt, name, None)
  with pytest.raises(ValueError, match="read-only"):
    receipt.group_pages[0][0] = 9


# Corruptions of a sound state, and a word of what the audit says of each.
CORRUPTIONS = {
  "a reference too many": ("references", lambda c: bump(c, "references", 1)),
  "a reference too few": ("references", lambda c: bump(c, "references", -1)),
  "a lease nobody holds": ("leases", lambda c: bump(c, "leases", 1)),
  "an entry too many": ("entries", lambda c: bump(c, "entries", 1)),
  "an entry too few": ("entries", lambda c: bump(c, "entries", -1)),
  "rows that were never written": (
    "valid rows",
    lambda c: c.pools[0].valid_rows.fill(0),
  ),
  "a live page among the free": ("states", lambda c: put_free(c, 1)),
  "evictable pages miscounted": (
    "evictable",
    lambda c: set_pool(c, "num_evictable", 1),
  ),
  "reserved pages miscounted": (
    "reserved",
    lambda c: set_pool(c, "num_reserved", 1),
  ),
  "the null page in use": (
    "null page",
    lambda c: c.pools[0].references.__setitem__(0, 1),
  ),
  "a table entry past the rows": (
    "past its rows",
    lambda c: c.rows.tables[0].__setitem__((0, 9), 5),
  ),
  "a table entry in a closed row": (
    "closed row",
    lambda c: c.rows.tables[0].__setitem__((7, 0), 5),
  ),
  "another page in a table": (
    "other pages",
    lambda c: c.rows.tables[0].__setitem__((0, 0), 2),
  ),
  "a page outside the pool": (
    "outside",
    lambda c: c.rows.tables[0].__setitem__((0, 0), 99),
  ),
  "more rows than tokens": ("known", lambda c: set_row(c, "length", 99)),
  "more published than there is": (
    "published",
    lambda c: set_row(c, "published", 99),
  ),
  "other tokens on a path": ("another key", lambda c: set_key(c, 0, 77)),
  "two edges with one page": (
    "entries",
    lambda c: leaf(c).pages[0].__setitem__(-1, 1),
  ),
  "an edge that begins too late": (
    "node covers",
    lambda c: setattr(leaf(c), "start", leaf(c).start + 1),
  ),
  "a child under another key": ("another key", lambda c: refile(c)),
}


def bump(cache, name, by):
  getattr(cache.pools[0], name)[1] += by


def put_free(cache, page):
  pool = cache.pools[0]
  pool._free[pool.num_free] = page
  pool.num_free += 1


def set_pool(cache, name, value):
  setattr(cache.pools[0], name, value)


def set_row(cache, name, value):
  getattr(cache.rows, name)[0] = value


def leaf(cache):
  (root,) = cache.index.roots()
  return next(n for n in cache.index.nodes(root) if not n.children)


def set_key(cache, at, value):
  (root,) = cache.index.roots()
  node = next(n for n in cache.index.nodes(root) if n.children)
  node.key = node.key.copy()
  node.key[at] = value


def refile(cache):
  (root,) = cache.index.roots()
  children = root.top.children.by_key
  key, node = children.popitem()
  children[bytes(reversed(key))] = node


@pytest.fixture(params=["radix", "hash_chain"])
def branched(request):
  """One open chat, a closed one, and a third path below their fork."""
  cache = driver.make(
    driver.one_group(page_size=1), 24, prefix_index=request.param
  )
  chat = driver.prefilled(cache, CHAT_A)
  cache.close(driver.prefilled(cache, CHAT_B))
  cache.close(driver.prefilled(cache, SHOT_1))
  assert chat.is_open
  assert cache.audit() == ()
  return cache


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_audit_names_a_corrupted_state(branched, name):
  word, corrupt = CORRUPTIONS[name]
  corrupt(branched)
  findings = branched.audit()
  assert findings, f"{name} went unnoticed"
  assert any(word in finding for finding in findings), findings


def evict_locked(cache):
  """More pages than are free or evictable: one of the locked must not go."""
  usage = cache.usage()[0]
  count = usage.free + usage.evictable + 1
  cache.plan([(cache.open(list(range(900, 900 + count))), count)])


def unlock_too_often(cache):
  cache.pools[0].unlease(cache.rows.pages(0, 0))


def drop_too_often(cache):
  closed = cache.open(SHOT_1)
  ids = closed.pages()[:1]
  cache.close(closed)
  cache.pools[0].drop(ids)


def use_a_stale_receipt(cache):
  held = cache.open(SHOT_1)
  receipt = held.receipt
  cache.close(held)
  cache.drop_index()
  taken = [
    driver.prefilled(cache, range(300 + 6 * i, 306 + 6 * i)) for i in range(3)
  ]
  assert taken
  cache.check_receipt(receipt)


REFUSALS = {
  "evicting a locked leaf": (evict_locked, "out_of_pages"),
  "a lock released too often": (unlock_too_often, "double_free"),
  "a reference released too often": (drop_too_often, "double_free"),
  "a receipt of recycled pages": (use_a_stale_receipt, "stale_receipt"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_forbidden_operation_is_refused_by_name(branched, name):
  attempt, reason = REFUSALS[name]
  with pytest.raises(errors.KVError) as caught:
    attempt(branched)
  assert caught.value.reason == reason
  assert branched.audit() == ()


def test_an_inner_edge_is_never_the_victim(branched):
  """Not even where nobody holds it and it has waited longest."""
  (chat,) = branched.rows.open_sequences()
  branched.close(chat)
  (root,) = branched.index.roots()
  inner = [n for n in branched.index.nodes(root) if n.children]
  assert inner
  for node in inner:
    node.last_used = -1
    branched.index._queue.push(node)
  ends = [branched.index.end(node) for node in inner]
  assert branched.index._queue.first() in inner
  assert branched.index.evict([1]) == [1]
  assert branched.audit() == ()
  left = list(branched.index.nodes(root))
  assert all(node in left for node in inner)
  assert [branched.index.end(node) for node in inner] == ends
