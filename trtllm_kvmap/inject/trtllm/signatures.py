"""Every name of ``tensorrt_llm`` that this shell uses, what it must look like, and the upstream
file it was read in (github.com/NVIDIA/TensorRT-LLM).

host.py holds the installed package to this list before anything runs, and the tests hold their fake
to it. A commit is one of the file's own history: no release tag could be read, so that 1.2.1 ships
this text of it is inferred from the file's place, which later releases have moved.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Read:
    """A name and where it was read: ``file`` at ``commit`` (None: the newest text that was at
    hand).
    """

    module: str
    file: str
    commit: str | None


@dataclass(frozen=True, slots=True)
class Method:
    """``owner.name(*parameters)``, self left out; ``owner`` is "" for a function."""

    read: Read
    owner: str
    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Attributes:
    """What is read of objects of ``owner``. With ``one_of``, any one of them is enough."""

    read: Read
    owner: str
    names: tuple[str, ...]
    one_of: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """The names as releases from ``first`` on have them, to the next Release's first."""

    first: tuple[int, int]
    connector: Read
    methods: tuple[Method, ...]
    attributes: tuple[Attributes, ...]


SCHEDULER, WORKER = "KvCacheConnectorScheduler", "KvCacheConnectorWorker"
ARGS = "TorchLlmArgs"

_SCHEDULER_METHODS = {
    "__init__": ("llm_args",),
    "build_connector_meta": ("scheduler_output",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "request_finished": ("request", "cache_block_ids"),
    "update_state_after_alloc": ("request", "block_ids"),
}
_WORKER_METHODS = {
    "__init__": ("llm_args",),
    "bind_connector_meta": ("metadata",),
    "get_connector_meta": (),
    "register_kv_caches": ("kv_cache_tensor",),
    "start_load_kv": ("stream",),
    "wait_for_layer_load": ("layer_idx", "stream"),
    "save_kv_layer": ("layer_idx", "stream"),
    "wait_for_save": ("stream",),
    "get_finished": ("finished_gen_req_ids", "started_loading_req_ids"),
}
_REQUEST_DATA = (
    "request_id",
    "new_tokens",
    "new_block_ids",
    "computed_position",
    "num_scheduled_tokens",
)
_ARGS = (
    "model",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "enable_attention_dp",
    "max_beam_width",
    "kv_cache_config",
    "scheduler_config",
    "speculative_config",
    "torch_compile_config",
    "attn_backend",
)
_KV_CACHE_CONFIG = (
    "enable_block_reuse",
    "host_cache_size",
    "max_attention_window",
    "tokens_per_block",
    "dtype",
)

_REQUEST_BINDINGS = Read(
    "tensorrt_llm.bindings.internal.batch_manager",
    "cpp/tensorrt_llm/nanobind/batch_manager/bindings.cpp",
    "cc8cd5af32504134c0c5778bac92540b5ca87ca9",
)
_LLM_ARGS = Read("tensorrt_llm.llmapi.llm_args", "tensorrt_llm/llmapi/llm_args.py", None)
_SALT_ID = Read(
    "tensorrt_llm.inputs.utils",
    "tensorrt_llm/inputs/utils.py",
    "bab0f2e6eea19bcce16c805101420ef7d9d62d75",
)


REQUEST = Attributes(
    _REQUEST_BINDINGS,
    "LlmRequest",
    ("request_id", "get_tokens", "context_remaining_length", "lora_task_id"),
)


def _release(first: tuple[int, int], connector: Read) -> Release:
    methods = [
        Method(connector, owner, name, parameters)
        for owner, table in ((SCHEDULER, _SCHEDULER_METHODS), (WORKER, _WORKER_METHODS))
        for name, parameters in table.items()
    ]
    return Release(
        first,
        connector,
        tuple(methods),
        (
            Attributes(connector, "RequestData", _REQUEST_DATA),
            Attributes(connector, "SchedulerOutput", ("new_requests", "cached_requests")),
            REQUEST,
            # Which salt a request carries: the string in the newest sources, before that a hash.
            Attributes(_REQUEST_BINDINGS, "LlmRequest", ("cache_salt", "cache_salt_id"), True),
            Attributes(_LLM_ARGS, ARGS, _ARGS),
            Attributes(_LLM_ARGS, "KvCacheConfig", _KV_CACHE_CONFIG),
            Attributes(_LLM_ARGS, "SchedulerConfig", ("capacity_scheduler_policy",)),
        ),
    )


RELEASES = (
    _release(
        (1, 2),
        Read(
            "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
            "tensorrt_llm/_torch/pyexecutor/kv_cache_connector.py",
            "3277953654b9b2863dae4f1cb81856b172837db4",
        ),
    ),
    _release(
        (1, 3),
        Read(
            "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
            "tensorrt_llm/_torch/pyexecutor/connectors/kv_cache_connector.py",
            "035ab91cad04b7b77a479a9526edecfbc742c661",
        ),
    ),
)
# What whoever sends requests calls, by keyword: these parameters, among others.
_LLM = Read("tensorrt_llm", "tensorrt_llm/llmapi/llm.py", None)
CALLS = (
    Method(_LLM, "LLM", "__init__", ("model", "kv_connector_config", "kv_cache_config")),
    Method(_LLM, "LLM", "generate_async", ("inputs", "sampling_params", "cache_salt")),
    Method(_LLM, "LLM", "shutdown", ()),
    Method(_LLM, "SamplingParams", "__init__", ("max_tokens", "temperature", "ignore_eos")),
    Method(
        _LLM_ARGS,
        "KvCacheConnectorConfig",
        "__init__",
        ("connector_module", "connector_scheduler_class", "connector_worker_class"),
    ),
)
# Turns a salt into a request's ``cache_salt_id``; needed where it has no ``cache_salt``.
SALT_ID = Method(_SALT_ID, "", "get_cache_salt_id", ("cache_salt",))


def release_of(version: str) -> Release | None:
    """The list that ``version`` ("1.2.1", "1.4.0rc1") is held to; None for one before the first."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    known = [r for r in RELEASES if r.first <= (int(parts[0]), int(parts[1]))]
    return known[-1] if known else None
