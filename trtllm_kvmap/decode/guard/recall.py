"""Whether a target that was handed a prompt knows it: words of it are asked for once more.

A model that holds a text predicts its words when they come again (induction heads: Olsson et al.
2022, arXiv 2209.11895). The last tokens of a prompt need only a part of it, and say nothing of the
rest. So tokens from all over the prompt are asked for again, behind it, each by the LEAD tokens
that led up to it there: those that the source attends to, and of these only those that the source
itself knows by the prompt alone, sure of them behind it and far less sure without it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_kvmap.decode.prefill import prefill, token_losses
from trtllm_kvmap.decode.select_tokens import rank_by_attention
from trtllm_kvmap.inject.hf_cache import HfCache, fork, num_entries
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import HandoffPlan

LEAD = 4
CANDIDATES, ASKED = 96, 32  # tokens that the source is asked for, and the target at most
SINKS = 4  # entries that are seen where the prompt is hidden: attention needs somewhere to go
SURE, GAIN = 0.3, 1.0  # nats: a known token's loss at most, and how much more it is without prompt
DOUBT = 2  # tokens that count as recalled besides: one lost token of one tells little


@dataclass(frozen=True, slots=True)
class Known:
    """What a source showed to know of a prompt: ``asked`` int64 [asked], the positions of tokens to
    ask for again, and its losses, in nats, of these and of the judged tokens (signals.
    judged_tokens) as they stand, float64 [asked] and [judged - 1]; NaN for those it does not know.
    """

    asked: torch.Tensor
    asked_losses: torch.Tensor
    judged_losses: torch.Tensor


@torch.no_grad()
def ask_source(
    source: LoadedModel,
    cache: HfCache,
    token_ids: torch.Tensor,
    plan: HandoffPlan,
    judged_losses: torch.Tensor,
) -> Known:
    """What ``source`` knows of the prompt ``token_ids`` [num_tokens], which ``cache`` holds whole;
    ``judged_losses`` float64 [judged - 1] are its losses of the judged tokens.

    Short passes on forks of the cache: the last tokens, for what they attend to; CANDIDATES times
    LEAD tokens behind the prompt, and once more, with the judged ones, with all but SINKS entries
    of it hidden.
    """
    end, begin = len(token_ids), len(token_ids) - len(judged_losses) - 1
    bare = fork(cache, min(SINKS, begin))
    candidates = _candidates(source, cache, token_ids, plan)
    losses = _known(
        losses_again(source, cache, token_ids, candidates),
        losses_again(source, bare, token_ids, candidates),
    )
    first = (~losses.isnan()).nonzero().flatten()[:ASKED]
    alone = prefill(source, token_ids[begin:], bare, positions=torch.arange(begin, end))
    unprompted = token_losses(alone.logits, token_ids[begin:])
    return Known(candidates[first], losses[first], _known(judged_losses, unprompted))


@torch.no_grad()
def shortfall(
    target: LoadedModel,
    cache: HfCache,
    token_ids: torch.Tensor,
    known: Known,
    judged_losses: torch.Tensor,
) -> float:
    """How much less of what the source knows the target recalls: the sum over known tokens of
    max(p_source - p_target, 0), over their number + DOUBT; from 0 to below 1.

    ``cache`` is the target's, of the whole prompt ``token_ids`` [num_tokens], and is not changed;
    ``judged_losses`` float64 [judged - 1] are the target's. A prompt of which the source knows
    nothing has a shortfall of 0.
    """
    count = len(known.asked) if _has_room(target, len(token_ids)) else 0
    again = losses_again(target, cache, token_ids, known.asked[:count])
    ours = torch.cat([again, judged_losses])
    theirs = torch.cat([known.asked_losses[:count], known.judged_losses])
    lost = (torch.exp(-theirs) - torch.exp(-ours))[~theirs.isnan()].clamp_min(0)
    return float(lost.sum() / (len(lost) + DOUBT))


@torch.no_grad()
def losses_again(
    loaded: LoadedModel, cache: HfCache, token_ids: torch.Tensor, asked: torch.Tensor
) -> torch.Tensor:
    """Nats, float64 [asked], of each token of ``token_ids`` [num_tokens] that ``asked`` names, when
    the LEAD tokens before it are read again behind the whole prompt. Each lead sees ``cache`` (of
    the prompt or of its first tokens) and itself, no other one. The cache is not changed.
    """
    count, entries, device = len(asked), num_entries(cache), loaded.device
    if not count:
        return torch.empty(0, dtype=torch.float64)
    ids, asked = token_ids.to(device), asked.to(device)
    steps = torch.arange(LEAD, device=device)
    leads = ids[asked[:, None] - LEAD + steps]
    # An additive mask suits every attention implementation; a boolean one does not.
    own = torch.kron(torch.eye(count, device=device), torch.ones(LEAD, LEAD, device=device).tril())
    seen = torch.cat([own.new_ones(count * LEAD, entries), own], dim=1)
    lowest = torch.finfo(loaded.model.dtype).min
    mask = torch.zeros_like(seen, dtype=loaded.model.dtype).masked_fill_(seen == 0, lowest)
    logits: torch.Tensor = loaded.model(
        input_ids=leads.reshape(1, -1),
        position_ids=(len(ids) + steps).repeat(1, count),
        attention_mask=mask[None, None],
        use_cache=True,
        logits_to_keep=torch.arange(LEAD - 1, count * LEAD, LEAD, device=device),  # each lead's end
        **{loaded.cache_argument: fork(cache)},
    ).logits
    return torch.nn.functional.cross_entropy(logits[0].double(), ids[asked], reduction="none").cpu()


def _candidates(
    source: LoadedModel, cache: HfCache, token_ids: torch.Tensor, plan: HandoffPlan
) -> torch.Tensor:
    """int64 [candidates]: tokens of ``plan.mapped``, those first that the source attends to most
    at the end of the prompt; of tokens that follow the same token one is enough.
    """
    if not _has_room(source, len(token_ids)):
        return torch.empty(0, dtype=torch.int64)
    pairs: dict[tuple[int, int], int] = {}
    ids = token_ids.tolist()
    for token in rank_by_attention(source, cache, token_ids, plan):
        if token >= LEAD:
            pairs.setdefault((ids[token - 1], ids[token]), token)
    return torch.tensor(list(pairs.values())[:CANDIDATES], dtype=torch.int64)


def _has_room(loaded: LoadedModel, end: int) -> bool:
    """Whether LEAD more tokens can be read behind ``end``, by the frequencies of those before."""
    return end + LEAD <= loaded.spec.max_positions and not loaded.spec.rope.length_dependent


def _known(losses: torch.Tensor, unprompted: torch.Tensor) -> torch.Tensor:
    """``losses`` with NaN where the prompt is not what makes the source sure."""
    known = (losses <= SURE) & (unprompted - losses >= GAIN)
    return losses.where(known, torch.nan)
