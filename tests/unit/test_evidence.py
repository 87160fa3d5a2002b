"""What proves a map, and that whoever may apply one asks the same question."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evidence_case import DIGEST, interval, vouched, whole_evidence, without_a_gap
from handmade_maps import random_map
from typer.testing import CliRunner

from trtllm_kvmap.artifact.container import read_container, write_container
from trtllm_kvmap.artifact.evidence import CONTROLS, flaw_of, no_gap, unproven
from trtllm_kvmap.artifact.kvmap import FORMAT_VERSION, KIND, KvMap
from trtllm_kvmap.artifact.registry import Registry
from trtllm_kvmap.cli.verbs import app
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


def naming(digest: Any) -> dict[str, Any]:
    found = whole_evidence()
    return found | {"config": found["config"] | {"map_digest": digest}}


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
    "another map's": (naming("0f" * 32), "is of another map (0f0f0f0f0f0f, and this one is "),
    "no map's": (naming(None), "does not name the map that was evaluated"),
    "a map's in words": (naming("\nm: sound"), "does not name the map that was evaluated"),
    "no config": (whole_evidence(config=None), "does not name the map that was evaluated"),
    "no gap": (without_a_gap(), "no worse than its target (nll 5.58 against 5.79)"),
}


def carrying(kvmap: KvMap, name: str) -> KvMap:
    """``kvmap`` with that evidence and no other flaw."""
    evidence = UNSOUND.get(name, (whole_evidence(), ""))[0]
    if evidence is None or "map's" in name:
        return kvmap.with_evidence(evidence)
    return vouched(kvmap, evidence)


@pytest.mark.parametrize("name", UNSOUND)
def test_what_proves_nothing_is_told(name: str) -> None:
    evidence, said = UNSOUND[name]
    assert said in unproven(evidence, DIGEST)
    assert bool(flaw_of(evidence, DIGEST)) == (name != "no gap")


@pytest.mark.parametrize("own", [None, "", 7, DIGEST[:-1], DIGEST.upper(), ["5e"]])
def test_a_file_that_does_not_say_which_map_it_is_is_not_vouched_for(own: Any) -> None:
    """As those of earlier releases: what the evidence names cannot be compared."""
    assert "does not say which map it is" in flaw_of(whole_evidence(), own)


def test_a_sound_report_proves_even_a_bad_map() -> None:
    """Its figures say how good it is; gates and routing read them."""
    half = {"value": 0.4, "low": None, "high": None}
    assert unproven(whole_evidence(), DIGEST) == ""
    assert unproven(whole_evidence(gap=-1.17), DIGEST) == ""
    assert unproven(whole_evidence(gap_recovered=half), DIGEST) == ""


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_gap_is_a_finite_number(number: float) -> None:
    for end in ("value", "low", "high"):
        wrong = whole_evidence(gap_recovered=interval(0.5) | {end: number})
        assert "no number" in flaw_of(wrong, DIGEST)


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
    judged = carrying(random_map(*pair), name)
    registry = Registry(tmp_path / "maps")
    entry = registry.add(judged)
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
    known = objection_to(judged.evidence, entry.map_digest, 100, 32, "up", RoutingPolicy())
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
    for seed, name in enumerate(UNSOUND):
        registry.add(carrying(random_map(*pair, seed=seed), name))
    kvmap = vouched(random_map(*pair, seed=99), whole_evidence(gap=-1.0))
    sound = registry.add(kvmap)
    prints = pair[0].fingerprint, pair[1].fingerprint
    assert registry.find(*prints)[0] == sound
    assert registry.load(*prints).evidence == kvmap.evidence
    assert len(registry.entries()) == len(UNSOUND) + 1


def test_evidence_that_is_no_object_is_a_damaged_file(pair: Pair, tmp_path: Path) -> None:
    random_map(*pair).with_evidence(["passed"]).save(tmp_path / "m")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="its evidence is no object"):
        KvMap.load(tmp_path / "m", allow_unproven=True)


def test_a_file_that_names_a_held_maps_digest_is_not_taken_for_it(
    pair: Pair, tmp_path: Path
) -> None:
    """Its header claims evidence; what was read, and is held, has none, or that of another map."""
    registry, kvmap = Registry(tmp_path), random_map(*pair)
    for held, said in ((kvmap, "carries no"), (kvmap.with_evidence(whole_evidence()), "is of an")):
        entry = registry.add(held)
        assert registry.open(entry, allow_unproven=True)
        with pytest.raises(UnprovenError, match=f"evidence.*{said}|{said}.*evidence"):
            registry.open(replace(entry, evidence=whole_evidence(), map_digest=DIGEST))


def test_evidence_of_another_map_of_the_same_two_models_proves_nothing(
    pair: Pair, tmp_path: Path
) -> None:
    """Copied from a map that earned it into one that did not: each command says so."""
    earned, other = vouched(random_map(*pair)), random_map(*pair, seed=1)
    copied = other.with_evidence(earned.evidence or {})
    copied.save(tmp_path / "map")
    own, named = other.map_digest()[:12], earned.map_digest()[:12]
    with pytest.raises(UnprovenError, match=rf"of another map \({named}, and this one is {own}\)"):
        KvMap.load(tmp_path / "map")
    registry = Registry(tmp_path / "maps")
    for kvmap in (copied, earned):
        registry.add(kvmap)
    assert [e.proven for e in registry.find(pair[0].fingerprint, pair[1].fingerprint)] == [
        True,
        False,
    ]
    result = CliRunner().invoke(app, ["registry", "verify", str(tmp_path / "maps")])
    assert result.exit_code == 1
    assert result.output.count("its evidence is of another map") == 1
    assert result.output.count(": sound") == 1


def rewritten(path: Path, **changed: Any) -> Path:
    """The same file with other entries in its content (None: without them)."""
    content, tensors = read_container(path, KIND, FORMAT_VERSION)
    content = {k: v for k, v in (content | changed).items() if v is not None}
    write_container(path, KIND, 1, content, tensors)
    return path


def test_a_file_of_an_earlier_release_is_proven_once_it_is_written_again(
    pair: Pair, tmp_path: Path
) -> None:
    """It says no map_digest, so nobody can tell whose evidence it carries until its tensors are
    read for one."""
    kvmap = vouched(random_map(*pair))
    kvmap.save(tmp_path / "map")
    old = rewritten(tmp_path / "map", map_digest=None)
    with pytest.raises(UnprovenError, match="does not say which map it is"):
        KvMap.load(old)
    Registry(tmp_path / "maps").add(KvMap.load(old, allow_unproven=True))
    (entry,) = Registry(tmp_path / "maps").entries()
    assert entry.proven
    assert KvMap.load(tmp_path / "maps" / entry.path).evidence == kvmap.evidence


def test_verify_computes_what_a_header_says_of_its_map(pair: Pair, tmp_path: Path) -> None:
    """A header that names another map, as its evidence does: loading takes its word, verify not."""
    registry = Registry(tmp_path)
    entry = registry.add(random_map(*pair).with_evidence(whole_evidence()))
    rewritten(tmp_path / entry.path, map_digest=DIGEST)
    (entry,) = registry.entries()
    assert entry.proven
    (said,) = registry.problems(entry)
    assert "names the map_digest of another map" in said
