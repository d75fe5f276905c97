"""vLLM's `KVCacheManager` behind the schedule's interface."""

import collections
import enum
import importlib
import logging
import types
from typing import Any

from kvjax.experiments import churn
from kvjax.experiments.rivals import stand_ins

_PACKAGES = (
  "vllm vllm.v1 vllm.v1.core vllm.v1.attention vllm.v1.attention.backends"
  " vllm.distributed vllm.v1.metrics vllm.v1.structured_output"
)


class _ReadOnlyList(collections.UserList):
  """Stands in for a wrapper that only forbids writing."""

  def __init__(self, items: list):
    self.data = items


def _quiet_logger(name: str) -> logging.Logger:
  logger = logging.getLogger(name)
  for method in ("info_once", "warning_once", "debug_once"):
    setattr(logger, method, lambda *_, **__: None)
  return logger


def _stand_ins() -> dict[str, dict[str, Any]]:
  events = enum.IntEnum("EngineCoreEventType", "QUEUED SCHEDULED PREEMPTED")
  reasons = enum.IntEnum(
    "FinishReason", "STOP LENGTH ABORT ERROR REPETITION", start=0
  )
  backends = enum.IntEnum(
    "MambaAttentionBackendEnum", "MAMBA1 MAMBA2 SHORT_CONV LINEAR GDN_ATTN"
  )
  structured = type(
    "StructuredOutputRequest",
    (),
    {"from_sampling_params": staticmethod(lambda _: None)},
  )
  platform = types.SimpleNamespace(
    register_custom_kv_cache_specs=lambda _: None
  )
  plain = (
    "vllm.multimodal vllm.multimodal.inputs vllm.multimodal.utils"
    " vllm.pooling_params vllm.sampling_params vllm.lora vllm.lora.request"
    " vllm.utils.mem_utils vllm.v1.metrics.stats"
  )
  return {name: {} for name in plain.split()} | {
    "vllm.logger": {"init_logger": _quiet_logger},
    "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
    "vllm.platforms": {"current_platform": platform},
    "vllm.utils.torch_utils": {"get_dtype_size": lambda dtype: dtype.itemsize},
    "vllm.v1.attention.backends.registry": {
      "MambaAttentionBackendEnum": backends
    },
    "vllm.distributed.kv_events": {"MEDIUM_GPU": "GPU"},
    "vllm.v1.utils": {"ConstantList": _ReadOnlyList},
    "vllm.v1.engine": {
      "EngineCoreEventType": events,
      "FinishReason": reasons,
    },
    "vllm.v1.structured_output.request": {
      "StructuredOutputRequest": structured
    },
  }


class VllmManager:
  """vLLM's `KVCacheManager`, called as its scheduler calls it."""

  name = "vllm"

  def __init__(self, source: str, *, num_pages: int, page_size: int):
    stand_ins.install(source, _PACKAGES, _stand_ins())
    load = importlib.import_module
    utils = load("vllm.v1.core.kv_cache_utils")
    interface = load("vllm.v1.kv_cache_interface")
    hashing = load("vllm.utils.hashing")
    manager = load("vllm.v1.core.kv_cache_manager")
    torch = load("torch")
    self._request = load("vllm.v1.request").Request
    utils.init_none_hash(hashing.sha256)
    self._hasher = utils.get_request_block_hasher(page_size, hashing.sha256)
    spec = interface.FullAttentionSpec(
      block_size=page_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    config = interface.KVCacheConfig(
      num_blocks=num_pages + 1,
      kv_cache_tensors=[],
      kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
    )
    self._manager = manager.KVCacheManager(
      config,
      max_model_len=8192,
      scheduler_block_size=page_size,
      hash_block_size=page_size,
      enable_caching=True,
    )
    self._hashed: tuple[int, Any] | None = None

  def admit(self, request: churn.Request) -> tuple[Any, int] | None:
    if self._hashed is None or self._hashed[0] != request.number:
      parameters = types.SimpleNamespace(
        max_tokens=len(request.output),
        extra_args=None,
        prompt_logprobs=None,
        skip_reading_prefix_cache=False,
      )
      made = self._request(
        str(request.number),
        request.prompt,
        parameters,
        None,
        block_hasher=self._hasher,
      )
      self._hashed = (request.number, made)
    made = self._hashed[1]
    blocks, found = self._manager.get_computed_blocks(made)[:2]
    granted = self._manager.allocate_slots(
      made, made.num_tokens - found, found, blocks
    )
    if granted is None:
      return None
    return made, found

  def prefill(self, handles: list[Any]) -> None:
    for made in handles:
      made.num_computed_tokens = made.num_tokens

  def decode(self, handles: list[Any], tokens: list[int]) -> bool:
    allocate = self._manager.allocate_slots
    for made, token in zip(handles, tokens, strict=True):
      made.append_output_token_ids(token)
      if allocate(made, 1) is None:
        return False
      made.num_computed_tokens += 1
    return True

  def finish(self, handle: Any) -> None:
    self._manager.free(handle)
