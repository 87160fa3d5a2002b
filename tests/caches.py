"""A whole cache as one tensor, to be compared bit for bit; and tokens to fill one."""

from __future__ import annotations

import torch

from trtllm_kvmap.inject.hf_cache import HfCache, view_pool


def stacked(cache: HfCache) -> torch.Tensor:
    """The keys and values of every layer, [2, layers, batch, heads, entries, head_dim], a copy."""
    pool = view_pool(cache)
    return torch.stack([torch.stack(pool.keys), torch.stack(pool.values)])


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Token ids that every random model knows, int64 of ``shape``."""
    return torch.randint(2, 60, shape, generator=torch.Generator().manual_seed(seed))


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return tokens(count, seed=seed).tolist()
