"""A FAKE of the few names of tensorrt_llm that the shell uses, as two releases have them.

Written by hand in the shape upstream has; test_signatures.py holds it to
trtllm_kvmap/inject/trtllm/signatures.py, as the shell holds the real package. No line of it is
upstream's, and what runs on it is no proof about the real engine.
"""

from __future__ import annotations

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from types import ModuleType
from typing import Any

VERSIONS = ("1.2.1", "1.4.0rc1")
CONNECTOR = {
    "1.2.1": "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
    "1.4.0rc1": "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
}


class KvCacheConnectorScheduler(ABC):
    def __init__(self, llm_args):
        self._llm_args = llm_args
        super().__init__()

    @abstractmethod
    def build_connector_meta(self, scheduler_output): ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...

    @abstractmethod
    def request_finished(self, request, cache_block_ids): ...

    @abstractmethod
    def update_state_after_alloc(self, request, block_ids): ...


class KvCacheConnectorWorker(ABC):
    def __init__(self, llm_args):
        self._llm_args = llm_args
        self._metadata = None
        super().__init__()

    def bind_connector_meta(self, metadata):
        self._metadata = metadata

    def get_connector_meta(self):
        return self._metadata

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor): ...

    @abstractmethod
    def start_load_kv(self, stream): ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx, stream): ...

    @abstractmethod
    def save_kv_layer(self, layer_idx, stream): ...

    @abstractmethod
    def wait_for_save(self, stream): ...

    @abstractmethod
    def get_finished(self, finished_gen_req_ids, started_loading_req_ids): ...


@dataclass
class RequestData:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class SchedulerOutput:
    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class CapacitySchedulerPolicy(Enum):
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    MAX_UTILIZATION = "MAX_UTILIZATION"


@dataclass
class SchedulerConfig:
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


@dataclass
class KvCacheConfig:
    enable_block_reuse: bool = True
    host_cache_size: int | None = None
    max_attention_window: list[int] | None = None
    tokens_per_block: int = 32
    dtype: str = "auto"
    use_kv_cache_manager_v2: bool = False


@dataclass
class TorchLlmArgs:
    model: str
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    enable_attention_dp: bool = False
    max_beam_width: int | None = 1
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative_config: Any = None
    torch_compile_config: Any = None
    attn_backend: str = "TRTLLM"


@dataclass
class KvCacheConnectorConfig:
    connector_module: str
    connector_scheduler_class: str
    connector_worker_class: str


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float
    ignore_eos: bool = False


@dataclass
class _Request:
    """What the bindings show of a request, and what the fake executor keeps in it."""

    request_id: int
    prompt_len: int
    tokens: list[int]
    max_new_tokens: int
    lora_task_id: int | None = None
    context_current_position: int = 0
    cached: int = 0  # found in the engine's own cache
    cancelled: bool = False
    error: str | None = None

    def get_tokens(self, beam: int) -> list[int]:
        return list(self.tokens)

    @property
    def context_remaining_length(self) -> int:
        return self.prompt_len - self.context_current_position


def get_cache_salt_id(cache_salt):
    """64 bits of a hash, as upstream; upstream's is blake3."""
    return int.from_bytes(hashlib.blake2b(cache_salt.encode(), digest_size=8).digest(), "little")


def make_modules(version: str) -> dict[str, ModuleType]:
    """The fake package of ``version``, by module name."""
    salt = "cache_salt_id" if version == "1.2.1" else "cache_salt"
    request = make_dataclass("LlmRequest", [(salt, Any, None)], bases=(_Request,))
    contents: dict[str, dict[str, Any]] = {
        "tensorrt_llm": {"__version__": version, "SamplingParams": SamplingParams},
        CONNECTOR[version]: {
            "KvCacheConnectorScheduler": KvCacheConnectorScheduler,
            "KvCacheConnectorWorker": KvCacheConnectorWorker,
            "RequestData": RequestData,
            "SchedulerOutput": SchedulerOutput,
        },
        "tensorrt_llm.bindings.internal.batch_manager": {"LlmRequest": request},
        "tensorrt_llm.llmapi.llm_args": {
            "TorchLlmArgs": TorchLlmArgs,
            "KvCacheConfig": KvCacheConfig,
            "SchedulerConfig": SchedulerConfig,
            "KvCacheConnectorConfig": KvCacheConnectorConfig,
        },
        "tensorrt_llm.inputs.utils": {"get_cache_salt_id": get_cache_salt_id},
    }
    modules = {}
    for name, values in contents.items():
        modules[name] = ModuleType(name, "A FAKE for tests.")
        modules[name].__file__ = __file__
        modules[name].__dict__.update(values)
    return modules


@contextmanager
def installed(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Import finds the fake, and the shell is imported anew against it."""
    ours = "trtllm_kvmap.inject.trtllm"

    def foreign(name: str) -> bool:
        # The package as well: its attributes are the modules that were imported before.
        return name in ("tensorrt_llm", ours) or name.startswith(("tensorrt_llm.", ours + "."))

    before = {name: module for name, module in sys.modules.items() if foreign(name)}
    for name in before:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if foreign(name)]:
            del sys.modules[name]
        sys.modules.update(before)
