"""What a hand-over shows of its map: losses of tokens that are known, drift, and recall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trtllm_kvmap.decode.bridge import Handoff, KvBridge
from trtllm_kvmap.decode.guard.recall import LEAD, Known, ask_source, shortfall
from trtllm_kvmap.decode.prefill import prefill, token_losses
from trtllm_kvmap.errors import InputError, UnavailableError
from trtllm_kvmap.inject.hf_cache import (
    HfCache,
    fork,
    make_cache,
    num_entries,
    take_span,
    view_pool,
    written_lengths,
)
from trtllm_kvmap.mapper.contract import Span
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.rotary import remove_rope
from trtllm_kvmap.spec.plan import HandoffPlan
from trtllm_kvmap.spec.rope import RopeParams, written_length
from trtllm_kvmap.spec.slices import FIELDS

WINDOW = 64  # repaired tokens that are looked at, from the end: enough to tell, whatever the plan
BANDS = 4  # of depth: a drift figure per layer would be too many to weigh


@dataclass(frozen=True, slots=True)
class Signals:
    """Of one hand-over. ``loss_gap`` is the mean over the known tokens of the target's loss minus
    the source's, in nats, and ``loss_excess`` the same with every token counted at least 0: a
    token that the source alone finds hard does not pay for one that the map has spoilt.

    ``source_loss`` is the mean of the source's own over the same tokens: how hard the text is. What
    the other signals are in a sound hand-over depends on that.

    ``drift`` holds, for keys and then values, each band of layers from shallow to deep, the NRMSE
    of mapped entries against repaired ones. Repaired ones are not native: above layer 0 they attend
    to mapped entries.

    ``recall`` is how much less of what the source knows the target recalls (recall.shortfall), from
    0 to below 1; None where it was not measured.
    """

    loss_gap: float
    loss_excess: float
    source_loss: float
    drift: tuple[float, ...]
    recall: float | None = None

    def to_features(self, recall: bool = False) -> np.ndarray:
        """float64 [3 + drifts], or [4 + drifts] with ``recall`` as the last, which must have been
        measured then: what a guard weighs. How hard a text is and drifts are scales for the rest,
        so their logarithm is.
        """
        scales = np.log(np.array([self.source_loss, *self.drift], dtype=np.float64) + 0.01)
        return np.array(
            [self.loss_gap, self.loss_excess, *scales, *([self.recall] * recall)], dtype=np.float64
        )


def judged_tokens(plan: HandoffPlan) -> range:
    """The tokens of ``plan`` that signals are measured on: the last repaired ones."""
    return plan.repaired[-WINDOW:]


@torch.no_grad()
def measure_signals(
    bridge: KvBridge,
    source_cache: HfCache,
    token_ids: Sequence[int] | torch.Tensor,
    hand: Handoff,
    source_losses: torch.Tensor | None = None,
    source_known: Known | None = None,
    *,
    recall: bool = False,
) -> Signals:
    """The signals of ``hand``, which ``bridge`` has just made of ``source_cache`` for the prompt
    ``token_ids`` [num_tokens]. Nothing is changed.

    The source reads the judged tokens once more for their losses; the target does so too when
    ``hand`` did not keep their logits (hand_over's ``keep_logits``). A source in another process
    sends ``source_losses``, token_losses of what it reads there, and a cache of the whole prompt.

    With ``recall``, both models are asked for words of the prompt as well (recall.ask_source); a
    source in another process sends what it answered, ``source_known``, or there is no recall.

    Raises InputError for a batch, a plan with fewer than two repaired tokens, or other losses,
    caches and positions than these; UnavailableError for a source in another process that sent no
    losses.
    """
    source, target = bridge.source, bridge.target
    ids = torch.as_tensor(token_ids, device=target.device).long()
    if ids.ndim != 1 or len(hand.plan.repaired) < 2:
        raise InputError(
            f"A guard judges one prompt with at least 2 repaired tokens, got token ids of the "
            f"shape {list(ids.shape)} and {len(hand.plan.repaired)} repaired; hand rows over one "
            f"by one, with a repair_window of 8 or more."
        )
    window, known = judged_tokens(hand.plan), source_known if recall else None
    if source_losses is None and isinstance(source, LoadedModel):
        begin = min(num_entries(source_cache), window.start)
        read = prefill(source, ids[begin:], fork(source_cache, begin), logits_to_keep=len(window))
        source_cache, source_losses = read.cache, token_losses(read.logits, ids[window.start :])
        if recall:
            known = ask_source(source, source_cache, ids, hand.plan, source_losses)
    if source_losses is None:
        raise UnavailableError(
            f"The losses of {source.name} are not to be had here, because it runs in another "
            f"process; let it send them, or judge where the source and its cache are."
        )
    if len(source_losses) != len(window) - 1 or num_entries(source_cache) < len(ids):
        raise InputError(
            f"The source sent {len(source_losses)} losses and a cache of "
            f"{num_entries(source_cache)} tokens; a guard needs {len(window) - 1} and {len(ids)}. "
            f"Let it read the whole prompt."
        )
    if known is not None:
        _require_askable(known, len(window) - 1, len(ids))
    losses = token_losses(_target_logits(target, ids, hand, window), ids[window.start :])
    gaps = losses - source_losses
    mapped = make_cache(
        target.spec, len(window), dtype=target.model.dtype, device=target.model.device
    )
    columns = torch.arange(window.start, window.stop, device=ids.device)
    span = Span(
        source_slots=columns,
        target_slots=columns - window.start,
        positions=columns,
        token_ids=ids[columns],
        source_length=written_length(
            source.spec.rope, written_lengths(source_cache, window) or [len(ids)]
        ),
        target_length=target.rope_length(len(ids)),
    )
    bridge.mapper.map_kv(view_pool(source_cache), view_pool(mapped), span)
    repaired = take_span(hand.cache, window)
    return Signals(
        loss_gap=float(gaps.mean()),
        loss_excess=float(gaps.clamp_min(0).mean()),
        source_loss=float(source_losses.mean()),
        drift=drift(view_pool(mapped), repaired, columns, target.spec.rope, span.target_length),
        recall=shortfall(target, hand.cache, ids, known, losses) if known is not None else None,
    )


def drift(
    mapped: KvPool,
    repaired: KvPool,
    positions: torch.Tensor,
    rope: RopeParams,
    rope_length: int,
) -> tuple[float, ...]:
    """For keys (un-rotated), then values: sqrt(mean over the layers of a band of
    sum |mapped - repaired|^2 / sum |repaired - its mean over tokens|^2), bands from shallow to
    deep. Both pools hold one sequence, [1, heads, len(positions), head_dim] per layer.
    """
    figures = []
    for field in FIELDS:
        ratios = []
        for here, there in zip(mapped.field(field)[0], repaired.field(field)[0], strict=True):
            ours, theirs = here[0].double(), there[0].double()
            if field == "key":
                ours, theirs = (
                    remove_rope(keys, positions, rope, rope_length) for keys in (ours, theirs)
                )
            spread = (theirs - theirs.mean(1, keepdim=True)).square().sum()
            ratios.append(float((ours - theirs).square().sum() / spread))
        bands = np.array_split(np.asarray(ratios), min(BANDS, len(ratios)))
        figures += [float(np.sqrt(band.mean())) for band in bands]
    return tuple(figures)


def _require_askable(known: Known, judged: int, num_tokens: int) -> None:
    """What another process sends need not be of this prompt."""
    asked = known.asked.tolist()
    strange = [token for token in asked if not LEAD <= token < num_tokens]
    counts = len(known.asked_losses), len(known.judged_losses)
    if strange or counts != (len(asked), judged):
        raise InputError(
            f"The source says what it knows of {counts[0]} and {counts[1]} tokens, the former at "
            f"the positions {asked[:4]} ...; {len(asked)} and {judged} are needed, at positions "
            f"from {LEAD} to {num_tokens - 1}. Let it make the same plan as the target."
        )


def _target_logits(
    target: LoadedModel, ids: torch.Tensor, hand: Handoff, window: range
) -> torch.Tensor:
    if len(hand.repaired_logits) >= len(window):
        return hand.repaired_logits[-len(window) :]
    held = fork(hand.cache, window.start)
    return prefill(target, ids[window.start :], held, logits_to_keep=len(window)).logits
