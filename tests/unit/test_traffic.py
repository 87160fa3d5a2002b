"""Moments of traffic: what is counted, what is kept, what leaves; and when a new map takes over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from handmade_maps import random_map

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.calibrate.traffic import TrafficConfig, TrafficMoments
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.promote import promote, refit, traffic_items
from trtllm_kvmap.evaluate.run import EvaluationConfig
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document

FEW = TrafficConfig(consent=True, min_documents=2, held_out_every=3)
JOINT = CalibrationConfig(joint=True)


@pytest.fixture(scope="module", autouse=True)
def _fixed_salt() -> Iterator[None]:
    """Which prompts are held out is drawn by a secret; here it is always the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secrets.token_bytes", lambda count: b"s" * count)
        yield


def prompts(count: int, tokens: int = 40, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[1, *rng.integers(2, 60, tokens - 1).tolist()] for _ in range(count)]


@pytest.fixture(scope="module")
def pair(random_model: Callable) -> tuple[LoadedModel, LoadedModel]:
    return random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)


def test_counted_prompts_give_the_moments_of_a_calibration(
    pair: tuple[LoadedModel, LoadedModel], tmp_path: Path
) -> None:
    offered = prompts(20)
    with TrafficMoments(*pair, FEW, JOINT) as traffic:
        taken = [traffic.offer(ids) for ids in offered]
        traffic.drain()
        while "dropped" in taken:  # offered faster than read: offer those again
            for i, outcome in enumerate(taken):
                if outcome == "dropped":
                    taken[i] = traffic.offer(offered[i])
            traffic.drain()
        got, kept = traffic.moments(), traffic.held_out()
        traffic.offer(prompts(1, seed=9)[0], "a")  # later traffic does not change the copy
        traffic.drain()
    counted = [ids for ids, outcome in zip(offered, taken, strict=True) if outcome == "queued"]
    assert 0 < len(kept) < 20
    assert kept == [tuple(i) for i, o in zip(offered, taken, strict=True) if o == "held_out"]
    wanted = calibrate(*pair, counted, JOINT, tmp_path / "moments")
    for mine, theirs in zip(got.parts, wanted.parts, strict=True):
        assert mine.slices == theirs.slices
        assert mine.moments.count == theirs.moments.count
        for a, b in zip(mine.moments.tensors(), theirs.moments.tensors(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-9)
    assert traffic.held_out() == []


def test_nothing_is_taken_without_consent(pair: tuple[LoadedModel, LoadedModel]) -> None:
    assert not TrafficConfig().consent
    before = threading.active_count()
    with TrafficMoments(*pair, TrafficConfig(min_documents=2), JOINT) as traffic:
        assert {traffic.offer(ids) for ids in prompts(5)} == {"no_consent"}
        assert (traffic.documents, traffic.held_out()) == (0, [])
        assert threading.active_count() == before
        with pytest.raises(InputError, match="0 prompts have been counted"):
            traffic.moments()


def test_no_token_leaves_with_the_moments(
    pair: tuple[LoadedModel, LoadedModel], tmp_path: Path
) -> None:
    offered = [[1, 2, 3, 4, *ids] for ids in prompts(12)]  # they all begin alike
    with TrafficMoments(*pair, replace(FEW, held_out_every=1000), JOINT) as traffic:
        for ids in offered:
            assert traffic.offer(ids) == "queued"
        traffic.drain()
        moments = traffic.moments()
    assert moments.sinks == ()
    assert moments.record["text"] == []
    assert set(moments.record) == {"config", "text", "documents", "tokens"}
    moments.save(tmp_path / "m")
    fitted = fit(moments, FitConfig(n=2))
    assert fitted.sinks == ()
    assert str(offered[0][4:8])[1:-1] not in str(fitted.fitted)


def test_memory_is_bounded_and_an_offer_never_waits(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    models = threading.Lock()
    models.acquire()
    config = replace(FEW, max_pending=2, held_out_every=1000)
    with TrafficMoments(*pair, config, JOINT, lock=models) as traffic:
        first, *rest = prompts(8)
        assert traffic.offer(first) == "queued"
        while traffic._pending.qsize():  # until the thread holds it, and waits for the models
            time.sleep(0.001)
        outcomes = [traffic.offer(ids) for ids in rest]
        models.release()
        assert outcomes == ["queued"] * 2 + ["dropped"] * 5
        traffic.drain()
        assert (traffic.documents, traffic.failed) == (3, 0)


def test_a_conversation_is_held_out_as_a_whole(pair: tuple[LoadedModel, LoadedModel]) -> None:
    config = replace(FEW, max_held_out=3, max_pending=64, held_out_every=2)
    with TrafficMoments(*pair, config, JOINT) as traffic:
        for number in range(12):
            outcomes = {traffic.offer(ids, f"talk {number}") for ids in prompts(3, seed=number)}
            assert len(outcomes) == 1
        assert len(traffic.held_out()) == 3


@pytest.mark.parametrize("ids", [[], [1, 2, 3], [1] * 9 + [10_000], [-1] * 9])
def test_a_prompt_that_cannot_be_read_is_no_failure(
    pair: tuple[LoadedModel, LoadedModel], ids: list[int]
) -> None:
    with TrafficMoments(*pair, FEW, JOINT) as traffic:
        assert traffic.offer(ids) == "unusable"


def test_a_prompt_that_a_model_chokes_on_is_counted_as_failed(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def choke(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("trtllm_kvmap.calibrate.traffic.capture_kv", choke)
    with TrafficMoments(*pair, replace(FEW, held_out_every=1000), JOINT) as traffic:
        for ids in prompts(3):
            traffic.offer(ids)
        traffic.drain()
        assert (traffic.documents, traffic.failed) == (0, 3)


def test_settings_are_checked(pair: tuple[LoadedModel, LoadedModel]) -> None:
    with pytest.raises(InputError, match="held_out_every must be at least 2"):
        TrafficConfig(held_out_every=1)
    with pytest.raises(InputError, match="uniform"):
        TrafficMoments(*pair, FEW, CalibrationConfig(weighting="sensitivity"))


JUDGED = EvaluationConfig(first_tokens=1, repair_window=4, resamples=200, rollout_steps=1)


@pytest.fixture(scope="module")
def tiny() -> Iterator[tuple[LoadedModel, LoadedModel, TrafficMoments, KvMap]]:
    """The tiny family, its traffic, and a map that no fit made, with the configuration of one."""
    source, target = (load_model(model_folder(name)) for name in ("tiny-s", "tiny-m"))
    rng = np.random.default_rng(5)
    config = TrafficConfig(consent=True, max_pending=64, min_documents=20)
    with TrafficMoments(source, target, config) as traffic:
        for _ in range(60):
            traffic.offer(source.tokenise(make_document(rng, 120, 12, 0).text))
        traffic.drain()
        made_up = random_map(source, target)
        fitted = {"config": {"scope": "pooled", "k": 2, "ridge": 1e-3}}
        yield source, target, traffic, replace(made_up, fitted=fitted)


def test_a_better_map_is_promoted_with_its_evidence(
    tiny: tuple[LoadedModel, LoadedModel, TrafficMoments, KvMap], tmp_path: Path
) -> None:
    source, target, traffic, old = tiny
    new = refit(old, traffic.moments())
    assert (new.scope, new.evidence) == ("pooled", None)
    served, trial = promote(old, new, source, target, traffic.held_out(), JUDGED)
    assert trial.promoted
    assert trial.gain["low"] > 0
    assert trial.nll["old"]["value"] - trial.nll["new"]["value"] == pytest.approx(
        trial.gain["value"]
    )
    assert {"source", "target"} < set(trial.nll)
    assert served.groups == new.groups
    assert served.evidence["trial"]["gain"] == trial.gain
    assert served.evidence["config"]["num_items"] == len(traffic.held_out()) // 2
    served.save(tmp_path / "map")
    assert KvMap.load(tmp_path / "map").evidence["trial"]["prompts"] == trial.prompts


def test_a_map_that_is_not_better_is_not(
    tiny: tuple[LoadedModel, LoadedModel, TrafficMoments, KvMap],
) -> None:
    source, target, traffic, old = tiny
    new = refit(old, traffic.moments())
    for now, other in ((new, old), (new, new)):
        served, trial = promote(now, other, source, target, traffic.held_out(), JUDGED)
        assert served is now
        assert not trial.promoted
        assert trial.gain["low"] <= 0


def test_too_little_to_decide_is_said(
    tiny: tuple[LoadedModel, LoadedModel, TrafficMoments, KvMap],
) -> None:
    source, target, traffic, old = tiny
    with pytest.raises(InputError, match="at least 8 are needed"):
        promote(old, old, source, target, traffic.held_out()[:7], JUDGED)
    with pytest.raises(InputError, match="does not say how it was fitted"):
        refit(replace(old, fitted={}), traffic.moments())


def test_the_end_of_a_prompt_is_scored() -> None:
    items = traffic_items([range(100), range(2000), (5, 6), (5,)])
    assert [(len(i.context), len(i.continuation)) for i in items] == [(75, 25), (1872, 128), (1, 1)]
    assert items[0].context + items[0].continuation == tuple(range(100))
