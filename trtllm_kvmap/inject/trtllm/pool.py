"""The engine's one pool tensor as views."""

from __future__ import annotations

import torch

from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.spec.model import ModelSpec


def view_pool(pool: torch.Tensor, spec: ModelSpec, tokens_per_block: int) -> KvPool:
    """``pool`` as a connector is given it, [num_blocks, num_layers, 2, num_kv_heads *
    tokens_per_block * head_dim], as views of blocks [num_kv_heads, tokens_per_block, head_dim].

    Raises MismatchError for any other shape: more than one pool, latent attention, another model.
    """
    layers, heads, head_dim = spec.kv_shape
    needed = (layers, 2, heads * tokens_per_block * head_dim)
    if pool.ndim != 4 or tuple(pool.shape[1:]) != needed or not pool.is_contiguous():
        raise MismatchError(
            f"The engine's pool is {list(pool.shape)}; {spec.name} with {tokens_per_block} tokens "
            f"per block needs one contiguous pool of [num_blocks, {', '.join(map(str, needed))}]. "
            f"Give the model the map was fitted for, with full attention in every layer."
        )
    return KvPool.from_trtllm(pool.view(-1, layers, 2, heads, tokens_per_block, head_dim))
