"""A radix tree over bundles: compressed edges that a live sequence can grow.

    top ── [system prompt ....] ─┬─ [few-shot A ...] ── [tail, sealed]
                                 └─ [few-shot B ...] ── [tail, owned by row 7]

An edge's key is one flat buffer, so that following it is one comparison
whatever its length.  A leaf that a live sequence computed is *owned* by its
row: key and pages are views of the sequence's own token and table rows, and
publishing another page is raising a number.  It is sealed, which copies them,
when the sequence ends, is cut back, or somebody else branches off.

Reference: §0x08, and SGLang's RadixAttention (Zheng et al.).
"""

import numpy as np

from host_allocator import sequences
from host_allocator.prefix import base
from host_allocator.prefix import forest


class RadixIndex(forest.Forest):
  """`PrefixIndex` as a radix tree."""

  def match(
    self, sequence: sequences.Sequence, num_tokens: int
  ) -> base.PrefixMatch:
    """The longest prefix of a sequence's keys; changes nothing."""
    node, depth = self._place(sequence)
    path: list[base.Node] = []
    if not sequence.root.alive:
      return base.PrefixMatch(0, path)
    keys = self._rows.keys[sequence.row]
    while depth < num_tokens:
      stop = min(self.end(node), num_tokens)
      if depth < stop:
        shared = self._common(node, keys, depth, stop)
        if shared:
          path.append(node)
        depth += shared
        if depth < stop or depth == num_tokens:
          break
      if node.children is None:
        break
      bundle = keys[depth : depth + self._bundle]
      if depth + self._bundle > num_tokens:
        bundle = keys[depth:num_tokens]
      child = node.children.by_key.get(bundle.tobytes())
      if child is None:
        child, shared = self._nearest(node, bundle)
        if child is not None:
          path.append(child)
          depth += shared
        break
      node = child
    return base.PrefixMatch(depth, path)

  def settle(
    self,
    sequence: sequences.Sequence,
    match: base.PrefixMatch,
    num_tokens: int,
  ) -> None:
    """Makes the first `num_tokens` of a match the sequence's own place."""
    self._clock += 1
    aligned = num_tokens - num_tokens % self._bundle
    path = [node for node in match.path if node.start < num_tokens]
    last = path[-1]
    if num_tokens < self.end(last):
      path.pop()
      if last.start < aligned:
        path.append(self._split(last, aligned))
    self._use(path, sequence.priority)
    self._rows.published[sequence.row] = aligned
    sequence.node = last
    sequence.node, _ = self._place(sequence)
    sequence.lease_node = last if aligned < num_tokens else None

  def insert(self, sequence: sequences.Sequence, num_tokens: int) -> list[int]:
    """Publishes a sequence's rows up to `num_tokens`."""
    released = [0] * len(self._pools)
    if not self._partial_tails:
      num_tokens -= num_tokens % self._bundle
    row = sequence.row
    if not sequence.root.alive or num_tokens <= self._rows.published[row]:
      return released
    self._clock += 1
    if self._rows.growing[row]:
      self._grow(sequence.node, row, num_tokens)
      return released
    self.detach(sequence)  # Less than a bundle; taken over again below.
    node, depth = self._place(sequence)
    keys = self._rows.keys[row]
    while True:
      end = self.end(node)
      if depth < end:
        stop = min(end, num_tokens)
        reached = depth + self._common(node, keys, depth, stop)
        whole = reached - reached % self._bundle
        for group, count in enumerate(
          self._share(sequence, node, depth, whole)
        ):
          released[group] += count
        depth = whole
        if reached == num_tokens:
          break  # All there, a partial tail as part of the node's.
        if reached < end:
          upper = self._split(node, depth)
          node = self._attach(sequence, upper, depth, num_tokens)
          break
        if depth < end:  # Our rows go on where its partial tail ends.
          self._take_over(node, sequence, num_tokens)
          break
      if depth == num_tokens:
        break
      child = self._next(node, keys, depth, num_tokens)
      if child is None:
        node = self._attach(sequence, node, depth, num_tokens)
        break
      node = child
    if node.owner != row:
      self._rows.published[row] = depth
    sequence.node = node
    return released

  def grow(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
    """Publishes whole bundles of rows that are growing, a batch at a time.

    Args:
      rows: int32 `[n]`, each with `growing` set.
      num_tokens: int32 `[n]`, where each stands now, less than a bundle further
        than it had published.
    """
    published = self._rows.published[rows]
    if self._events is not None:
      for row, start, stop in zip(
        rows.tolist(), published.tolist(), num_tokens.tolist(), strict=True
      ):
        sequence = self._rows.sequences[row]
        if sequence is not None:
          self._report_stored(sequence.node, start, stop)
    for group, pool in enumerate(self._pools):
      size = pool.page_size
      for step in range(self._bundle // size):
        ends = num_tokens - step * size if step else num_tokens
        at = rows
        # A page that holds rows of a partial tail has its entry already.
        fresh = published <= ends - size
        if np.count_nonzero(fresh) < len(rows):
          at, ends = rows[fresh], ends[fresh]
        pool.publish(self._rows.pages_at(group, at, ends // size - 1))
    self._rows.published[rows] = num_tokens

  def _common(
    self, node: base.Node, keys: np.ndarray, depth: int, stop: int
  ) -> int:
    """How far the keys follow a node from `depth`, at most to `stop`."""
    own = node.key[depth - node.start : stop - node.start]
    return forest.common_length(own, keys[depth:stop])

  def _next(
    self, node: base.Node, keys: np.ndarray, depth: int, num_tokens: int
  ) -> base.Node | None:
    """The child to go on with: same bundle, or one is a part of the other."""
    if node.children is None:
      return None
    bundle = keys[depth : min(depth + self._bundle, num_tokens)]
    child = node.children.by_key.get(bundle.tobytes())
    if child is None:
      child, shared = self._nearest(node, bundle)
      if child is not None:
        ours, theirs = len(bundle), self.end(child) - child.start
        if shared < min(ours, theirs):
          return None
    return child

  def _attach(
    self,
    sequence: sequences.Sequence,
    node: base.Node,
    depth: int,
    num_tokens: int,
  ) -> base.Node:
    """Publishes `[depth, num_tokens)` below a node that ends at `depth`."""
    if node.children is None and node.parent is not None:
      self._take_over(node, sequence, num_tokens)
      return node
    row = sequence.row
    leaf = base.Node(
      sequence.root, node, depth, depth, node.key, node.pages, self._clock
    )
    leaf.priority = sequence.priority
    self._own(leaf, row)
    self._publish(row, depth, num_tokens)
    self._set_published(leaf, row, depth, num_tokens)
    if node.children is None:
      node.children = base.Children()
    node.children.add(self._first_key(leaf), leaf)
    return leaf

  def _take_over(
    self, node: base.Node, sequence: sequences.Sequence, num_tokens: int
  ) -> None:
    """Lets a sequence grow a leaf whose tokens its own begin with.

    A partial tail is replaced by the sequence's page, which has its rows too.
    """
    row, end = sequence.row, self.end(node)
    old_key = self._first_key(node)
    aligned = end - end % self._bundle
    old = [
      ids[(aligned - node.start) // pool.page_size :][
        : -(-(end - aligned) // pool.page_size)
      ].copy()
      for pool, ids in zip(self._pools, node.pages, strict=True)
    ]
    if node.owner >= 0 and node.owner != row:
      self._rows.growing[node.owner] = False
      self._rows.published[node.owner] = aligned
    self._own(node, row)
    self._publish(row, aligned, num_tokens)
    for pool, ids in zip(self._pools, old, strict=True):
      pool.withdraw(ids)
    self._set_published(node, row, aligned, num_tokens)
    node.priority = max(node.priority, sequence.priority)
    node.last_used = self._clock
    if end - node.start < self._bundle and node.parent is not None:
      siblings = node.parent.children
      if siblings is not None:
        siblings.remove(old_key)
        siblings.add(self._first_key(node), node)

  def _grow(self, node: base.Node, row: int, num_tokens: int) -> None:
    """Publishes more of a sequence that owns its leaf."""
    published = int(self._rows.published[row])
    self._publish(row, published, num_tokens)
    for group, pool in enumerate(self._pools):
      if published % pool.page_size:  # That page had its entry already.
        column = published // pool.page_size
        page = self._rows.table_rows[group][row][column : column + 1]
        pool.withdraw(page)
    self._set_published(node, row, published, num_tokens)

  def _own(self, node: base.Node, row: int) -> None:
    """Makes a node's key and pages views of a row."""
    node.owner = row
    node.key = self._rows.keys[row][node.start :]
    node.pages = tuple(
      table_rows[row][node.start // pool.page_size :]
      for pool, table_rows in zip(
        self._pools, self._rows.table_rows, strict=True
      )
    )

  def _publish(self, row: int, start: int, stop: int) -> None:
    for group, pool in enumerate(self._pools):
      first, last = start // pool.page_size, -(-stop // pool.page_size)
      pool.publish(self._rows.table_rows[group][row][first:last])

  def _set_published(
    self, node: base.Node, row: int, start: int, num_tokens: int
  ) -> None:
    self._report_stored(node, start, num_tokens)
    self._rows.published[row] = num_tokens
    self._rows.growing[row] = num_tokens - node.start >= self._bundle

  def _split(self, node: base.Node, at: int) -> base.Node:
    """Cuts a node in two at a bundle; moves no K/V, changes no reference.

    Returns:
      The new upper part; `node` stays the lower one.
    """
    parent, end, size = node.parent, self.end(node), at - node.start
    if parent is None or parent.children is None:
      raise AssertionError("the top has no tokens to split")
    counts = [size // pool.page_size for pool in self._pools]
    upper = base.Node(
      node.root,
      parent,
      node.start,
      at,
      node.key[:size].copy(),
      tuple(
        ids[:count].copy()
        for ids, count in zip(node.pages, counts, strict=True)
      ),
      node.created,
    )
    upper.last_used, upper.hits = node.last_used, node.hits
    upper.priority = node.priority
    parent.children.add(self._first_key(node), upper)
    node.start, node.parent = at, upper
    node.key = node.key[size:]
    node.pages = tuple(
      ids[count:] for ids, count in zip(node.pages, counts, strict=True)
    )
    if node.owner < 0:
      node.key = forest.compact(node.key)
      node.pages = tuple(forest.compact(ids) for ids in node.pages)
    else:
      self._rows.growing[node.owner] = end - at >= self._bundle
    upper.children = base.Children()
    upper.children.add(self._first_key(node), node)
    return upper

  def _forget(self, node: base.Node) -> None:
    """A radix node is found through its parent only."""
