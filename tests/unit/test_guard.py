"""The guard: its decision, the fall-back, and how it travels in the file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from caches import stacked, tokens
from guard_cases import Models, bridge_of, guard_of, pair_of
from handmade_maps import random_map

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.decode.guard.guarded import hand_over_guarded, hop_guard
from trtllm_kvmap.decode.guard.signals import WINDOW, Signals
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.session.session import Session
from trtllm_kvmap.errors import FormatError, MismatchError
from trtllm_kvmap.inject.hf_cache import num_entries
from trtllm_kvmap.spec.plan import plan_handoff


@pytest.fixture
def pair(random_model: Callable) -> Models:
    return pair_of(random_model)


@pytest.fixture
def bridge(pair: Models) -> KvBridge:
    return bridge_of(pair)


def test_the_score_is_weighed_against_the_limit() -> None:
    signals = Signals(0.5, 0.75, 1.49, (0.09, 0.99))
    guard = Guard((2.0, 4.0, -1.0, 1.0, 10.0), -3.0, 0.0, {})
    expected = -3 + 2 * 0.5 + 4 * 0.75 - math.log(1.5) + math.log(0.1) + 10 * math.log(1.0)
    assert guard.judge(signals) == (pytest.approx(expected), True)
    assert not replace(guard, limit=expected - 1e-6).judge(signals).applied
    assert not replace(guard, bias=math.nan).judge(signals).applied, "no number must not stand"
    with pytest.raises(MismatchError, match="weighs 3 signals, the hand-over shows 5"):
        replace(guard, weights=(1.0, 1.0, 1.0)).judge(signals)


def test_a_hand_over_that_passes_is_the_bridges_own(bridge: KvBridge) -> None:
    ids, plan = tokens(60), plan_handoff(60, repair_window=16)
    cache = prefill(bridge.source, ids).cache
    passed = hand_over_guarded(bridge, guard_of(math.inf), cache, ids, plan)
    alone = bridge.hand_over(cache, ids, plan, keep_logits=WINDOW)
    assert passed.status == "applied"
    assert torch.equal(stacked(passed.handoff.cache), stacked(alone.cache))
    assert torch.equal(passed.handoff.logits, alone.logits)
    assert passed.score == passed.signals.loss_gap  # type: ignore[union-attr]


def test_after_a_fall_back_nothing_mapped_is_left(bridge: KvBridge) -> None:
    ids, plan = tokens(60), plan_handoff(60, spliced=10, repair_window=16)
    cache, own = prefill(bridge.source, ids).cache, prefill(bridge.target, ids[:20]).cache
    found = hand_over_guarded(bridge, guard_of(-math.inf), cache, ids, plan, own)
    assert found.status == "fallback_reprefill"
    assert not found.handoff.plan.mapped
    assert found.handoff.plan.spliced == range(10)
    kept, given = (stacked(each)[..., :10, :] for each in (found.handoff.cache, own))
    assert torch.equal(kept, given)
    by_hand = bridge.convert(cache, ids[:10], first_tokens=10)  # the target's own first ten
    native = prefill(bridge.target, ids[10:], by_hand)
    torch.testing.assert_close(
        stacked(found.handoff.cache), stacked(native.cache), rtol=0, atol=2e-5
    )
    torch.testing.assert_close(found.handoff.logits, native.logits[-1], rtol=0, atol=5e-5)
    assert (num_entries(cache), num_entries(own)) == (60, 20)


def test_nothing_mapped_is_nothing_to_judge(bridge: KvBridge) -> None:
    ids = tokens(20)
    cache = prefill(bridge.source, ids).cache
    found = hand_over_guarded(bridge, guard_of(-math.inf), cache, ids, plan_handoff(20))
    assert (found.status, found.signals, found.score) == ("applied", None, None)


@pytest.mark.parametrize(("limit", "outcome"), [(9e9, "applied"), (-9e9, "fallback_reprefill")])
def test_a_session_asks_the_guard(limit: float, outcome: str, pair: Models) -> None:
    source, target = pair
    bridge = KvBridge(random_map(source, target), source=source, target=target)
    session = Session(
        {"small": source, "large": target}, [bridge], guard=hop_guard(guard_of(limit))
    )
    session.add(tokens(60).tolist())
    session.generate(2)
    session.switch("large", repair_window=16)
    assert session.hops[-1].outcome == outcome


def test_a_guard_travels_in_the_map(bridge: KvBridge, tmp_path: Path) -> None:
    guard = Guard((0.5, -1.25), 3.0, 0.125, {"cases": 7})
    bare, guarded = tmp_path / "bare", tmp_path / "guarded"
    assert bridge.kvmap.save(bare) != bridge.kvmap.with_guard(guard.to_json()).save(guarded)
    found = KvMap.load(guarded, allow_unproven=True)
    assert Guard.from_json(found.guard) == guard
    assert KvMap.load(bare, allow_unproven=True).guard is None
    assert b'"guard"' not in bare.read_bytes(), "a map without one is written as it always was"


WRITTEN = {"weights": [1], "bias": 0, "limit": 1, "measured": {}}
NESTED = WRITTEN | {"recalling": WRITTEN | {"recalling": WRITTEN}}
BROKEN = (None, {}, WRITTEN | {"limit": "x"}, WRITTEN | {"bias": 10**400}, NESTED)


@pytest.mark.parametrize("broken", BROKEN)
def test_a_guard_that_cannot_be_read_is_refused(broken: object) -> None:
    with pytest.raises(FormatError, match="set it again with `trtllm-kvmap guard`"):
        Guard.from_json(broken)
