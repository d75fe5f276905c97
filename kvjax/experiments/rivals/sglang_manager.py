"""SGLang's radix cache and page allocator behind the schedule's interface."""

import array
import importlib
import importlib.util
import pathlib
import sys
import types
from typing import Any

from kvjax.experiments import churn
from kvjax.experiments.rivals import stand_ins

_PACKAGES = (
  "sglang sglang.srt sglang.srt.mem_cache sglang.srt.mem_cache.unified_cache"
  " sglang.srt.observability sglang.srt.mem_cache.cpp_utils"
  " sglang.srt.disaggregation sglang.kernels sglang.kernels.ops"
  " sglang.kernels.ops.memory sglang.kernels.ops.kvcache"
)


def _stand_ins() -> dict[str, dict[str, Any]]:
  plain = (
    "sglang.srt.environ sglang.srt.runtime_context"
    " sglang.srt.observability.metrics_collector"
    " sglang.srt.mem_cache.memory_pool"
    " sglang.srt.mem_cache.cpp_utils.native_hash"
    " sglang.srt.disaggregation.kv_events sglang.kernels.ops.memory.allocator"
    " sglang.kernels.ops.kvcache.mla_buffer"
  )
  platform = types.SimpleNamespace(
    capabilities=types.SimpleNamespace(supports_triton=False)
  )
  return {name: {} for name in plain.split()} | {
    "sglang.srt.environ": {"envs": stand_ins.Anything()},
    "sglang.srt.utils": {
      "get_bool_env_var": lambda *_: False,
      "is_hip": lambda: False,
      "get_num_new_pages": None,
      "next_power_of_2": lambda n: 1 << max(0, n - 1).bit_length(),
    },
    "sglang.srt.utils.common": {"ceil_align": lambda x, y: -(-x // y) * y},
    "sglang.srt.platforms": {"current_platform": platform},
  }


class _SglangRow:
  """One request as SGLang's scheduler keeps it."""

  def __init__(self, request: churn.Request, row: int):
    self.ids = array.array("q", request.prompt)
    self.row = row
    self.protected = 0
    self.node: Any = None


class SglangManager:
  """SGLang's Python radix cache and paged allocator, as its scheduler calls.

  Decoding is `alloc_decode` over the batch, which on a CPU is a few operations
  on torch tensors, and a scatter into the request-to-token table.
  """

  name = "sglang_python"

  def __init__(
    self,
    source: str,
    *,
    num_pages: int,
    page_size: int,
    max_sequences: int = 65,
    max_length: int = 2048,
  ):
    stand_ins.install(source, _PACKAGES, _stand_ins())
    load = importlib.import_module
    self._torch = load("torch")
    self._torch.set_num_threads(1)
    self._page_size = page_size
    allocator = load("sglang.srt.mem_cache.allocator")
    paged: Any = load("sglang.srt.mem_cache.allocator.paged")
    paged.get_num_new_pages = _num_new_pages
    self._pages = allocator.PagedTokenToKVPoolAllocator(
      num_pages * page_size, page_size, self._torch.int64, "cpu", None, False
    )
    self._table = self._torch.zeros(
      (max_sequences, max_length), dtype=self._torch.int64
    )
    self._free_rows = list(range(max_sequences))
    self._members: list[_SglangRow] = []
    self._rows = self._lengths = self._torch.zeros(0, dtype=self._torch.int64)
    self._make_tree(load)

  def _make_tree(self, load: Any) -> None:
    self._base = load("sglang.srt.mem_cache.base_prefix_cache")
    radix = load("sglang.srt.mem_cache.radix_cache")
    parameters = load("sglang.srt.mem_cache.cache_init_params")
    self._key = radix.RadixKey
    self._tree = radix.RadixCache(
      parameters.CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=self._pages,
        page_size=self._page_size,
        eviction_policy="lru",
      )
    )
    self._tree.update_eviction_metrics = lambda *_, **__: None

  def admit(self, request: churn.Request) -> tuple[Any, int] | None:
    row = _SglangRow(request, self._free_rows[-1])
    found, node = self._match(row.ids[:-1])
    self._lock(node)
    size, length = self._page_size, len(row.ids)
    fresh = self._take(-(-(length - len(found)) // size) * size)
    if fresh is None:
      self._unlock(node)
      return None
    self._free_rows.pop()
    self._table[row.row, : len(found)] = found
    self._table[row.row, len(found) : length] = fresh[: length - len(found)]
    row.node, row.protected = node, len(found)
    return row, len(found)

  def prefill(self, handles: list[Any]) -> None:
    for row in handles:
      self._publish(row)
      shared, node = self._match(row.ids)
      self._table[row.row, : len(shared)] = shared
      self._unlock(row.node)
      self._lock(node)
      row.node, row.protected = node, len(shared)

  def decode(self, handles: list[Any], tokens: list[int]) -> bool:
    if handles != self._members:
      tensor = self._torch.tensor
      self._members = handles
      self._rows = tensor([row.row for row in handles])
      self._lengths = tensor([len(row.ids) for row in handles])
    last = self._table[self._rows, self._lengths - 1]
    lengths = self._lengths + 1
    crossing = len(handles) * self._page_size
    if self._pages.available_size() < crossing:
      self._evict(crossing - self._pages.available_size())
    slots = self._pages.alloc_decode(lengths, lengths, last)
    if slots is None:
      return False
    self._table[self._rows, self._lengths] = slots
    self._lengths = lengths
    for row, token in zip(handles, tokens, strict=True):
      row.ids.append(token)
    return True

  def finish(self, handle: Any) -> None:
    whole = self._publish(handle)
    slots = self._table[handle.row, : len(handle.ids)]
    if whole < len(slots):
      self._pages.free_segment(slots[whole:], start_pos=whole)
    self._unlock(handle.node)
    self._free_rows.append(handle.row)

  def _publish(self, row: _SglangRow) -> int:
    """Inserts a row's whole pages, frees duplicates; returns their tokens."""
    whole = len(row.ids) // self._page_size * self._page_size
    slots = self._table[row.row, :whole].clone()
    self._insert(row.ids, slots, row.protected)
    return whole

  def _take(self, count: int) -> Any:
    lacking = count - self._pages.available_size()
    if lacking > 0:
      self._evict(lacking)
    return self._pages.alloc(count)

  def _match(self, ids: Any) -> tuple[Any, Any]:
    match = self._tree.match_prefix(
      self._base.MatchPrefixParams(key=self._key(ids))
    )
    node = match.last_device_node
    return self._tree.path_device_indices(node), node

  def _insert(self, ids: Any, slots: Any, protected: int) -> None:
    result = self._tree.insert(
      self._base.InsertParams(key=self._key(ids), value=slots)
    )
    if result.prefix_len > protected:
      self._pages.free_segment(
        slots[protected : result.prefix_len], start_pos=protected
      )

  def _lock(self, node: Any) -> None:
    self._tree.inc_lock_ref(node)

  def _unlock(self, node: Any) -> None:
    self._tree.dec_lock_ref(node)

  def _evict(self, num_tokens: int) -> None:
    self._tree.evict(self._base.EvictParams(num_tokens=num_tokens))


def _num_new_pages(
  seq_lens: Any, page_size: int, prefix_lens: Any = None, decode: bool = False
) -> int:
  """Pages that a decode step begins, as SGLang's helper counts them."""
  del prefix_lens, decode
  return int(((seq_lens - 1) % page_size == 0).sum())


class SglangRustManager(SglangManager):
  """The same with SGLang's tree core in Rust, from its compiled extension."""

  name = "sglang_rust"

  def _make_tree(self, load: Any) -> None:
    folder = pathlib.Path(
      sys.modules["sglang.srt.mem_cache"].__path__[0], "rust_tree_core"
    )
    file = next(folder.glob("mem_cache.*.so"))
    spec: Any = importlib.util.spec_from_file_location("mem_cache", file)
    self._core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(self._core)
    self._tree = self._core.RustUnifiedTreeCoreBinding(
      self._core.TreeCoreInitParamsBinding(
        eviction_policy="lru", page_size=self._page_size, device="cpu"
      ),
      [0],
    )
    self._root = self._tree.root_node_handle(None)
    self._locks: dict[Any, list[Any]] = {}

  def _match(self, ids: Any) -> tuple[Any, Any]:
    whole = len(ids) // self._page_size * self._page_size
    match = self._tree.match_prefix(
      self._core.MatchParamsBinding(key=ids[:whole])
    )
    node = match.last_device_node_id
    return self._tree.collect_full_device_indices(node, self._root), node

  def _insert(self, ids: Any, slots: Any, protected: int) -> None:
    result = self._tree.insert(
      self._core.InsertParamsBinding(
        key=ids[: len(slots)], value=slots, prev_prefix_len=protected
      )
    )
    for _, freed in result.cache_actions:
      self._free(freed)

  def _lock(self, node: Any) -> None:
    self._locks.setdefault(node, []).append(self._tree.inc_lock_ref(node, []))

  def _unlock(self, node: Any) -> None:
    lock = self._locks[node].pop()
    self._tree.dec_lock_ref(
      node,
      self._core.DecLockRefParamsBinding(
        node_id=lock.node_id, component_lock_uuids=lock.component_lock_uuids
      ),
      False,
    )

  def _evict(self, num_tokens: int) -> None:
    freed = 0
    self._tree.evict_device_start(0, num_tokens)
    while freed < num_tokens:
      found = self._tree.evict_device_next_node(0, {0: freed})
      if found.node_id is None:
        if not found.made_progress:
          break
        continue
      result = self._tree.evict_device_leaf(found.node_id)
      freed += result.tracker.get(0, 0)
      self._free(result.new_device_frees.get(0, ()))
    self._tree.evict_device_end(0)

  def _free(self, segments: Any) -> None:
    for slots in segments:
      self._pages.free_segment(slots, start_pos=0)
