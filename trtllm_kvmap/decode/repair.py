"""What the target computes itself on top of the mapped cache, in one pass."""

from __future__ import annotations

import torch

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.prompt import Prompt
from trtllm_kvmap.inject.hf_cache import HfCache, Pass, overwrite_with_last, record_pass
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import HandoffPlan


def repair(
    target: LoadedModel, prompt: Prompt, plan: HandoffPlan, cache: HfCache, *, keep: int = 1
) -> torch.Tensor:
    """Compute ``plan.selected`` and ``plan.repaired`` on top of ``cache``, which holds everything
    before ``plan.repaired`` and is extended in place by it; entries of selected tokens are
    overwritten.

    Returns the logits of the last ``keep`` repaired tokens, float32 [batch, keep, vocab_size].
    """
    keep = min(keep, len(plan.repaired))
    if not plan.selected:
        return prefill(
            target,
            prompt.token_ids[:, plan.repaired.start :],
            cache,
            attention_mask=prompt.mask if prompt.padded else None,
            logits_to_keep=keep,
        ).logits
    return _repair_scattered(target, prompt, plan, cache, keep)


@torch.no_grad()
def _repair_scattered(
    target: LoadedModel, prompt: Prompt, plan: HandoffPlan, cache: HfCache, keep: int
) -> torch.Tensor:
    # The selected tokens go last, so that their new entries can be dropped from the cache's end.
    columns = torch.tensor([*plan.repaired, *plan.selected], device=target.device)
    last = len(plan.repaired)
    logits: torch.Tensor = target.model(
        input_ids=prompt.token_ids[:, columns],
        position_ids=columns.expand(prompt.batch, -1),
        attention_mask=_mask(plan, columns, target.model.dtype).expand(prompt.batch, 1, -1, -1),
        use_cache=True,
        logits_to_keep=torch.arange(last - keep, last, device=target.device),
        **{target.cache_argument: cache},
    ).logits
    overwrite_with_last(cache, plan.selected)
    if target.spec.rope.length_dependent:
        length = target.rope_length(plan.num_tokens)
        record_pass(cache, Pass(plan.repaired.start, plan.num_tokens, length))
    return logits.float()


def _mask(plan: HandoffPlan, columns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive [1, 1, computed, entries + computed]: a token sees every token up to itself once,
    never the mapped entry of a selected one.
    """
    held = torch.arange(plan.repaired.start, device=columns.device)
    hidden = torch.cat([held, columns]) > columns[:, None]
    hidden[:, list(plan.selected)] = True
    mask = torch.zeros(hidden.shape, dtype=dtype, device=columns.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]
