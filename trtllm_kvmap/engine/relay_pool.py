"""One half of the relay: a KV cache manager shaped like one model, and its transceiver."""

from __future__ import annotations

from typing import Any

import torch

from trtllm_kvmap.artifact.native import SinkEntry
from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.engine.engine_process import transceiver_config
from trtllm_kvmap.engine.host import batch, bindings, data_type
from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.mapper.paging import Places
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.spec.layout import BlockTable
from trtllm_kvmap.spec.model import ModelSpec


class RelayPool:
    """Room for ``relay_requests`` sequences of ``spec``'s KV, and the way in and out.

    Block reuse is off: what passes through the relay belongs to one request and is forgotten.
    Raises MismatchError when the manager's blocks are not those of ``spec``.
    """

    def __init__(self, spec: ModelSpec, config: PipelineConfig) -> None:
        layers, heads, head_dim = spec.kv_shape
        self._spec, self._window = spec, config.max_blocks * config.tokens_per_block
        self._tokens_per_block = config.tokens_per_block
        dtype = data_type(config.dtype)
        stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
        self._manager: Any = batch.KVCacheManager(
            num_kv_heads_per_layer=[heads] * layers,
            size_per_head=head_dim,
            tokens_per_block=config.tokens_per_block,
            # (blocks on the GPU, blocks on the host)
            blocks_per_window={self._window: (config.relay_requests * config.max_blocks, 0)},
            max_num_sequences=config.relay_requests,
            max_beam_width=1,
            max_attention_window_vec=[self._window],
            temp_attention_window_inputs=None,
            dtype=dtype,
            sink_token_length=0,
            stream=stream,
            max_sequence_length=self._window,
            enable_block_reuse=False,
        )
        self._manager.allocate_pools(False)
        self.transceiver: Any = batch.CacheTransceiver(
            cache_manager=self._manager,
            num_kv_heads_per_layer=[heads] * layers,
            size_per_head=head_dim,
            tokens_per_block=config.tokens_per_block,
            world_config=bindings.WorldConfig(
                tensor_parallelism=1, pipeline_parallelism=1, rank=0, gpus_per_node=1
            ),
            attention_layer_num_per_pp=[layers],
            dtype=dtype,
            attention_type=batch.AttentionType.DEFAULT,
            cache_transceiver_config=transceiver_config(config),
        )
        self.pool = self._view()
        self.pointers: torch.Tensor = self._manager.get_block_pool_pointers().view(1, 2)
        self.mapping: torch.Tensor = self._manager.get_layer_to_pool_mapping()
        if tuple(self.mapping.shape) != (layers, 2):
            raise MismatchError(
                f"The relay's manager maps layers to pools as {tuple(self.mapping.shape)}; one "
                f"pool of {layers} layers is needed."
            )

    def _view(self) -> KvPool:
        """The manager's blocks of each layer, [num_blocks, 2, heads * tokens * head_dim]."""
        layers, heads, head_dim = self._spec.kv_shape
        size = heads * self._tokens_per_block * head_dim
        views = []
        for layer in range(layers):
            held = self._manager.get_primary_pool_data(layer)
            if held.shape[1] != 2 or held[0, 0].numel() != size:
                raise MismatchError(
                    f"The relay's blocks of layer {layer} are {tuple(held.shape)}; "
                    f"{self._spec.name} needs [num_blocks, 2, {size}]."
                )
            views.append(held.view(held.shape[0], 2, heads, self._tokens_per_block, head_dim))
        return KvPool(tuple(v[:, 0] for v in views), tuple(v[:, 1] for v in views))

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def num_blocks(self) -> int:
        return int(self.pool.keys[0].shape[0])

    def add(self, request_id: int, num_tokens: int, request: Any) -> None:
        """Give blocks to a sequence of ``num_tokens``."""
        self._manager.add_sequence(request_id, num_tokens, 1, request)

    def remove(self, request_id: int, request: Any) -> None:
        self._manager.remove_sequence(request_id, request)

    def block_offsets(self, request_id: int, max_blocks: int) -> torch.Tensor:
        """int32 [1, 1, 2, max_blocks] on the CPU, as the manager tells its attention plugin; -1
        where the sequence has no block.
        """
        held = int(self._manager.max_blocks_per_seq)
        table = torch.full((1, 1, 2, held), -1, dtype=torch.int32)
        self._manager.copy_block_offsets(table, 0, request_id)
        offsets = torch.full((1, 1, 2, max_blocks), -1, dtype=torch.int32)
        shared = min(held, max_blocks)
        offsets[..., :shared] = table[..., :shared]
        return offsets

    def place(self, request_id: int, entry: SinkEntry) -> None:
        """Write the KV of a sequence's first tokens; returns when it is there, because blocks are
        sent on another stream.
        """
        ids = self._manager.get_batch_cache_block_ids([request_id], self._window)[0][0]
        table = BlockTable(tuple(int(block) for block in ids), self._tokens_per_block)
        slots = torch.from_numpy(table.slot_mapping(0, len(entry.token_ids)))
        places = Places.of(slots, self._tokens_per_block, self.device)
        for views, numbers in (
            (self.pool.keys, entry.keys),
            (self.pool.values, entry.values),
        ):
            for layer, view in enumerate(views):
                places.write(view, numbers[layer].transpose(0, 1).to(self.device))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        self._manager.release_pools()
