"""What proves a map, and that whoever may apply one asks the same question."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evidence_case import interval, whole_evidence, without_a_gap
from handmade_maps import random_map

from trtllm_kvmap.artifact.evidence import CONTROLS, flaw_of, no_gap, unproven
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.registry import Registry
from trtllm_kvmap.decode.routing.vouched import RoutingPolicy, objection_to
from trtllm_kvmap.errors import FormatError, UnprovenError
from trtllm_kvmap.inject.connector.config import ConnectorConfig
from trtllm_kvmap.mapper.ready import ReadyMappers
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.serve.repository import write_repository
from trtllm_kvmap.serve.settings import ServeConfig
from trtllm_kvmap.serve.target import TargetAnswerer

PASSED = dict.fromkeys(CONTROLS, "passed")
NOTHING = dict.fromkeys(("value", "low", "high"))


def without(control: str) -> dict[str, str]:
    return {name: said for name, said in PASSED.items() if name != control}


UNSOUND: dict[str, tuple[Any, str]] = {
    "none": (None, "carries no evidence"),
    "empty": ({}, "names no controls"),
    "forged": ({"gap_recovered": interval(99.0)}, "names no controls"),
    "no object": ({"controls": ["passed"]}, "names no controls"),
    "no controls": (whole_evidence(controls={}), "reinjection, rope_round_trip"),
    "one missing": (
        whole_evidence(controls=without("wrong_document")),
        "does not hold (wrong_document not passed)",
    ),
    "one failed": (
        whole_evidence(controls=PASSED | {"reinjection": "failed"}),
        "does not hold (reinjection not passed)",
    ),
    "another failed": (whole_evidence(controls=PASSED | {"c": None}), "('c' not passed)"),
    "a line of its own": (
        whole_evidence(controls=PASSED | {"c\nm: sound": None}),
        r"('c\nm: sound' not passed)",
    ),
    "another metric": (
        without_a_gap() | {"config": {"metric": "\n"}, "arms": {}},
        "do not say why",
    ),
    "true control": (whole_evidence(controls=PASSED | {"reinjection": True}), "(reinjection not"),
    "bare gap": (whole_evidence(gap_recovered=0.9), "no gap recovered with an interval"),
    "half a gap": (
        whole_evidence(gap_recovered={"value": 0.9}),
        "no gap recovered with an interval",
    ),
    "true gap": (whole_evidence(gap_recovered=interval(0.9) | {"value": True}), "no number"),
    "huge gap": (whole_evidence(gap_recovered=interval(0.9) | {"value": 10**400}), "no number"),
    "worded gap": (whole_evidence(gap_recovered=interval(0.9) | {"low": "0.8"}), "no number"),
    "gap left out": (whole_evidence(gap_recovered=NOTHING), "do not say why"),
    "no figures": (whole_evidence(gap_recovered=NOTHING, arms={}), "do not say why"),
    "no gap": (without_a_gap(), "no worse than its target (nll 5.58 against 5.79)"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_what_proves_nothing_is_told(name: str) -> None:
    evidence, said = UNSOUND[name]
    assert said in unproven(evidence)
    assert bool(flaw_of(evidence)) == (name != "no gap")


def test_a_sound_report_proves_even_a_bad_map() -> None:
    """Its figures say how good it is; gates and routing read them."""
    assert unproven(whole_evidence()) == ""
    assert unproven(whole_evidence(gap=-1.17)) == ""
    assert unproven(whole_evidence(gap_recovered={"value": 0.4, "low": None, "high": None})) == ""


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_gap_is_a_finite_number(number: float) -> None:
    for end in ("value", "low", "high"):
        assert "no number" in flaw_of(whole_evidence(gap_recovered=interval(0.5) | {end: number}))


def test_no_gap_is_read_off_the_two_models_alone() -> None:
    def of(metric: Any, source: Any, target: Any) -> str:
        arms = {"source": {metric: {"value": source}}, "target": {metric: {"value": target}}}
        return no_gap({"config": {"metric": metric}, "arms": arms})

    assert of("nll", 2.0, 1.9) == of("accuracy", 0.5, 0.6) == ""
    assert "accuracy 0.5 against 0.5" in of("accuracy", 0.5, 0.5)
    assert "nll 1.9 against 2" in of("nll", 1.9, 2.0)
    for wrong in ((None, 1.0), (1.0, "2"), (math.nan, 1.0), (1, 10**400)):
        assert of("nll", *wrong) == ""
    assert of("worse\nm: sound", 1.0, 1.0) == ""
    for damaged in ({}, {"config": []}, {"config": {"metric": []}, "arms": {}}):
        assert no_gap(damaged) == ""


Pair = tuple[LoadedModel, LoadedModel]


@pytest.fixture(scope="module")
def pair(random_model: Callable) -> Pair:
    return random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)


@pytest.mark.parametrize("name", [*UNSOUND, "sound"])
def test_whoever_may_apply_a_map_asks_the_same(
    name: str, pair: Pair, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    source, target = pair
    evidence = UNSOUND.get(name, (whole_evidence(), ""))[0]
    registry = Registry(tmp_path / "maps")
    entry = registry.add(random_map(*pair).with_evidence(evidence))
    path = tmp_path / "maps" / entry.path
    prints = source.fingerprint, target.fingerprint
    models = str(model_folder("qwen3", seed=1)), str(model_folder("qwen3", seed=2, layers=3))
    doors: dict[str, Callable[..., Any]] = {
        "file": lambda **asked: KvMap.load(path, **asked),
        "registry": lambda **asked: registry.load(*prints, **asked),
        "entry": lambda **asked: registry.open(entry, **asked),
        "connector": lambda **asked: ConnectorConfig(str(path), "a:b", **asked).load_map(),
        "repository": lambda **asked: write_repository(
            tmp_path / "repository", path, *models, ServeConfig(), **asked
        ),
    }
    sound = name == "sound"
    assert entry.proven == sound
    assert entry.gap_recovered == (0.5 if sound else None)
    assert bool(registry.problems(entry)) == (not sound)
    assert sum("nproven" in said for said in registry.problems(entry)) == (not sound)
    known = objection_to(evidence, 100, 32, "up", RoutingPolicy())
    assert bool(known) == (not sound)
    served = TargetAnswerer(target, path)
    assert (served.kvmap is not None, served.without.reason) == (
        (True, "") if sound else (False, "unproven")
    )
    for door, through in doors.items():
        if sound:
            assert through(), door
            continue
        with pytest.raises(UnprovenError, match=r"is unproven: .*allow unproven maps"):
            through()
        assert not (tmp_path / "repository").exists()
        assert through(allow_unproven=True), door
    if not sound:
        with pytest.raises(UnprovenError):
            ReadyMappers(registry, None).mapper(*prints)
        with pytest.raises(UnprovenError):  # held in memory since: still not proven
            registry.open(entry)
        unread = Registry(tmp_path / "maps")
        with pytest.raises(UnprovenError):
            unread.load(*prints)
        assert unread.resident.keys == [], "told from its header, without reading its matrices"


def test_no_claim_of_an_unproven_map_ranks_it(pair: Pair, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for seed, (evidence, _) in enumerate(UNSOUND.values()):
        registry.add(random_map(*pair, seed=seed).with_evidence(evidence))
    sound = registry.add(random_map(*pair, seed=99).with_evidence(whole_evidence(gap=-1.0)))
    prints = pair[0].fingerprint, pair[1].fingerprint
    assert registry.find(*prints)[0] == sound
    assert registry.load(*prints).evidence == whole_evidence(gap=-1.0)
    assert len(registry.entries()) == len(UNSOUND) + 1


def test_evidence_that_is_no_object_is_a_damaged_file(pair: Pair, tmp_path: Path) -> None:
    random_map(*pair).with_evidence(["passed"]).save(tmp_path / "m")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="its evidence is no object"):
        KvMap.load(tmp_path / "m", allow_unproven=True)


def test_a_file_that_names_a_held_maps_digest_is_not_taken_for_it(
    pair: Pair, tmp_path: Path
) -> None:
    """Its header claims evidence; what was read, and is held, has none."""
    registry = Registry(tmp_path)
    entry = registry.add(random_map(*pair))
    assert registry.open(entry, allow_unproven=True)
    with pytest.raises(UnprovenError, match="carries no evidence"):
        registry.open(replace(entry, evidence=whole_evidence()))
