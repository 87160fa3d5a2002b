"""A draft that nearly agrees, and what each cache must hold after a speculation."""

from __future__ import annotations

import copy

import torch
from caches import stacked

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.speculation.speculate import Speculation
from trtllm_kvmap.inject.hf_cache import HfCache, fork, num_entries
from trtllm_kvmap.models import LoadedModel

NEW = 60


def nearly(loaded: LoadedModel, noise: float = 0.05) -> LoadedModel:
    """Another model that says the same most of the time: every matrix disturbed a little."""
    model = copy.deepcopy(loaded.model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter += noise * parameter.std() * drawn
    return LoadedModel("nearly", model, loaded.tokenizer, loaded.spec)


def read_alone(loaded: LoadedModel, cache: HfCache, logits: torch.Tensor, stream: list[int]):
    """The logits each token of ``stream`` is chosen from, [len(stream), vocab_size], and the cache
    with all of them but the last.
    """
    if len(stream) == 1:
        return logits[None], fork(cache)
    seen = prefill(loaded, stream[:-1], fork(cache))
    return torch.cat([logits[None], seen.logits]), seen.cache


def require_caches_hold_what_was_committed(
    result: Speculation, row: int, draft: HfCache, verifier: HfCache
) -> None:
    """Row ``row`` of both caches, against caches [1] that read the same tokens in one pass."""
    for mine, expected in ((result.draft_cache, draft), (result.verifier_cache, verifier)):
        kept = result.attention_mask[row].bool()
        assert num_entries(mine) == len(kept)
        whole = stacked(mine)[:, :, row]
        torch.testing.assert_close(
            whole[..., kept, :], stacked(expected)[:, :, 0], rtol=0, atol=5e-5
        )
        assert not whole[..., ~kept, :].any(), "a pad was written"
