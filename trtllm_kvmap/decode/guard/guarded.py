"""A hand-over that is taken back when the guard objects: the target then reads the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtllm_kvmap.decode.bridge import Handoff, KvBridge
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.decode.guard.recall import Known
from trtllm_kvmap.decode.guard.signals import WINDOW, Signals, measure_signals
from trtllm_kvmap.decode.hop import HopGuard, Outcome, Verdict
from trtllm_kvmap.inject.hf_cache import HfCache
from trtllm_kvmap.spec.plan import HandoffPlan, plan_handoff


@dataclass(frozen=True, slots=True)
class Guarded:
    """``handoff`` is the one to go on from: the mapped one when ``status`` is ``applied``, else one
    whose plan maps nothing, and ``reason`` says what the guard objected to. ``signals`` and
    ``score`` are those it decided by; None where nothing was mapped and there was nothing to
    decide.
    """

    handoff: Handoff
    status: Outcome
    signals: Signals | None
    score: float | None
    reason: str = ""


def hand_over_guarded(
    bridge: KvBridge,
    guard: Guard | None,
    source_cache: HfCache,
    token_ids: Sequence[int] | torch.Tensor,
    plan: HandoffPlan,
    target_cache: HfCache | None = None,
    *,
    source_losses: torch.Tensor | None = None,
    source_known: Known | None = None,
) -> Guarded:
    """KvBridge.hand_over of one prompt, with the same arguments and errors, under ``guard``
    (None: every hand-over stands); ``source_losses`` and ``source_known`` as for measure_signals.

    After a fall-back the cache is what the target itself would hold: it has read everything but
    its exact spliced tokens, and no mapped entry is left. Raises InputError or UnavailableError
    where signals cannot be measured (measure_signals).
    """
    kept = 1 if guard is None else WINDOW
    made = bridge.hand_over(source_cache, token_ids, plan, target_cache, keep_logits=kept)
    if guard is None or not plan.mapped:
        return Guarded(made, "applied", None, None)
    signals = measure_signals(
        bridge,
        source_cache,
        token_ids,
        made,
        source_losses,
        source_known,
        recall=guard.recalling is not None,
    )
    verdict = guard.judge(signals)
    if verdict.applied:
        return Guarded(made, "applied", signals, verdict.drift)
    count = plan.num_tokens
    native = plan_handoff(count, spliced=plan.spliced.stop, first_tokens=0, repair_window=count)
    read = bridge.hand_over(source_cache, token_ids, native, target_cache)
    limit = guard.deciding(signals).limit
    reason = f"it scores this hand-over {verdict.drift:.3g}, and {limit:.3g} is its limit"
    return Guarded(read, "fallback_reprefill", signals, verdict.drift, reason)


def hop_guard(guard: Guard) -> HopGuard:
    """``guard`` as a Session asks it."""

    def judge(
        bridge: KvBridge, source_cache: HfCache, token_ids: Sequence[int], handoff: Handoff
    ) -> Verdict:
        recall = guard.recalling is not None
        return guard.judge(measure_signals(bridge, source_cache, token_ids, handoff, recall=recall))

    return judge
