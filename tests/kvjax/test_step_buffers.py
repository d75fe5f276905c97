"""Packed steps on the device, while the host goes on packing."""

import jax
import numpy as np

import kvjax
from host_allocator import tables


def test_an_uploaded_step_keeps_what_it_said_while_others_are_packed():
  layout = kvjax.CacheLayout.uniform(
    num_layers=1, num_kv_heads=1, head_dim=8, page_size=4
  )
  host = kvjax.KVCache(layout, num_pages=64, max_sequences=2).allocator
  packing = tables.Packing(tables.StepShape(2, 2), host.table_widths)
  members = [host.open([1, 2, 3]), host.open([4, 5])]
  host.commit(host.plan([(each, each.num_tokens) for each in members]))
  batch = host.batch(members)
  uploads = []
  for token in range(40):
    host.append(batch, [token, token])
    plan = host.plan(batch)
    packed = host.pack(plan, packing)
    # `device_put` may alias the buffer, and copies it when it likes.
    uploads.append((jax.device_put(packed), np.array(packed)))
    del packed
    host.commit(plan)
    if token % 7 == 6:
      del uploads[::2]
  for on_device, copy in uploads:
    np.testing.assert_array_equal(np.asarray(on_device), copy)
