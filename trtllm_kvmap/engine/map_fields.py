"""A KvMap as the plugin is given it: its fields, and the constants of its network.

Field names and meanings are those of plugins/kvMapPlugin/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.mapper.cuda import pack_map
from trtllm_kvmap.mapper.native import load_native
from trtllm_kvmap.mapper.pool import CACHE_DTYPES
from trtllm_kvmap.spec.rope import RopeParams, rope_table

FIELDS_VERSION = 1
PAGED = 0
UNSCALED = (1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class MapNetwork:
    """``fields`` by name, each int32, int64 or float32 [n]; ``constants`` by the name of the
    plugin's input they stand for.
    """

    fields: dict[str, np.ndarray]
    constants: dict[str, np.ndarray]


def map_network(kvmap: KvMap, config: PipelineConfig) -> MapNetwork:
    """Weights rounded once to the pipeline's dtype; fp8 ones stay as they are. Raises
    UnavailableError when the native part, which packs the map, is not built.
    """
    load_native()
    dtype = getattr(torch, config.dtype)
    packed = pack_map(kvmap, dtype, torch.device("cpu"))
    cache = CACHE_DTYPES.index(dtype)
    ints = {
        "fields_version": [FIELDS_VERSION],
        "mode": [PAGED],
        "cache_dtypes": [cache, cache],
        "tokens_per_block": [config.tokens_per_block] * 2,
        "same_rotation": [int(kvmap.source.rope == kvmap.target.rope)],
        "max_num_tokens": [config.max_tokens],
        "chunk_tokens": [0],
        "variant": [0],
    }
    floats = {
        "cache_scales": UNSCALED,
        "rope_scales": [kvmap.source.rope.attention_factor, kvmap.target.rope.attention_factor],
    }
    fields = {name: np.array(value, np.int32) for name, value in ints.items()}
    fields |= {name: np.array(value, np.float32) for name, value in floats.items()}
    fields["packed_map"] = np.array(packed.layout, np.int64)
    constants = {
        "packed_map": packed.blob.numpy().view(np.int32),
        "source_rope": _rope(kvmap.source.rope, config.max_tokens),
        "target_rope": _rope(kvmap.target.rope, config.max_tokens),
    }
    if kvmap.reads_token_ids and kvmap.token_table is not None:
        constants["token_table_keys"] = kvmap.token_table.keys.float().contiguous().numpy()
        constants["token_table_values"] = kvmap.token_table.values.float().contiguous().numpy()
    return MapNetwork(fields, constants)


def _rope(rope: RopeParams, num_positions: int) -> np.ndarray:
    """float32 [2 (cos, sin), num_positions, rotary_dim / 2]."""
    table = rope_table(rope, num_positions)
    return np.stack([table.cos, table.sin]).astype(np.float32)
