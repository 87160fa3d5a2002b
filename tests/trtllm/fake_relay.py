"""A FAKE of the names of TensorRT-LLM's batch manager that the relay uses: KV cache managers with
the real layout and offsets, and transceivers that move blocks when they are polled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from fake_engine_world import WORLD, Offered


class LlmRequestType:
    LLMREQUEST_TYPE_CONTEXT_ONLY = "context"
    LLMREQUEST_TYPE_GENERATION_ONLY = "generation"


class AttentionType:
    DEFAULT = "default"


@dataclass
class LlmRequest:
    request_id: int
    max_new_tokens: int
    input_tokens: list[int]
    sampling_config: Any
    is_streaming: bool
    llm_request_type: str = "both"
    context_phase_params: Any = None
    is_disagg_generation_transmission_complete: bool = False
    is_disagg_context_complete_state: bool = False


class KVCacheManager:
    """Blocks are handed out last first, and poisoned with NaN when they come back."""

    max_blocks_per_seq = 0

    def __init__(
        self,
        num_kv_heads_per_layer,
        size_per_head,
        tokens_per_block,
        blocks_per_window,
        max_num_sequences,
        max_beam_width,
        max_attention_window_vec,
        temp_attention_window_inputs,
        dtype,
        sink_token_length,
        stream,
        max_sequence_length,
        enable_block_reuse=False,
    ):
        ((window, (blocks, on_host)),) = blocks_per_window.items()
        assert [window] == max_attention_window_vec == [max_sequence_length]
        assert (on_host, sink_token_length, enable_block_reuse) == (0, 0, False)
        assert dtype == "bf16"
        (heads,) = set(num_kv_heads_per_layer)
        self._shape = len(num_kv_heads_per_layer), heads, tokens_per_block, size_per_head
        self.max_blocks_per_seq = window // tokens_per_block + 1  # room for one more, as upstream
        self._window, self._max_sequences = window, max_num_sequences
        self._blocks, self._sequences = blocks, {}

    def allocate_pools(self, use_uvm=False):
        layers, heads, size, head_dim = self._shape
        self._pool = torch.full((self._blocks, layers, 2, heads, size, head_dim), float("nan"))
        self._free = list(range(self._blocks))
        WORLD.pools[self._pool.data_ptr()] = self._pool

    def release_pools(self):
        del WORLD.pools[self._pool.data_ptr()]

    def add_sequence(self, request_id, input_length, beam_width, llm_request):
        assert request_id not in self._sequences
        assert len(self._sequences) < self._max_sequences, "no more sequences than room for them"
        assert (beam_width, len(llm_request.input_tokens)) == (1, input_length)
        needed = -(-input_length // self._shape[2])
        self._sequences[request_id] = [self._free.pop() for _ in range(needed)]

    def remove_sequence(self, request_id, llm_request):
        for block in self._sequences.pop(request_id):
            self._pool[block] = float("nan")
            self._free.append(block)

    def get_block_pool_pointers(self):
        return torch.tensor([[self._pool.data_ptr(), 0]], dtype=torch.int64)

    def get_layer_to_pool_mapping(self):
        return torch.tensor([[0, layer] for layer in range(self._shape[0])], dtype=torch.int32)

    def get_primary_pool_data(self, layer_idx):
        return self._pool.flatten(3)[:, layer_idx]

    def get_batch_cache_block_ids(self, request_ids, window_size):
        assert window_size == self._window
        return [[self._sequences[request_id]] for request_id in request_ids]

    def copy_block_offsets(self, output, output_slot_offset, request_id):
        assert output.shape[-1] == self.max_blocks_per_seq
        for index, block in enumerate(self._sequences[request_id]):
            for field in (0, 1):
                entry = block * self._shape[0] * 2 + field
                output[0, output_slot_offset, field, index] = entry
        return len(self._sequences[request_id])


class CacheTransceiver:
    def __init__(
        self,
        cache_manager,
        num_kv_heads_per_layer,
        size_per_head,
        tokens_per_block,
        world_config,
        attention_layer_num_per_pp,
        dtype,
        attention_type,
        cache_transceiver_config=None,
    ):
        self._manager, self._receiving, self._sent = cache_manager, [], []
        layers = attention_layer_num_per_pp[0]
        (heads,) = set(num_kv_heads_per_layer)
        assert cache_manager._shape == (layers, heads, tokens_per_block, size_per_head)
        assert cache_transceiver_config.backend == "UCX"

    def request_and_receive_async(self, request):
        assert request.llm_request_type == LlmRequestType.LLMREQUEST_TYPE_GENERATION_ONLY
        self._receiving.append(request)

    def check_gen_transfer_status(self, at_least_request_num):
        assert at_least_request_num == 0
        if "relay" in WORLD.stalled:
            return
        for request in self._receiving:
            manager, state = self._manager, request.context_phase_params.opaque_state
            blocks = manager._sequences[request.request_id]
            into = torch.empty(len(blocks), *manager._pool.shape[1:])
            WORLD.fetch(state, manager._shape, into)
            manager._pool[blocks] = into
            request.is_disagg_generation_transmission_complete = True
        self._receiving.clear()

    def respond_and_send_async(self, request):
        assert request.llm_request_type == LlmRequestType.LLMREQUEST_TYPE_CONTEXT_ONLY
        from fake_engines import ContextPhaseParams

        manager, number = self._manager, request.request_id
        offered = Offered(
            manager._shape,
            lambda: manager._pool[manager._sequences[number]],
            lambda: self._sent.append(request),
        )
        state = WORLD.offer("relay", offered)
        request.context_phase_params = ContextPhaseParams([], number, state, None)

    def check_context_transfer_status(self, at_least_request_num):
        assert at_least_request_num == 0
        for request in self._sent:
            request.is_disagg_context_complete_state = True
        self._sent.clear()

    def cancel_request(self, request):
        """True when the transfer had not begun; here, when nobody has fetched it yet."""
        if request in self._receiving:
            self._receiving.remove(request)
            return "begun" not in WORLD.stalled
        state = request.context_phase_params and request.context_phase_params.opaque_state
        return WORLD.offers.pop(state, None) is not None
