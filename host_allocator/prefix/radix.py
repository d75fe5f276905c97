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
    path: list[base.Node] = []
    if not sequence.root.alive:
      return base.PrefixMatch(0, path)
    keys = self._rows.keys[sequence.row]
    node, depth = self._place(sequence)
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
      bundle = keys[depth : min(depth + self._bundle, num_tokens)].tobytes()
      child = node.children.by_key.get(bundle)
      if child is None:
        child, shared = self._nearest(node, bundle)
        if child is not None:
          path.append(child)
          depth += shared
        break
      node = child
    return base.PrefixMatch(depth, path)

  def _insert(
    self, sequence: sequences.Sequence, num_tokens: int, released: list[int]
  ) -> None:
    """Publishes what a sequence has not published yet, up to `num_tokens`."""
    row = sequence.row
    if self._rows.growing[row]:
      self._grow(sequence.node, row, num_tokens)
      return
    self.detach(sequence)  # Less than a bundle; taken over again below.
    node, depth = self._place(sequence)
    keys = self._rows.keys[row]
    while True:
      end = self.end(node)
      if depth < end:
        reached, depth = self._join(sequence, node, depth, num_tokens, released)
        if reached == num_tokens:
          break  # All there, a partial tail as part of the node's.
        if reached < end:
          node = self._attach(sequence, self._split(node, depth), num_tokens)
          break
        if depth < end:  # Our rows go on where its partial tail ends.
          self._take_over(node, sequence, num_tokens)
          break
      elif depth == num_tokens:
        break
      child = self._next(node, keys, depth, num_tokens)
      if child is None:
        node = self._attach(sequence, node, num_tokens)
        break
      node = child
    if node.owner != row:
      self._rows.published[row] = depth
    sequence.node = node

  def _join(
    self,
    sequence: sequences.Sequence,
    node: base.Node,
    depth: int,
    num_tokens: int,
    released: list[int],
  ) -> tuple[int, int]:
    """Follows a node from `depth`, and shares the whole bundles passed.

    Returns:
      How far the node has the sequence's tokens, at most to `num_tokens`, and
      where the last whole bundle of that ends.
    """
    keys = self._rows.keys[sequence.row]
    stop = min(self.end(node), num_tokens)
    reached = depth + self._common(node, keys, depth, stop)
    whole = reached - reached % self._bundle
    self._share(sequence, node, depth, whole, released)
    return reached, whole

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
      for step in range(1, self._bundle // size + 1):
        at, columns = rows, num_tokens // size - step
        # A page that holds rows of a partial tail has its entry already.
        fresh = published <= columns * size
        if b"\0" in fresh.tobytes():
          at, columns = rows[fresh], columns[fresh]
        pages = self._rows.pages_at(group, at, columns)
        pool.publish(pages.astype(np.intp))
    self._rows.published[rows] = num_tokens

  def _common(
    self, node: base.Node, keys: np.ndarray, depth: int, stop: int
  ) -> int:
    """How far the keys follow a node from `depth`, at most to `stop`."""
    mine, first = keys[depth:stop], depth - node.start
    if node.data.startswith(mine.data, first * base.TOKEN_BYTES):
      return stop - depth
    return forest.common_length(node.key[first : stop - node.start], mine)

  def _next(
    self, node: base.Node, keys: np.ndarray, depth: int, num_tokens: int
  ) -> base.Node | None:
    """The child to go on with: same bundle, or one is a part of the other."""
    if node.children is None:
      return None
    stop = min(depth + self._bundle, num_tokens)
    bundle = keys[depth:stop].tobytes()
    child = node.children.by_key.get(bundle)
    if child is None:
      child, shared = self._nearest(node, bundle)
      if child is not None and shared < min(stop, self.end(child)) - depth:
        return None
    return child

  def _attach(
    self, sequence: sequences.Sequence, node: base.Node, num_tokens: int
  ) -> base.Node:
    """Publishes rows up to `num_tokens` below a node's end, a whole bundle."""
    if node.children is None and node.parent is not None:
      self._take_over(node, sequence, num_tokens)
      return node
    row, start = sequence.row, node.sealed_end
    leaf = base.Node(sequence.root, node, start, self._clock)
    leaf.priority = sequence.priority
    self._own(leaf, row)
    self._publish(row, start, num_tokens)
    self._set_published(leaf, row, start, num_tokens)
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
    if aligned < end:
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
    self._set_published(node, row, published, num_tokens)

  def _own(self, node: base.Node, row: int) -> None:
    """Makes a node's key and pages views of a row."""
    node.owner, node.data = row, b""
    node.key = self._rows.keys[row][node.start :]
    node.pages = tuple(
      [
        table_rows[row][node.start // pool.page_size :]
        for pool, table_rows in zip(
          self._pools, self._rows.table_rows, strict=True
        )
      ]
    )

  def _publish(self, row: int, start: int, stop: int) -> None:
    """Enters the pages of `[start, stop)`, but not one that is begun before."""
    for group, pool in enumerate(self._pools):
      first, last = -(-start // pool.page_size), -(-stop // pool.page_size)
      if first < last:
        pages = self._rows.table_rows[group][row][first:last]
        pool.publish(pages.astype(np.intp))

  def _set_published(
    self, node: base.Node, row: int, start: int, num_tokens: int
  ) -> None:
    if self._events is not None:
      self._report_stored(node, start, num_tokens)
    self._rows.published[row] = num_tokens
    self._rows.growing[row] = num_tokens - node.start >= self._bundle

  def _split(self, node: base.Node, at: int) -> base.Node:
    """Cuts a node in two at a bundle; moves no K/V, changes no reference.

    Returns:
      The new upper part; `node` stays the lower one.
    """
    parent, size = node.parent, at - node.start
    if parent is None or parent.children is None:
      raise AssertionError("the top has no tokens to split")
    counts = [size // pool.page_size for pool in self._pools]
    parts = list(zip(node.pages, counts, strict=True))
    upper = base.Node(node.root, parent, node.start, node.created)
    upper.seal(
      at,
      node.key[:size].tobytes(),
      tuple([ids[:count].astype(np.intp) for ids, count in parts]),
    )
    upper.last_used, upper.hits = node.last_used, node.hits
    upper.priority = node.priority
    parent.children.add(self._first_key(node), upper)
    node.start, node.parent = at, upper
    node.key = node.key[size:]
    node.pages = tuple([ids[count:] for ids, count in parts])
    if node.owner < 0:
      self._keep(node, node.sealed_end)
    else:
      self._rows.growing[node.owner] = self.end(node) - at >= self._bundle
    upper.children = base.Children()
    upper.children.add(self._first_key(node), node)
    return upper

  def _reach(self, node: base.Node, stop: int) -> list[base.Node]:
    """The part of a node up to a whole bundle at `stop`, as nodes."""
    return [self._split(node, stop)] if node.start < stop else []

  def _forget(self, node: base.Node) -> None:
    """A radix node is found through its parent only."""
