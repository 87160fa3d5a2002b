"""What a source in another process says of a prompt for the guard: as it is written into an offer,
and as it is read from one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_kvmap.decode.guard.recall import Known, ask_source
from trtllm_kvmap.decode.guard.signals import judged_tokens
from trtllm_kvmap.decode.prefill import Prefill, token_losses
from trtllm_kvmap.errors import InputError, NumericsError
from trtllm_kvmap.exchange.messages import Offer, Recall
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import HandoffPlan


def tell(
    source: LoadedModel,
    read: Prefill,
    token_ids: Sequence[int],
    plan: HandoffPlan,
    *,
    recall: bool,
) -> tuple[tuple[float, ...], Recall | None]:
    """``losses`` and ``recall`` of an offer: what ``source`` shows of the prompt ``token_ids``, of
    which ``read`` has its cache and the logits of at least the judged tokens.

    Raises InputError for the plan of another prompt, and NumericsError for losses that are no
    numbers.
    """
    if plan.num_tokens != len(token_ids):
        raise InputError(
            f"A guard judges the whole prompt of {plan.num_tokens} tokens, and {len(token_ids)} "
            f"are to be read; give all of them."
        )
    ids = torch.as_tensor(token_ids, device=source.device).long()
    judged = len(judged_tokens(plan))
    losses = token_losses(read.logits[-judged:], ids[len(ids) - judged :])
    if not bool(torch.isfinite(losses).all()):
        raise NumericsError("The source computed NaN or infinity on the prompt.")
    if not recall:
        return tuple(losses.tolist()), None
    known = ask_source(source, read.cache, ids, plan, losses)
    places = (~known.judged_losses.isnan()).nonzero().flatten()
    told = Recall(*(tuple(each.tolist()) for each in (known.asked, known.asked_losses, places)))
    return tuple(losses.tolist()), told


def hear(offer: Offer) -> tuple[torch.Tensor | None, Known | None]:
    """The source's losses, and what it knows of the prompt, as measure_signals takes them."""
    if not offer.losses:
        return None, None
    losses, told = torch.tensor(offer.losses, dtype=torch.float64), offer.recall
    if told is None:
        return losses, None
    judged = torch.full_like(losses, torch.nan)
    judged[list(told.known)] = losses[list(told.known)]
    asked = torch.tensor(told.asked, dtype=torch.int64)
    return losses, Known(asked, torch.tensor(told.losses, dtype=torch.float64), judged)
