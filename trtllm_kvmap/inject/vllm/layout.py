"""vLLM's CPU pool as strided views, and the proof that they are right."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from vllm import _custom_ops as ops

from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.mapper.pool import KvPool


def view_pool(kv_caches: Mapping[str, torch.Tensor]) -> KvPool:
    """Views of vLLM's caches, one tensor [num_blocks, num_kv_heads, tokens_per_block, 2 *
    head_dim] per layer, by layer name; nothing is copied.

    That shape is nominal. Inside a (block, head) lie the keys as [head_dim, tokens_per_block], then
    the values as [tokens_per_block, head_dim]. Raises MismatchError for caches of another shape.
    """
    keys, values = [], []
    for name in sorted(kv_caches, key=layer_number):
        cache = kv_caches[name]
        if cache.device.type != "cpu" or cache.ndim != 4 or not cache.is_contiguous():
            raise MismatchError(
                f"vLLM's cache of {name} is {tuple(cache.shape)} on {cache.device}; only the CPU "
                f"backend's dense [blocks, KV heads, tokens, 2 * head_dim] is known here."
            )
        tokens, head_dim = cache.shape[2], cache.shape[3] // 2
        fields = cache.view(*cache.shape[:2], 2, tokens * head_dim)
        keys.append(fields[:, :, 0].view(*cache.shape[:2], head_dim, tokens).transpose(2, 3))
        values.append(fields[:, :, 1].view(*cache.shape[:2], tokens, head_dim))
    return KvPool(tuple(keys), tuple(values))


def layer_number(name: str) -> int:
    """3 for "model.layers.3.self_attn.attn"."""
    numbers = re.findall(r"\d+", name)
    if len(numbers) != 1:
        raise MismatchError(
            f"vLLM's layer {name!r} should have one number in its name, that of the layer."
        )
    return int(numbers[0])


def is_proven(pool: KvPool, isa: str) -> bool:
    """Whether what vLLM's own kernel for ``isa`` writes into a pool of this geometry comes back
    through view_pool. Other instruction sets pack blocks in other ways.
    """
    _, heads, head_dim = pool.kv_shape
    tokens, blocks = pool.tokens_per_block, 3
    cache = torch.zeros(blocks, heads, tokens, 2 * head_dim, dtype=pool.dtype)
    packed = cache.view(blocks, heads, 2 * tokens, head_dim)
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(blocks * tokens, generator=generator)[: tokens + 1]
    rows = torch.randn(2, len(slots), heads, head_dim, generator=generator).to(pool.dtype)
    ops.cpu_attn_reshape_and_cache(*rows, *packed.chunk(2, dim=2), slots, isa)
    seen = view_pool({"layers.0": cache})
    where = slots // tokens, slice(None), slots % tokens
    return all(
        torch.equal(view[0][where], written)
        for view, written in zip((seen.keys, seen.values), rows, strict=True)
    )
