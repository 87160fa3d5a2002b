"""How a guard is set: on cases whose answer is known, and on damaged copies of a map."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from evaluate_cases import ITEMS
from guard_cases import Models, bridge_of, pair_of
from handmade_maps import random_map

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.guard.signals import Signals
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.damage import damaged_maps
from trtllm_kvmap.evaluate.guard import (
    Case,
    GuardConfig,
    fit_guard,
    quality,
    rates,
    run_case,
    set_guard,
)
from trtllm_kvmap.evaluate.reading import read_item
from trtllm_kvmap.evaluate.tasks.items import Item


@pytest.fixture
def pair(random_model: Callable) -> Models:
    return pair_of(random_model)


@pytest.fixture
def bridge(pair: Models) -> KvBridge:
    return bridge_of(pair)


def cases_of(bad: list[float], good: list[float]) -> list[Case]:
    """Cases that only their loss gap tells apart, with an excess and a recall that say nothing."""
    rng = np.random.default_rng(0)
    return [
        Case(
            Signals(gap, float(rng.random()), float(rng.random()), (0.5,), float(rng.random())),
            mapped=0.2 if worse else 0.8,
            source=0.5,
        )
        for worse, gaps in ((True, bad), (False, good))
        for gap in gaps
    ]


def test_a_guard_learns_which_signal_tells() -> None:
    rng = np.random.default_rng(1)
    bad, good = (rng.normal(mean, 0.3, 400).tolist() for mean in (2.0, 0.0))
    plain = fit_guard(cases_of(bad, good), GuardConfig(recall=True), [])
    guard = plain.recalling
    assert (len(plain.weights), len(guard.weights)) == (4, 5)
    for each in (plain, guard):
        assert each.weights[0] > 5 * max(abs(weight) for weight in each.weights[1:])
        assert each.measured["false_fallback_rate"] <= 0.1
        assert each.measured["missed_bad_rate"] <= 0.01
    # On cases it has not seen: 2 / 0.3 deviations apart are told apart.
    fresh = cases_of(rng.normal(2.0, 0.3, 400).tolist(), rng.normal(0.0, 0.3, 400).tolist())
    fell_back = np.array([not plain.judge(case.signals).applied for case in fresh])
    found = rates(fell_back, np.array([case.bad for case in fresh]))
    assert found["false_fallback_rate"] < 0.13
    assert found["missed_bad_rate"] < 0.03


def test_the_limit_lets_through_no_more_than_allowed() -> None:
    """Where the two overlap, it is the good ones that pay."""
    rng = np.random.default_rng(1)
    bad, good = (rng.normal(mean, 1.0, 500).tolist() for mean in (1.0, 0.0))
    for missed in (0.0, 0.01, 0.2):
        guard = fit_guard(cases_of(bad, good), GuardConfig(missed=missed, taken_back=0.1), [])
        assert guard.measured["missed_bad_rate"] <= missed
        assert guard.measured["false_fallback_rate"] > 0.1


def test_where_both_are_far_apart_the_limit_is_as_low_as_is_allowed() -> None:
    """What is unlike all that was seen is then taken back sooner. Scores count from the limit."""
    rng = np.random.default_rng(1)
    cases = cases_of(rng.normal(9.0, 0.3, 50).tolist(), rng.normal(0.0, 0.3, 200).tolist())
    for share in (0.0, 0.1, 0.25):
        guard = fit_guard(cases, GuardConfig(taken_back=share, recall=True), [])
        for each, recall in ((guard, None), (guard.recalling, 0.5)):
            shown = [replace(c.signals, recall=recall and c.signals.recall) for c in cases]
            fell_back = np.array([not guard.judge(signals).applied for signals in shown])
            found = rates(fell_back, np.array([case.bad for case in cases]))
            assert {name: each.measured[name] for name in found} == found
            assert each.measured["false_fallback_rate"] == pytest.approx(share, abs=0.006)
            assert (each.measured["missed_bad_rate"], each.limit) == (0, 0)


def test_the_limit_holds_for_every_kind_of_traffic() -> None:
    """Few bad ones of one kind lie lower than the many of another."""
    rng = np.random.default_rng(1)
    many, few = (
        [replace(case, kind=kind) for case in cases_of(bad.tolist(), good.tolist())]
        for kind, bad, good in (
            ("documents", rng.normal(9.0, 1.0, 900), rng.normal(0.0, 1.0, 900)),
            ("talk", rng.normal(3.0, 0.3, 9), rng.normal(0.0, 1.0, 9)),
        )
    )
    config = GuardConfig(missed=0.1, taken_back=0.0)
    alone, both = fit_guard(many, config, []), fit_guard(many + few, config, [])
    passed = [both.judge(case.signals).applied for case in few if case.bad]
    assert sum(passed) == 0, "a tenth of nine is none"
    assert sum(alone.judge(case.signals).applied for case in few if case.bad) > 6
    kinds = both.measured["kinds"]
    assert list(kinds) == ["documents", "talk"]
    for kind, cases in (("documents", many), ("talk", few)):
        fell_back = np.array([not both.judge(case.signals).applied for case in cases])
        assert kinds[kind] == rates(fell_back, np.array([case.bad for case in cases]))
    unharmed = [replace(case, kind="unharmed") for case in few if not case.bad]
    of_none = fit_guard(many + unharmed, config, []).measured["kinds"]["unharmed"]
    assert (of_none["bad"], of_none["missed_bad_rate"]) == (0, None)


def test_one_kind_of_case_sets_no_guard() -> None:
    with pytest.raises(InputError, match="0 of 2 hand-overs were worse"):
        fit_guard(cases_of([], [0.0, 1.0]), GuardConfig(), [])


def test_rates_are_of_their_own_kind() -> None:
    fell_back = np.array([True, True, False, False, False])
    bad = np.array([True, False, False, False, True])
    assert rates(fell_back, bad) == {
        "cases": 5,
        "bad": 2,
        "false_fallback_rate": pytest.approx(1 / 3),
        "missed_bad_rate": 0.5,
    }
    assert rates(fell_back[1:2], bad[1:2])["missed_bad_rate"] is None


def test_a_case_is_bad_when_the_source_alone_does_better(bridge: KvBridge) -> None:
    reading = read_item(bridge.source, bridge.target, ITEMS[0], (), rollout_steps=1)
    for metric in ("accuracy", "nll"):
        alone = quality(reading.source, reading, metric)
        case = run_case(bridge, reading, alone, GuardConfig(metric=metric, repair_window=8))
        assert case.source == alone
        assert [replace(case, mapped=alone + d).bad for d in (-0.01, 0.0, 0.01)] == [1, 0, 0]
    log_probs = torch.log_softmax(prefill(bridge.source, _whole(ITEMS[0])).logits.double(), -1)
    told, start = ITEMS[0].continuation, len(ITEMS[0].context) - 1
    nats = [float(log_probs[start + n, token]) for n, token in enumerate(told)]
    assert quality(reading.source, reading, "nll") == pytest.approx(sum(nats) / 7, abs=1e-5)


def _whole(item: Item) -> list[int]:
    return [*item.context, *item.continuation]


@pytest.mark.parametrize("recall", [False, True])
def test_a_guard_is_set_on_damaged_copies(recall: bool, random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model()
    kvmap = random_map(source, target)
    seen: list[int] = []
    config = GuardConfig(metric="nll", repair_window=8, recall=recall)
    kinds = {"talk": ITEMS[:1], "text": ITEMS[1:]}
    guard = set_guard(kvmap, source, target, kinds, config, seen.append)
    assert (guard.recalling is not None) == recall, "nobody need measure what nothing weighs"
    assert guard.measured["cases"] == len(ITEMS) * len(seen)
    assert seen[-1] == 1 + len(list(damaged_maps(kvmap, 0)))
    assert guard.measured["set_on"] == [item.digest for item in ITEMS]
    for each in (guard, guard.recalling or guard):
        counts = {kind: told["cases"] for kind, told in each.measured["kinds"].items()}
        assert counts == {kind: len(items) * len(seen) for kind, items in kinds.items()}
    json.dumps(guard.to_json(), allow_nan=False)
    chosen = replace(kvmap, fitted={"selected_on": [ITEMS[0].digest]})
    with pytest.raises(InputError, match="helped to choose this map"):
        set_guard(chosen, source, target, kinds, GuardConfig(metric="nll"))


@pytest.mark.parametrize(("metric", "lacks"), [("accuracy", "questions"), ("nll", "continuation")])
def test_every_item_of_every_kind_must_have_what_the_metric_is_taken_from(
    metric: str, lacks: str, pair: Models
) -> None:
    kinds = {"talk": ITEMS[:1], "text": [replace(ITEMS[1], **{lacks: ()})]}
    with pytest.raises(InputError, match=f"1 of the 1 items of 'text' .* no {metric}"):
        set_guard(random_map(*pair), *pair, kinds, GuardConfig(metric=metric, repair_window=8))
