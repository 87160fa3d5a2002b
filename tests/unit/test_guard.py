"""The guard: its signals by formula, its decision, the fall-back, and how it is set."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evaluate_cases import ITEMS
from handmade_maps import copy_map, random_map

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.second import SecondTerm
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.decode.guard.guarded import hand_over_guarded, hop_guard
from trtllm_kvmap.decode.guard.signals import WINDOW, Signals, measure_signals
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.session.session import Session
from trtllm_kvmap.errors import FormatError, InputError, MismatchError, UnavailableError
from trtllm_kvmap.evaluate.damage import damaged_maps, with_neighbour, with_noise, with_order
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
from trtllm_kvmap.inject.hf_cache import HfCache, num_entries, view_pool
from trtllm_kvmap.models import LoadedModel, RemoteModel
from trtllm_kvmap.spec.plan import plan_handoff

Models = tuple[LoadedModel, LoadedModel]


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 60, shape, generator=torch.Generator().manual_seed(seed))


def stacked(cache: HfCache) -> torch.Tensor:
    """The whole cache, [2, layers, batch, heads, entries, head_dim]."""
    pool = view_pool(cache)
    return torch.stack([torch.stack(pool.keys), torch.stack(pool.values)])


def unturned(keys: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE taken off in complex numbers: channel pair z becomes z * exp(-i position frequency)."""
    half = keys.shape[-1] // 2
    frequency = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(keys[..., :half].double(), keys[..., half:].double())
    z = z * torch.exp(-1j * positions[:, None] * frequency)
    return torch.cat([z.real, z.imag], dim=-1)


@pytest.fixture
def pair(random_model: Callable) -> Models:
    return random_model(layers=3, seed=1), random_model("llama", layers=6, head_dim=32, seed=2)


@pytest.fixture
def bridge(pair: Models) -> KvBridge:
    return KvBridge(random_map(*pair), source=pair[0], target=pair[1])


def guard_of(limit: float, weights: int = 11) -> Guard:
    """Decides by the loss gap alone."""
    return Guard((1.0,) + (0.0,) * (weights - 1), 0.0, limit, {})


# --- Signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "repair"), [(60, 16), (110, 90)])
@pytest.mark.parametrize("kept", [1, WINDOW])
def test_signals_are_those_of_the_formula(
    count: int, repair: int, kept: int, bridge: KvBridge
) -> None:
    source, target = bridge.source, bridge.target
    ids = tokens(count)
    read = prefill(source, ids)
    plan = plan_handoff(count, repair_window=repair)
    hand = bridge.hand_over(read.cache, ids, plan, keep_logits=kept)
    found = measure_signals(bridge, read.cache, ids, hand)

    first = count - min(repair, 64)
    alone = torch.log_softmax(read.logits.double(), -1)
    shared = prefill(target, ids[plan.repaired.start :], _before(bridge, read.cache, ids, plan))
    after = torch.log_softmax(shared.logits.double(), -1)
    gaps = [
        float(alone[i, ids[i + 1]] - after[i - plan.repaired.start, ids[i + 1]])
        for i in range(first, count - 1)
    ]
    assert found.loss_gap == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)
    assert found.loss_excess == pytest.approx(
        sum(max(gap, 0) for gap in gaps) / len(gaps), abs=1e-5
    )
    own = [-float(alone[i, ids[i + 1]]) for i in range(first, count - 1)]
    assert found.source_loss == pytest.approx(sum(own) / len(own), abs=1e-5)
    mapped = stacked(bridge.convert(read.cache, ids, first_tokens=0))[:, :, 0, :, first:].double()
    repaired = stacked(shared.cache)[:, :, 0, :, first:].double()
    positions = torch.arange(first, count)
    theta = target.spec.rope.theta
    mapped[0], repaired[0] = (unturned(keys[0], positions, theta) for keys in (mapped, repaired))
    error = (mapped - repaired).square().sum((2, 3, 4))
    spread = repaired.var(dim=3, correction=0).sum((2, 3)) * len(positions)
    ratio = error / spread  # [2, 6]: six layers in four bands are 2, 2, 1 and 1
    bands = [[0, 1], [2, 3], [4], [5]]
    expected = [math.sqrt(row[band].mean()) for row in ratio for band in bands]
    assert found.drift == pytest.approx(expected, rel=1e-4)


def _before(bridge: KvBridge, source_cache: HfCache, ids: torch.Tensor, plan: object) -> HfCache:
    """The target's cache of everything before the repair window, as the bridge fills it."""
    start = plan.repaired.start  # type: ignore[attr-defined]
    return bridge.convert(source_cache, ids[:start], first_tokens=1)


def test_the_source_cache_may_end_before_the_window(bridge: KvBridge) -> None:
    """A conversation whose last turn the source has not read."""
    ids, plan = tokens(60), plan_handoff(60, repair_window=20)
    whole, part = (prefill(bridge.source, ids[:n]).cache for n in (60, 40))
    signals = [
        measure_signals(bridge, cache, ids, bridge.hand_over(cache, ids, plan))
        for cache in (whole, part)
    ]
    np.testing.assert_allclose(*(s.to_features() for s in signals), atol=1e-4)
    assert (num_entries(whole), num_entries(part)) == (60, 40)


def test_a_source_in_another_process_sends_what_it_knows(bridge: KvBridge) -> None:
    ids, plan = tokens(60), plan_handoff(60, repair_window=20)
    read = prefill(bridge.source, ids)
    hand = bridge.hand_over(read.cache, ids, plan)
    here = measure_signals(bridge, read.cache, ids, hand)
    source = bridge.source
    afar = KvBridge(
        bridge.kvmap,
        source=RemoteModel(source.name, source.spec, source.fingerprint),
        target=bridge.target,
    )
    after = torch.log_softmax(read.logits.double(), -1)
    losses = torch.tensor([-float(after[i, ids[i + 1]]) for i in range(40, 59)])
    sent = measure_signals(afar, read.cache, ids, hand, losses)
    np.testing.assert_allclose(sent.to_features(), here.to_features(), atol=1e-4)


def test_a_perfect_map_shows_nothing(random_model: Callable) -> None:
    loaded = random_model()
    bridge = KvBridge(copy_map(loaded, loaded), source=loaded, target=loaded)
    ids = tokens(60)
    cache = prefill(loaded, ids).cache
    hand = bridge.hand_over(cache, ids, plan_handoff(60, repair_window=16))
    found = measure_signals(bridge, cache, ids, hand)
    assert abs(found.loss_gap) < 1e-5
    assert 0 <= found.loss_excess < 1e-5
    assert max(found.drift) < 1e-4


def test_what_cannot_be_measured_says_why(bridge: KvBridge) -> None:
    ids = tokens(2, 30)
    cache = prefill(bridge.source, ids).cache
    batch = bridge.hand_over(cache, ids, plan_handoff(30, repair_window=8))
    with pytest.raises(InputError, match=r"one prompt with at least 2 repaired.*\[2, 30\]"):
        measure_signals(bridge, cache, ids, batch)
    alone = prefill(bridge.source, ids[0]).cache
    last = bridge.hand_over(alone, ids[0], plan_handoff(30, repair_window=1))
    with pytest.raises(InputError, match="1 repaired; hand rows over one by one"):
        measure_signals(bridge, alone, ids[0], last)
    good = bridge.hand_over(alone, ids[0], plan_handoff(30, repair_window=8))
    afar = SimpleNamespace(source=SimpleNamespace(name="far"), target=bridge.target)
    with pytest.raises(UnavailableError, match="losses of far are not to be had here"):
        measure_signals(afar, alone, ids[0], good)  # type: ignore[arg-type]
    for losses, cache in ((6, alone), (7, prefill(bridge.source, ids[0, :29]).cache)):
        with pytest.raises(InputError, match=f"sent {losses} losses.*a guard needs 7 and 30"):
            measure_signals(bridge, cache, ids[0], good, torch.zeros(losses))


# --- The decision and the fall-back --------------------------------------------------------------


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


# --- The file ------------------------------------------------------------------------------------


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


# --- Setting it ----------------------------------------------------------------------------------


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


# --- Damage --------------------------------------------------------------------------------------


def test_damage_is_what_it_says(pair: Models) -> None:
    kvmap = random_map(*pair)
    group = kvmap.groups[0]
    noisy = with_noise(group, 0.5, np.random.default_rng(0))
    ratio = float((noisy.weight - group.weight).std() / group.weight.std())
    assert 0.4 < ratio < 0.6
    neighbours = with_neighbour(kvmap, 5)  # the last layer takes the one before
    for mine, theirs in zip(neighbours, kvmap.groups, strict=True):
        wanted = 4 if theirs.layer == 5 else theirs.layer
        twin = next(
            g
            for g in kvmap.groups
            if (g.field, g.layer, g.heads) == (mine.field, wanted, mine.heads)
        )
        assert mine.layer == theirs.layer
        assert torch.equal(mine.weight, twin.weight)


def with_terms(kvmap: KvMap, activation: str, *, alone: bool) -> KvMap:
    """A second term of 3 channels in every group, ``alone`` or beside its matrix."""
    generator = torch.Generator().manual_seed(9)
    groups = []
    for group in kvmap.groups:
        width, out = group.weight.shape
        down, up = (
            torch.randn(*shape, generator=generator) / shape[0] ** 0.5
            for shape in ((width, 3), (3, out))
        )
        second = SecondTerm(down, torch.zeros(3), up, activation)
        groups.append(replace(group, weight=None if alone else group.weight, second=second))
    return replace(kvmap, groups=tuple(groups))


@pytest.mark.parametrize("terms", [None, ("identity", True), ("silu", False)])
def test_another_order_is_what_a_shuffled_layer_would_give(
    pair: Models, terms: tuple[str, bool] | None
) -> None:
    """Values of one source layer, channels shuffled in the cache, through the map as it is."""
    source, target = pair
    kvmap = random_map(source, target)
    kvmap = kvmap if terms is None else with_terms(kvmap, terms[0], alone=terms[1])
    layer, order = 1, torch.randperm(source.spec.head_dim)
    changed = replace(
        kvmap, groups=tuple(with_order(kvmap, group, layer, order) for group in kvmap.groups)
    )
    ids = tokens(30)
    cache = prefill(source, ids).cache
    shuffled = prefill(source, ids).cache
    # Row i of the changed matrix is row order[i] of the map's: the inverse shuffle of the cache.
    inverse = torch.argsort(order)
    view_pool(shuffled).values[layer].copy_(view_pool(cache).values[layer][..., inverse])
    through, beside = (
        stacked(KvBridge(m, source=source, target=target).convert(c, ids, first_tokens=0))[1]
        for m, c in ((kvmap, shuffled), (changed, cache))
    )
    torch.testing.assert_close(beside, through, rtol=0, atol=1e-4)


def test_a_low_rank_is_damaged_as_a_matrix_is(pair: Models) -> None:
    kvmap = random_map(*pair)
    low = with_terms(kvmap, "identity", alone=True)
    assert len(list(damaged_maps(low, 0))) == len(list(damaged_maps(kvmap, 0)))
    group = low.groups[0]
    (weight, bias), noisy = group.linear(), with_noise(group, 0.5, np.random.default_rng(0))
    assert torch.equal(noisy.bias, bias)
    assert 0.3 < float((noisy.weight - weight).std() / weight.std()) < 0.7


def test_a_map_that_cannot_be_damaged_that_way_is_left_out(random_model: Callable) -> None:
    loaded = random_model()
    damaged = list(damaged_maps(copy_map(loaded, loaded), 0))
    assert len(damaged) == loaded.spec.num_layers  # a copy has no matrix: only layers change
    assert all(isinstance(each, KvMap) for each in damaged)
