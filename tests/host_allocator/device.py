"""A stand-in for the device: what every page row holds, as the step says.

A row's content is the whole prefix that it was computed under, so that a table
which shows a wrong, stale or unwritten row is found out by comparison.
"""

import numpy as np

from host_allocator import allocator
from host_allocator import sequences
from host_allocator import steps
from host_allocator import tables

UNWRITTEN = ("nobody",)


class Device:
  """Runs steps of an allocator on page rows that remember their prefixes."""

  def __init__(self, cache: allocator.KVAllocator):
    self.cache = cache
    self.rows = [
      [[UNWRITTEN] * pool.page_size for _ in range(pool.num_pages + 1)]
      for pool in cache.pools
    ]

  def run(self, plan: steps.StepPlan) -> None:
    """Copies, then writes, what the packed buffer asks for; checks the rest."""
    cache = self.cache
    shapes = tables.step_shapes(4096, cache.max_sequences)
    shape = tables.smallest_shape(shapes, plan.num_tokens, len(plan.rows))
    packing = tables.Packing(shape, cache.table_widths)
    buffer = cache.pack(plan, packing)
    for group, (sources, destinations, counts) in enumerate(plan.copies):
      rows = self.rows[group]
      assert not set(sources.tolist()) & set(destinations.tolist())
      gathered = [
        rows[source][:count]
        for source, count in zip(sources, counts, strict=True)
      ]
      for page, content in zip(destinations, gathered, strict=True):
        rows[page][: len(content)] = content
    field = lambda name, group=None: packing.field(buffer, name, group)
    starts = field("query_starts")
    for member, sequence in enumerate(plan.sequences):
      known = sequence.tokens.tolist()
      for i in range(starts[member], starts[member + 1]):
        position = field("positions")[i]
        assert field("sequence_rows")[i] == member
        assert field("tokens")[i] == known[position]
        for group, pool in enumerate(cache.pools):
          page, offset = divmod(int(field("slots", group)[i]), pool.page_size)
          if page:
            self.rows[group][page][offset] = self.content(sequence, position)
      for group in range(len(cache.pools)):
        table = field("page_table", group)[member]
        self.check(sequence, table, int(field("context_lens")[member]), group)

  def content(self, sequence: sequences.Sequence, position: int):
    root = sequence.root.key
    return (
      *root[:1],
      *root[4:],
      *self.cache.rows.keys[sequence.row][: position + 1].tolist(),
    )

  def check(self, sequence, table, length, group) -> None:
    """Every visible row holds what the sequence's own prefix computes."""
    size = self.cache.pools[group].page_size
    for position in range(length):
      page, offset = table[position // size], position % size
      found = self.rows[group][page][offset]
      assert page, f"row {position} lies in the null page"
      assert found == self.content(sequence, position), (position, page, found)
    assert not np.any(table[-(-length // size) :])

  def check_all(self) -> None:
    """The same for all open sequences between steps, and a clean audit."""
    cache = self.cache
    findings = cache.audit()
    assert not findings, findings
    for sequence in cache.rows.open_sequences():
      for group in range(len(cache.pools)):
        table = cache.rows.table_rows[group][sequence.row]
        present = int(cache.rows.present[sequence.row])
        self.check(sequence, table, present, group)
