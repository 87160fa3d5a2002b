"""How far what a mapped model says is from what the model that read says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.evaluate.run import EvaluationConfig
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import plan_handoff


@torch.no_grad()
def teacher_divergence(
    bridge: KvBridge, reader: LoadedModel, item: Item, judged: EvaluationConfig
) -> float:
    """KL(reader || mapped writer) over the continuation of ``item``, nats a token."""
    plan = plan_handoff(
        len(item.context),
        first_tokens=judged.first_tokens,
        repair_window=judged.repair_window,
    )
    read = prefill(reader, item.context, logits_to_keep=1)
    handoff = bridge.hand_over(read.cache, item.context, plan)
    wanted, given = (
        _log_p(*each, item.continuation)
        for each in (
            (reader, read.cache, read.logits[-1:]),
            (bridge.target, handoff.cache, handoff.logits[None]),
        )
    )
    return float((wanted.exp() * (wanted - given)).sum(-1).mean())


def _log_p(
    loaded: LoadedModel, cache: object, logits: torch.Tensor, continuation: Sequence[int]
) -> torch.Tensor:
    """float32 [tokens, vocab_size]: the distribution of each token of the continuation."""
    known = [logits.float()]
    if len(continuation) > 1:
        known.append(prefill(loaded, continuation[:-1], cache).logits)  # type: ignore[arg-type]
    return torch.cat(known).log_softmax(-1)
