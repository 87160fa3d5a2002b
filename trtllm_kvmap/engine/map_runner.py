"""The map engine at work: pools of two KV cache managers in, the target's blocks written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.engine.host import trt
from trtllm_kvmap.engine.plugin_library import plugin_creator
from trtllm_kvmap.engine.ports import OUTPUT, Port
from trtllm_kvmap.engine.relay_pool import RelayPool
from trtllm_kvmap.errors import UnavailableError


class MapRunner:
    """One sequence at a time, in place, on the device's current stream. Not thread-safe."""

    def __init__(self, path: Path, ports: tuple[Port, ...], config: PipelineConfig) -> None:
        plugin_creator()
        self._ports, self._config = ports, config
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise UnavailableError(
                f"{path} cannot be read by this TensorRT; its log says why. Build the pipeline on "
                f"this machine."
            )
        self._context: Any = self._engine.create_execution_context()

    def map(
        self,
        source: RelayPool,
        target: RelayPool,
        request_id: int,
        first: int,
        token_ids: torch.Tensor,
    ) -> None:
        """Map the tokens at positions ``first`` .. ``first`` + len(token_ids) - 1 of a request that
        both managers hold; returns when they are written.

        ``token_ids`` is int32 on the CPU. Raises UnavailableError when the engine refuses, or says
        that it mapped fewer.
        """
        device, count = target.device, len(token_ids)
        numbers: dict[str, torch.Tensor] = {
            "host_spans": torch.tensor([[first, count]], dtype=torch.int32),
            "host_num_blocks": torch.tensor(
                [source.num_blocks, target.num_blocks], dtype=torch.int32
            ),
            "token_ids": token_ids.to(device),
        }
        for name, pool in (("source", source), ("target", target)):
            offsets = pool.block_offsets(request_id, self._config.max_blocks)
            numbers[f"host_{name}_kv_cache_pool_pointers"] = pool.pointers
            numbers[f"host_{name}_kv_cache_pool_mapping"] = pool.mapping
            numbers[f"host_{name}_kv_cache_block_offsets"] = offsets
            numbers[f"{name}_kv_cache_block_offsets"] = offsets.to(device)
        mapped = torch.full((1,), -1, dtype=torch.int32, device=device)
        self._enqueue(numbers, mapped)
        if int(mapped[0]) != count:
            raise UnavailableError(
                f"The map engine mapped {int(mapped[0])} of {count} tokens: blocks of the rest are "
                f"missing in the relay."
            )

    def _enqueue(self, numbers: dict[str, torch.Tensor], mapped: torch.Tensor) -> None:
        context = self._context
        for port in self._ports:
            tensor = numbers[port.name]
            if port.least != port.most:
                context.set_input_shape(name=port.name, shape=tuple(tensor.shape))
            context.set_tensor_address(name=port.name, memory=tensor.data_ptr())
        context.set_tensor_address(name=OUTPUT, memory=mapped.data_ptr())
        stream = torch.cuda.current_stream(mapped.device) if mapped.is_cuda else None
        handle = stream.cuda_stream if stream is not None else 0
        if not context.execute_async_v3(stream_handle=handle):
            raise UnavailableError("The map engine refused its inputs; TensorRT's log says why.")
        if stream is not None:
            # The inputs live until then, and the blocks are sent on another stream.
            stream.synchronize()
