"""A transformers cache of one sequence, packed into blocks to travel, and back.

Blocks are ``[num_blocks, num_layers, 2, num_kv_heads, tokens_per_block, head_dim]``, keys first:
TensorRT-LLM's pool, so that a block is one run of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.inject.hf_cache import HfCache, make_cache, take_span, view_pool
from trtllm_kvmap.spec.model import ModelSpec


def pack_blocks(
    cache: HfCache, num_tokens: int, blocks: torch.Tensor, block_ids: Sequence[int]
) -> None:
    """Copy the first ``num_tokens`` entries of ``cache`` into ``blocks``, token t into block
    ``block_ids[t // tokens_per_block]``. What the last block has room for beyond them becomes zero:
    no other conversation's numbers travel along.

    Raises MismatchError for another geometry or dtype, and InputError for a cache that holds fewer
    tokens.
    """
    taken = take_span(cache, range(num_tokens))
    layers, heads, head_dim = taken.kv_shape
    per_block = blocks.shape[4]
    wanted = (len(blocks), layers, 2, heads, per_block, head_dim)
    room = len(block_ids) * per_block
    one = len(taken.keys[0]) == 1
    if blocks.shape != wanted or blocks.dtype != taken.dtype or room < num_tokens or not one:
        raise MismatchError(
            f"{len(taken.keys[0])} sequences of {num_tokens} tokens of {taken.kv_shape} in "
            f"{taken.dtype} do not fit into {len(block_ids)} blocks of "
            f"{tuple(blocks.shape[1:])} in {blocks.dtype}; give one sequence and enough blocks of "
            f"its own geometry."
        )
    ids = list(block_ids)
    for field, views in enumerate((taken.keys, taken.values)):
        for layer, view in enumerate(views):
            rows = view.new_zeros(heads, room, head_dim)
            rows[:, :num_tokens] = view[0]
            parts = rows.view(heads, len(ids), per_block, head_dim).transpose(0, 1)
            blocks[ids, layer, field] = parts.to(blocks.device)


def unpack_blocks(
    spec: ModelSpec,
    num_tokens: int,
    blocks: torch.Tensor,
    block_ids: Sequence[int],
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> HfCache:
    """A cache of ``num_tokens`` entries of the model ``spec``, copied out of ``blocks``.

    In the blocks' dtype; float8 becomes float32 times its scale. Raises MismatchError for blocks of
    another geometry.
    """
    if (blocks.shape[1], blocks.shape[3], blocks.shape[5]) != spec.kv_shape:
        raise MismatchError(
            f"Blocks of {tuple(blocks.shape[1:])} are not of {spec.name}, which has (layers, KV "
            f"heads, head_dim) = {spec.kv_shape}."
        )
    scaled = blocks.dtype == torch.float8_e4m3fn
    dtype = torch.float32 if scaled else blocks.dtype
    cache = make_cache(spec, num_tokens, dtype=dtype, device=blocks.device)
    pool, ids = view_pool(cache), list(block_ids)
    for field, (views, scale) in enumerate(((pool.keys, key_scale), (pool.values, value_scale))):
        for layer, view in enumerate(views):
            rows = blocks[ids, layer, field].to(dtype).transpose(0, 1)
            view[0] = rows.reshape(spec.num_kv_heads, -1, spec.head_dim)[:, :num_tokens]
            if scaled:
                view.mul_(scale)
    return cache
