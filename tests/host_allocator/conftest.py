"""Allocators of a few small pages, and a device to run their steps on."""

import pytest

from host_allocator import allocator
from host_allocator import layout
from tests.host_allocator import device as device_lib


class Bench:
  """An allocator with its device, and the walks that tests repeat."""

  def __init__(self, page_sizes=(4,), **options):
    groups = tuple(
      layout.CacheGroup(f"g{i}", 1, 1, 4, size)
      for i, size in enumerate(page_sizes)
    )
    defaults = {"num_pages": 32, "max_sequences": 8, "max_length": 64}
    self.cache = allocator.KVAllocator(
      layout.CacheLayout(groups), **(defaults | options)
    )
    self.device = device_lib.Device(self.cache)

  def run(self, *members):
    """One step: (sequence, rows), or a sequence for all its known tokens."""
    pairs = [
      member
      if isinstance(member, tuple)
      else (member, member.num_tokens - member.length)
      for member in members
    ]
    plan = self.cache.plan(pairs)
    self.device.run(plan)
    receipt = self.cache.commit(plan)
    self.device.check_all()
    return receipt

  def open(self, tokens, **options):
    """Opens and computes everything that was not matched."""
    sequence = self.cache.open(tokens, **options)
    if sequence.length < sequence.num_tokens:
      self.run(sequence)
    return sequence

  def decode(self, sequence, *tokens):
    """Appends and computes one token after the other."""
    for token in tokens:
      self.cache.append([sequence], [token])
      self.run(sequence)
    return sequence

  def store(self, tokens, **options):
    """Computes a prompt and closes it, so that it can be matched."""
    self.cache.close(self.open(tokens, **options))

  def matched(self, tokens, **options):
    """How many rows of a prompt need not be computed; nothing is kept."""
    sequence = self.cache.open(tokens, **options)
    self.device.check_all()
    self.cache.close(sequence)
    return sequence.matched_tokens


@pytest.fixture
def bench():
  return Bench


@pytest.fixture(params=["radix", "hash_chain"])
def indexed(request):
  """Makes benches with each of the two indexes."""
  return lambda *args, **kwargs: Bench(
    *args, prefix_index=request.param, **kwargs
  )
