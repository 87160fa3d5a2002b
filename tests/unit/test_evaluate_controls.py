"""The controls pass on a sound run and stop a broken one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from evaluate_cases import ITEMS, QUICK
from handmade_maps import random_map

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.errors import UnprovenError
from trtllm_kvmap.evaluate import arms, controls
from trtllm_kvmap.evaluate.reading import Reading, read_item
from trtllm_kvmap.evaluate.run import evaluate
from trtllm_kvmap.inject.hf_cache import view_pool
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.models import LoadedModel


@pytest.fixture(scope="module")
def pair(random_model: Callable) -> tuple[LoadedModel, LoadedModel]:
    return random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)


@pytest.fixture(scope="module")
def reading(pair: tuple[LoadedModel, LoadedModel]) -> Reading:
    return read_item(*pair, ITEMS[0], ITEMS[1:], rollout_steps=5)


def test_the_controls_pass(pair: tuple[LoadedModel, LoadedModel], reading: Reading) -> None:
    assert controls.run_controls(random_map(*pair), reading) == {
        "reinjection": "passed",
        "rope_round_trip": "passed",
        "deterministic_bytes": "passed",
        "corruption_detected": "passed",
    }


def broken_put_span(cache: object, first: int, taken: KvPool) -> None:
    for here, there in zip(view_pool(cache).keys, taken.keys, strict=True):
        here.copy_(there)  # the values are forgotten


def test_a_broken_reinjection_stops_the_run(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "put_span", broken_put_span)
    seen: list[int] = []
    with pytest.raises(UnprovenError, match="control reinjection failed: the cache"):
        evaluate(random_map(*pair), *pair, ITEMS, QUICK, on_item=lambda done, _: seen.append(done))
    assert not seen


def test_another_rotation_than_the_models_fails(
    pair: tuple[LoadedModel, LoadedModel], reading: Reading
) -> None:
    spec = reading.target.model.spec
    other = replace(spec, rope=replace(spec.rope, theta=500.0))
    stranger = replace(reading.target, model=replace(reading.target.model, spec=other))
    with pytest.raises(UnprovenError, match="rope_round_trip"):
        controls.run_controls(random_map(*pair), replace(reading, target=stranger))


def test_unlike_bytes_and_unseen_corruption_fail(
    pair: tuple[LoadedModel, LoadedModel], reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    kvmap = random_map(*pair)
    monkeypatch.setattr(KvMap, "load", staticmethod(lambda path, **_: kvmap))
    with pytest.raises(UnprovenError, match="corruption_detected"):
        controls.run_controls(kvmap, reading)
    counter = iter(range(9))
    monkeypatch.setattr(
        KvMap, "save", lambda self, path: path.write_text(f"{' ' * 200}{next(counter)}")
    )
    with pytest.raises(UnprovenError, match="deterministic_bytes"):
        controls.run_controls(kvmap, reading)


def figures_of(**arm_values: tuple[float | None, float | None]) -> dict:
    def entry(low: float | None, high: float | None) -> dict:
        return {"value": low, "low": low, "high": high}

    names = ("wrong_document", "no_context", "mapped")
    return {
        name: {
            "accuracy": entry(*arm_values.get(f"{name}_accuracy", (None, None))),
            "nll": entry(*arm_values.get(f"{name}_nll", (None, None))),
        }
        for name in names
    }


def test_a_wrong_document_must_not_help() -> None:
    chance = figures_of(wrong_document_accuracy=(0.2, 0.35), no_context_accuracy=(0.18, 0.3))
    assert controls.check_wrong_document(chance) == "passed"
    knowing = figures_of(wrong_document_accuracy=(0.31, 0.4), no_context_accuracy=(0.18, 0.3))
    with pytest.raises(UnprovenError, match="wrong_document"):
        controls.check_wrong_document(knowing)
    worse = figures_of(wrong_document_nll=(2.7, 2.9), mapped_nll=(2.0, 2.1))
    assert controls.check_wrong_document(worse) == "passed"
    better = figures_of(wrong_document_nll=(1.7, 1.9), mapped_nll=(2.0, 2.1))
    with pytest.raises(UnprovenError, match="right document"):
        controls.check_wrong_document(better)
    alone = {**chance, "wrong_document": {"refused": "one item"}}
    assert controls.check_wrong_document(alone) == "not judged: one item"
