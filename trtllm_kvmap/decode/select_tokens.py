"""Which mapped tokens are worth computing: those the source attends to while it reads the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.prompt import TokenIds, as_token_ids
from trtllm_kvmap.inject.hf_cache import HfCache, fork
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import HandoffPlan

QUERIES = 32


def rank_by_attention(
    source: LoadedModel,
    cache: HfCache,
    token_ids: TokenIds,
    plan: HandoffPlan,
    *,
    queries: int = QUERIES,
) -> list[int]:
    """The tokens of ``plan.mapped``, those first that the source attends to most while it reads the
    last ``queries`` tokens of the prompt ``token_ids`` [num_tokens]: the sum of its attention over
    these queries and all layers and heads. For HandoffPlan.with_selected.

    ``cache`` is the source's, of at least the tokens before the last ``queries``; it is not
    changed. The last tokens are read again, with attention written out: the weights exist for one
    layer at a time. A batch [batch, num_tokens] shares one ranking.
    """
    ids = as_token_ids(token_ids, source.device)
    start = max(ids.shape[1] - queries, 0)
    with attention_received(source) as received:
        prefill(source, ids[:, start:], fork(cache, start), logits_to_keep=1)
    mapped = torch.stack(received).sum(0)[plan.mapped.start : plan.mapped.stop]
    order = mapped.argsort(descending=True, stable=True) + plan.mapped.start
    return [int(token) for token in order]


@contextmanager
def attention_received(loaded: LoadedModel) -> Iterator[list[torch.Tensor]]:
    """Collects, layer by layer, how much attention each entry receives, float32 [entries], summed
    over batch, heads and queries, while the block runs ``loaded``.
    """
    received: list[torch.Tensor] = []
    model: Any = loaded.model
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda _m, _i, output: received.append(output[1].float().sum((0, 1, 2)))
        )
        for layer in model.base_model.layers
    ]
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the only one that has the weights to give
    try:
        yield received
    finally:
        model.set_attn_implementation(usual)
        for hook in hooks:
            hook.remove()
