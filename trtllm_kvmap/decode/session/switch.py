"""Carrying a conversation over to another model: through the map, or, where that may not be, by
reading.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_kvmap.decode.bridge import Handoff, KvBridge
from trtllm_kvmap.decode.guard.signals import WINDOW
from trtllm_kvmap.decode.hop import HopGuard
from trtllm_kvmap.decode.session.held import Held, after_handoff
from trtllm_kvmap.decode.session.mirror import Mirror
from trtllm_kvmap.spec.plan import HandoffPlan, plan_handoff


@dataclass(frozen=True, slots=True)
class Carried:
    """What the target holds now, by which hand-over; ``exact`` of the spliced entries are exact.

    ``reason`` is why the target read for real (empty: the map was applied), ``drift`` the guard's
    figure where there is one and it is a number.
    """

    held: Held
    handoff: Handoff
    exact: int
    reason: str = ""
    drift: float | None = None


def carry_over(
    bridge: KvBridge,
    token_ids: Sequence[int],
    source: Held,
    before: Held | None,
    plan: HandoffPlan,
    *,
    mirror: Mirror | None = None,
    guard: HopGuard | None = None,
) -> Carried:
    """Carry out ``plan``, from standby where ``mirror`` is one, on top of what the target held
    ``before``; when ``guard`` objects, the target reads for real instead.

    Nothing that is given is changed. Raises as KvBridge.hand_over and the guard do.
    """
    keep = WINDOW if guard else 1
    if mirror is not None:
        handoff = mirror.hand_over(source.cache, token_ids, plan, keep_logits=keep)
    else:
        given = before.cache if before else None
        handoff = bridge.hand_over(source.cache, token_ids, plan, given, keep_logits=keep)
    drift = None
    if guard is not None and plan.mapped:
        verdict = guard(bridge, source.cache, token_ids, handoff)
        drift = verdict.drift if math.isfinite(verdict.drift) else None
        if not verdict.applied:
            reason = f"the guard measured a drift of {verdict.drift:.3g}"
            return read_over(bridge, token_ids, source, before, reason=reason, drift=drift)
    return _carried(before, handoff, drift=drift)


def read_over(
    bridge: KvBridge,
    token_ids: Sequence[int],
    source: Held,
    before: Held | None,
    *,
    reason: str,
    drift: float | None = None,
) -> Carried:
    """The target reads all but its exact entries itself; its cache is exact then."""
    exact = before.cut(before.exact) if before and before.exact else None
    count, spliced = len(token_ids), exact.entries if exact else 0
    plan = plan_handoff(count, spliced=spliced, first_tokens=0, repair_window=count)
    handoff = bridge.hand_over(source.cache, token_ids, plan, exact.cache if exact else None)
    return _carried(exact, handoff, reason=reason, drift=drift)


def _carried(
    before: Held | None, handoff: Handoff, *, reason: str = "", drift: float | None = None
) -> Carried:
    held = after_handoff(before, handoff.plan, handoff.cache, handoff.logits)
    exact = min(before.exact, len(handoff.plan.spliced)) if before else 0
    return Carried(held, handoff, exact, reason, drift)
