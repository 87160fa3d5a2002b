"""What the engine's arguments must be for mapped KV to be right in its pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.inject.connector.checks import HostReport, refusals
from trtllm_kvmap.spec.model import ModelSpec

# The attention backend whose blocks are [num_kv_heads, tokens_per_block, head_dim]; others store
# another order in a pool of the same shape.
HND_BACKEND = "TRTLLM"
POLICY = "GUARANTEED_NO_EVICT"


def require_engine(llm_args: Any, spec: ModelSpec, kvmap: KvMap | None) -> None:
    """Raise MismatchError with every refusal, or return. ``spec`` is the engine's model; without a
    ``kvmap`` the engine is a source.
    """
    report = host_report(llm_args, spec)
    found = [*engine_refusals(llm_args), *refusals(report, kvmap)]
    if found:
        part = "take mapped KV" if kvmap is not None else "export its KV"
        raise MismatchError(f"{report.name} cannot {part}: {'; '.join(found)}.")


def host_report(llm_args: Any, spec: ModelSpec) -> HostReport:
    """What the engine's arguments (TorchLlmArgs) say, for the checks that every host must pass."""
    cache = llm_args.kv_cache_config
    return HostReport(
        name="TensorRT-LLM",
        kv_shape=spec.kv_shape,
        tokens_per_block=cache.tokens_per_block,
        cache_dtype={"auto": spec.dtype, "fp8": "float8_e4m3fn"}.get(cache.dtype, cache.dtype),
        tensor_parallel=llm_args.tensor_parallel_size,
        pipeline_parallel=llm_args.pipeline_parallel_size,
        beam_width=llm_args.max_beam_width or 1,
        block_reuse=bool(cache.enable_block_reuse),
        host_offload=bool(cache.host_cache_size),
        windows=tuple(cache.max_attention_window or (None,)),
        layout_proven=llm_args.attn_backend == HND_BACKEND,
        speculation=llm_args.speculative_config is not None,
    )


def engine_refusals(llm_args: Any) -> Iterator[str]:
    """One sentence for whatever this engine, and no other, can be set to that forbids a map."""
    cache = llm_args.kv_cache_config
    size = cache.tokens_per_block
    if size < 1 or size & (size - 1):
        yield f"tokens_per_block is {size}: it needs a power of two"
    if llm_args.context_parallel_size != 1:
        yield f"context parallelism is {llm_args.context_parallel_size}: a connector needs 1"
    if llm_args.enable_attention_dp:
        yield "attention data parallelism is on, and here is one scheduler for all ranks: off"
    policy = getattr(llm_args.scheduler_config.capacity_scheduler_policy, "name", None)
    if policy != POLICY:
        yield f"the capacity scheduler policy is {policy}: a connector needs {POLICY}"
    if llm_args.torch_compile_config is not None:
        yield (
            "torch.compile is on, and the layers' hooks that a map waits for are not proven under "
            "it: leave torch_compile_config out"
        )
    if getattr(cache, "use_kv_cache_manager_v2", False) is True:
        yield (
            "the KV cache manager is version 2, which preempts requests and keeps several pools: "
            "set kv_cache_config.use_kv_cache_manager_v2 to False"
        )
    if cache.dtype == "fp8":
        yield (
            "the cache is fp8, and a connector is not told its scales: set kv_cache_config.dtype "
            "to the model's own"
        )
