"""When a map refitted from traffic takes over: only where it is better, and proven."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade_maps import random_map

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.calibrate.traffic import TrafficConfig, TrafficMoments
from trtllm_kvmap.errors import InputError, UnprovenError
from trtllm_kvmap.evaluate.promote import promote, refit, traffic_items
from trtllm_kvmap.evaluate.report.report import Report
from trtllm_kvmap.evaluate.run import EvaluationConfig, evaluate
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document

JUDGED = EvaluationConfig(first_tokens=1, repair_window=4, resamples=200, rollout_steps=1)
Tiny = tuple[LoadedModel, LoadedModel, MomentSet, list[tuple[int, ...]], KvMap]


@pytest.fixture(scope="module")
def tiny() -> Iterator[Tiny]:
    """The tiny family, its traffic, and a map that no fit made, with the configuration of one."""
    source, target = (load_model(model_folder(name)) for name in ("tiny-s", "tiny-m"))
    rng = np.random.default_rng(5)
    config = TrafficConfig(consent=True, held_out_every=2, max_pending=64, min_documents=20)
    with pytest.MonkeyPatch.context() as patch:  # a secret draws what is held out; here it is known
        patch.setattr("secrets.token_bytes", lambda count: b"s" * count)
        counted = TrafficMoments(source, target, config)
    with counted as traffic:
        for _ in range(60):
            traffic.offer(source.tokenise(make_document(rng, 120, 12, 0).text))
        traffic.drain()
        made_up = random_map(source, target)
        fitted = {"config": {"scope": "pooled", "k": 2, "ridge": 1e-3}}
        held_out = traffic.held_out()
        yield source, target, traffic.moments(), held_out, replace(made_up, fitted=fitted)


def test_a_better_map_is_promoted_with_its_evidence(tiny: Tiny, tmp_path: Path) -> None:
    source, target, moments, held_out, old = tiny
    new = refit(old, moments)
    assert (new.scope, new.evidence) == ("pooled", None)
    served, trial = promote(old, new, source, target, held_out, JUDGED)
    assert trial.promoted
    assert trial.gain["low"] > 0
    assert trial.nll["old"]["value"] - trial.nll["new"]["value"] == pytest.approx(
        trial.gain["value"]
    )
    assert {"source", "target"} < set(trial.nll)
    assert served.groups == new.groups
    assert served.evidence["trial"]["gain"] == trial.gain
    assert served.evidence["config"]["num_items"] == len(held_out) // 2
    served.save(tmp_path / "map")
    assert KvMap.load(tmp_path / "map").evidence["trial"]["prompts"] == trial.prompts


def test_a_map_that_is_not_better_is_not(
    tiny: Tiny,
) -> None:
    source, target, moments, held_out, old = tiny
    new = refit(old, moments)
    for now, other in ((new, old), (new, new)):
        served, trial = promote(now, other, source, target, held_out, JUDGED)
        assert served is now
        assert not trial.promoted
        assert trial.gain["low"] <= 0


def test_a_winner_whose_source_is_the_better_model_is_not_served(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It beats the old map, and no host would load it: nothing shows that a hand-over gains."""
    source, target, moments, held_out, old = tiny

    def better_source(*given: Any) -> Report:
        report = evaluate(*given)
        arms = report.arms | {"source": report.arms["source"] | {"nll": figure(0.5)}}
        return replace(report, arms=arms, gap_recovered=figure(None))

    def figure(value: float | None) -> dict[str, float | None]:
        return {"value": value, "low": value, "high": value}

    monkeypatch.setattr("trtllm_kvmap.evaluate.promote.evaluate", better_source)
    with pytest.raises(UnprovenError, match="its source alone is no worse than its target"):
        promote(old, refit(old, moments), source, target, held_out, JUDGED)


def test_too_little_to_decide_is_said(
    tiny: Tiny,
) -> None:
    source, target, moments, held_out, old = tiny
    with pytest.raises(InputError, match="19 different prompts were held out; at least 20"):
        promote(old, old, source, target, held_out[:19] * 2, JUDGED)
    with pytest.raises(InputError, match="does not say how it was fitted"):
        refit(replace(old, fitted={}), moments)


def test_the_end_of_a_prompt_is_scored() -> None:
    items = traffic_items([range(100), range(2000), (5, 6), (5,)])
    assert [(len(i.context), len(i.continuation)) for i in items] == [(75, 25), (1872, 128), (1, 1)]
    assert items[0].context + items[0].continuation == tuple(range(100))
