"""What must hold before a draft and a verifier decode together, so that a mistake runs nothing."""

from __future__ import annotations

import torch

from trtllm_kvmap.decode.prompt import require_room
from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.inject.hf_cache import HfCache, num_entries, view_pool
from trtllm_kvmap.models import LoadedModel


def shared_mask(
    draft_cache: HfCache,
    verifier_cache: HfCache,
    batch: int,
    attention_mask: torch.Tensor | None,
    verifier: LoadedModel,
) -> torch.Tensor:
    """bool [batch, entries], False for a pad, of two caches that hold the same tokens. Raises
    InputError when they do not, or when logits are given for another ``batch``.
    """
    held = [
        (pool.keys[0].shape[0], pool.tokens_per_block)
        for pool in (view_pool(draft_cache), view_pool(verifier_cache))
    ]
    if held[0] != held[1] or held[1][0] != batch:
        raise InputError(
            f"The draft's cache holds {held[0][0]} sequences of {held[0][1]} tokens, the "
            f"verifier's {held[1][0]} of {held[1][1]}, with logits for {batch}; all need the same. "
            f"Let the draft read (prefill) what only the verifier has read."
        )
    entries = num_entries(verifier_cache)
    if attention_mask is None:
        return torch.ones(batch, entries, dtype=torch.bool, device=verifier.device)
    mask = torch.as_tensor(attention_mask, device=verifier.device).bool()
    if mask.shape != (batch, entries) or not bool(mask.any(-1).all()):
        raise InputError(
            f"The attention mask needs the shape {[batch, entries]} and a token in every row; got "
            f"{list(mask.shape)}."
        )
    return mask


def require_steady(loaded: LoadedModel, longest: int, batch: int) -> None:
    """Raise InputError unless there is room for ``longest`` tokens, and MismatchError for a batch
    whose RoPE frequencies change before.
    """
    require_room(loaded, longest)
    rope = loaded.spec.rope
    if batch > 1 and rope.regime(loaded.rope_length(longest)) != rope.regime(1):
        raise MismatchError(
            f"{loaded.name} has {rope.kind} RoPE, whose frequencies change within the {longest} "
            f"tokens asked for; the rows of a batch would change together. Speculate on its rows "
            f"one by one, or ask for fewer tokens."
        )
