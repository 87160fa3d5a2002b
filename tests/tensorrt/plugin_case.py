"""A conformance case as a KvMap plugin sees it: fields, tensors, and host and device memory as
TensorRT-LLM lays them out. The emulated plugin takes host memory for the device's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from case_build import Built, build
from cases import Case
from harness import BF16, FLOAT, FP8, HALF, INT32, INT64, Tensor

from trtllm_kvmap.mapper.cuda import pack_map
from trtllm_kvmap.spec.rope import RopeParams, rope_table

PAGED, DENSE = 0, 1
CACHE_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")
TENSORRT_DTYPES = dict(zip(CACHE_DTYPES, (FLOAT, HALF, BF16, FP8), strict=True))
NUMPY_DTYPES = {np.dtype("int32"): INT32, np.dtype("int64"): INT64, np.dtype("float32"): FLOAT}
NUM_POSITIONS = 64


@dataclass
class PluginCase:
    """``arrays`` are the inputs by name, in order; ``output`` is the plugin's own."""

    case: Case
    built: Built
    fields: dict[str, np.ndarray]
    arrays: dict[str, np.ndarray | torch.Tensor]
    output: np.ndarray | torch.Tensor
    workspace: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))

    @property
    def tensors(self) -> list[Tensor]:
        """Types and shapes of the inputs, then of the output."""
        return [_describe(value) for value in (*self.arrays.values(), self.output)]

    def give_workspace(self, size: int) -> None:
        self.workspace = _aligned(size)
        self.workspace[:] = 0xA5

    def addresses(self) -> list[int]:
        return [_address(value) for value in self.arrays.values()]


def paged_case(case: Case, splits: tuple[int, ...] = (), compute: str = "float32") -> PluginCase:
    """``case`` needs trtllm storage on both sides, and a span whose first position is its first
    slot. ``splits`` cut it into sequences: the number of tokens of each but the last.
    """
    assert case.first_position == case.first_slot_offset
    case = replace(case, positions=())
    built = build(case)
    counts = [*splits, case.num_tokens - sum(splits)]
    firsts = case.first_position + np.cumsum([0, *counts[:-1]])
    spans = np.stack([firsts, counts], axis=1).astype(np.int32)
    numbers: dict[str, Any] = {
        "host_spans": spans,
        "host_num_blocks": np.array(
            [_num_blocks(built.source), _num_blocks(built.target)], dtype=np.int32
        ),
    }
    for side, pool, memory, slots in (
        ("source", built.source, built.source_memory, built.span.source_slots),
        ("target", built.target, built.target_memory, built.span.target_slots),
    ):
        offsets = _block_offsets(slots.numpy(), pool.tokens_per_block, len(pool.keys), spans)
        layers = np.arange(len(pool.keys), dtype=np.int32)
        numbers |= {
            f"host_{side}_kv_cache_pool_pointers": np.array([[memory.data_ptr(), 0]], np.int64),
            f"host_{side}_kv_cache_pool_mapping": np.stack([0 * layers, layers], axis=1),
            f"host_{side}_kv_cache_block_offsets": offsets,
            f"{side}_kv_cache_block_offsets": offsets.copy(),
        }
    tokens_per_block = built.source.tokens_per_block, built.target.tokens_per_block
    fields, shared, own = _map_parts(built, PAGED, tokens_per_block, compute)
    output = np.full(len(counts), -7, dtype=np.int32)
    return PluginCase(case, built, fields, {**shared, **numbers, **own}, output)


def dense_case(case: Case, compute: str = "float32") -> PluginCase:
    """``case`` needs unshuffled trtllm storage with blocks that hold the whole span: every block is
    then a sequence, and the first of them is mapped.
    """
    built = build(case)
    source, target = case.source, case.target
    pool = built.source_memory.view(
        -1, source.layers, 2, source.heads, source.tokens_per_block, source.head_dim
    )
    spans = np.zeros((pool.shape[0], 2), dtype=np.int32)
    spans[0] = case.first_position, case.num_tokens
    output = built.target_memory.view(
        -1, target.layers, 2, target.heads, target.tokens_per_block, target.head_dim
    )
    fields, shared, own = _map_parts(built, DENSE, (0, 0), compute)
    arrays = {**shared, "host_spans": spans, "source_kv": pool, **own}
    return PluginCase(case, built, fields, arrays, output)


def _map_parts(
    built: Built, mode: int, tokens_per_block: tuple[int, int], compute: str
) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]:
    """The plugin's fields, its first inputs, and the token inputs of maps that need them."""
    kvmap, span = built.kvmap, built.span
    packed = pack_map(kvmap, getattr(torch, compute), torch.device("cpu"))
    dtypes = [str(pool.dtype).removeprefix("torch.") for pool in (built.source, built.target)]
    ints = {
        "fields_version": [1],
        "mode": [mode],
        "cache_dtypes": [CACHE_DTYPES.index(name) for name in dtypes],
        "tokens_per_block": tokens_per_block,
        "same_rotation": [int(kvmap.source.rope == kvmap.target.rope)],
        "max_num_tokens": [64],
        "chunk_tokens": [0],
        "variant": [0],
    }
    pools = built.source, built.target
    floats = {
        "cache_scales": [scale for pool in pools for scale in (pool.key_scale, pool.value_scale)],
        "rope_scales": [kvmap.source.rope.attention_factor, kvmap.target.rope.attention_factor],
    }
    fields = {name: np.array(value, np.int32) for name, value in ints.items()}
    fields |= {name: np.array(value, np.float32) for name, value in floats.items()}
    fields["packed_map"] = np.array(packed.layout, np.int64)
    blob = _aligned(packed.blob.numel())
    blob[:] = packed.blob.numpy()
    shared = {
        "packed_map": blob.view(np.int32),
        "source_rope": _rope(kvmap.source.rope, span.source_length),
        "target_rope": _rope(kvmap.target.rope, span.target_length),
    }
    own: dict[str, Any] = {}
    if kvmap.reads_token_ids and kvmap.token_table and span.token_ids is not None:
        own["token_ids"] = span.token_ids.numpy().astype(np.int32)
        own["token_table_keys"] = kvmap.token_table.keys
        own["token_table_values"] = kvmap.token_table.values
    return fields, shared, own


def _rope(rope: RopeParams, length: int) -> np.ndarray:
    table = rope_table(rope, NUM_POSITIONS, length)
    return np.stack([table.cos, table.sin]).astype(np.float32)


def _num_blocks(pool: Any) -> int:
    return int(pool.keys[0].shape[0])


def _block_offsets(
    slots: np.ndarray, tokens_per_block: int, num_layers: int, spans: np.ndarray
) -> np.ndarray:
    """int32 [1, sequences, 2, blocks]: (block * num_layers) * 2 + field, -1 where a sequence has no
    block.
    """
    blocks = int((spans[:, 0] + spans[:, 1]).max(initial=0) - 1) // tokens_per_block + 2
    table = np.full((1, len(spans), 2, blocks), -1, dtype=np.int32)
    token = 0
    for sequence, (first, count) in enumerate(spans.tolist()):
        for position in range(first, first + count):
            entry = slots[token] // tokens_per_block * num_layers * 2
            table[0, sequence, :, position // tokens_per_block] = entry, entry + 1
            token += 1
    return table


def _describe(value: np.ndarray | torch.Tensor) -> Tensor:
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return Tensor.of(TENSORRT_DTYPES[name], *value.shape)
    return Tensor.of(NUMPY_DTYPES[value.dtype], *value.shape)


def _address(value: np.ndarray | torch.Tensor) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data


def _aligned(size: int) -> np.ndarray:
    roomy = np.empty(size + 256, dtype=np.uint8)
    return roomy[-roomy.ctypes.data % 256 :][:size]
