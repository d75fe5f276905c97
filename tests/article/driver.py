"""The article's requests, run through our allocator; nothing is computed."""

from host_allocator import allocator as allocators
from host_allocator import layout

KIB = 1024
MIB = 1024 * KIB
PAGE = 16
# The rows of one TP rank: 32 layers, 4 K/V heads of 128 in 16 bits.
GEOMETRY = {"num_kv_heads": 4, "head_dim": 128, "dtype": "float16"}


def one_group(page_size=PAGE):
  """All 32 layers in one group: a page is a whole bundle."""
  return layout.CacheLayout.uniform(
    num_layers=32, page_size=page_size, **GEOMETRY
  )


def two_groups(page_size=PAGE):
  """24 and 8 layers with pools of their own."""
  return layout.CacheLayout(
    tuple(
      layout.CacheGroup(
        name, num_layers=layers, page_size=page_size, **GEOMETRY
      )
      for name, layers in (("g0", 24), ("g1", 8))
    )
  )


def make(layout_, num_pages, **options):
  """An allocator for a handful of short sequences."""
  bounds = {"max_sequences": 8, "max_length": 256, **options}
  return allocators.KVAllocator(layout_, num_pages=num_pages, **bounds)


def compute(allocator, *sequences):
  """Computes every row that the sequences know; returns the step's plan."""
  plan = allocator.plan([(s, s.num_tokens - s.length) for s in sequences])
  allocator.commit(plan)
  return plan


def prefilled(allocator, tokens, **options):
  """Opens a sequence and computes what was not found."""
  sequence = allocator.open(list(tokens), **options)
  compute(allocator, sequence)
  return sequence


def copied_rows(plan):
  """Rows that the step copies, for each group."""
  return [int(counts.sum()) for _, _, counts in plan.copies]
