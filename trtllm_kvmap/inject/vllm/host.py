"""What vLLM says of itself, for the start-up checks."""

from __future__ import annotations

from typing import Any

from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.inject.connector.checks import HostReport


def describe_host(vllm_config: Any, kv_cache_config: Any, *, layout_proven: bool) -> HostReport:
    """From vLLM's VllmConfig and KVCacheConfig. Raises MismatchError when a failed load would fail
    its request, or blocks are not of one kind.
    """
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise MismatchError(
            f"vLLM's kv_load_failure_policy is {policy!r}, so that a request whose source is gone "
            f"would fail; set it to 'recompute'."
        )
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise MismatchError(
            f"vLLM keeps {len(kv_cache_config.kv_cache_groups)} kinds of cache for this model; a "
            f"map needs full attention in every layer."
        )
    (group,) = kv_cache_config.kv_cache_groups
    spec, parallel = group.kv_cache_spec, vllm_config.parallel_config
    return HostReport(
        name="vLLM",
        kv_shape=(len(group.layer_names), spec.num_kv_heads, spec.head_size),
        tokens_per_block=spec.block_size,
        cache_dtype=str(spec.dtype).removeprefix("torch."),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        block_reuse=vllm_config.cache_config.enable_prefix_caching,
        host_offload=vllm_config.cache_config.kv_offloading_size is not None,
        windows=(getattr(spec, "sliding_window", None),),
        layout_proven=layout_proven,
        speculation=vllm_config.speculative_config is not None,
    )
