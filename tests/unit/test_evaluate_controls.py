"""The controls pass on a sound run and stop a broken one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from evaluate_cases import ITEMS, QUICK
from handmade_maps import random_map

from trtllm_kvmap.artifact.evidence import CONTROLS, flaw_of
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.errors import UnprovenError
from trtllm_kvmap.evaluate import arms, controls
from trtllm_kvmap.evaluate.bootstrap import draw
from trtllm_kvmap.evaluate.reading import Reading, read_item
from trtllm_kvmap.evaluate.report.report import evidence
from trtllm_kvmap.evaluate.run import EvaluationConfig, evaluate
from trtllm_kvmap.evaluate.score import Score
from trtllm_kvmap.evaluate.summary import Draws
from trtllm_kvmap.evaluate.tasks.config import TaskConfig
from trtllm_kvmap.evaluate.tasks.named import read_items
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.inject.hf_cache import view_pool
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import mostly_facts


@pytest.fixture(scope="module")
def pair(random_model: Callable) -> tuple[LoadedModel, LoadedModel]:
    return random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)


Tiny = tuple[LoadedModel, LoadedModel, KvMap]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A trained pair and a map fitted for it."""
    source, target = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))
    documents = [target.tokenise(text) for text in mostly_facts(seed=1, count=40)]
    folder = tmp_path_factory.mktemp("moments")
    moments = calibrate(source, target, documents, CalibrationConfig(), folder / "m")
    return source, target, fit(moments, FitConfig(n=8))


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


def test_a_run_writes_the_map_no_oftener_than_its_bytes_are_compared(
    pair: tuple[LoadedModel, LoadedModel],
    reading: Reading,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Maps have gigabytes: one file to compare with and to damage, one more of the same map, and
    neither is left behind. Its digest needs none."""
    written, save = [], KvMap.save

    def counted(kvmap: KvMap, path: Path) -> str:
        written.append(path)
        return save(kvmap, path)

    monkeypatch.setattr(KvMap, "save", counted)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    controls.run_controls(random_map(*pair), reading)
    random_map(*pair).map_digest()
    assert len(written) == len(set(written)) == 2
    assert all(path.is_relative_to(tmp_path) for path in written)
    assert not list(tmp_path.iterdir())


def draws_of(metric: str, **per_document: tuple[float, ...]) -> dict[str, Draws]:
    """Draws of arms whose documents, of ten questions and ten tokens each, scored so many answers
    or nats a token."""

    def made(values: tuple[float, ...]) -> Draws:
        right = [round(10 * v) if metric == "accuracy" else 0 for v in values]
        nats = [0.0 if metric == "accuracy" else 10 * v for v in values]
        asked = 10 if metric == "accuracy" else 0
        scores = [Score(c, asked, 2.5, n, 10, 0, 0, 1) for c, n in zip(right, nats, strict=True)]
        return Draws(scores, draw(len(values), 400, 0))

    return {name: made(values) for name, values in per_document.items()}


LOSSES = (0.5, 3.0, 1.25, 2.0, 4.0, 1.0)  # documents differ far more than arms do


def check_nll(wrong: tuple[float, ...], arm: str = "mapped") -> str:
    twin = "wrong_document" if arm == "mapped" else "wrong_document_repaired"
    given = {"wrong_document": LOSSES, "no_context": LOSSES, "mapped": LOSSES}
    return controls.check_wrong_document(
        draws_of("nll", **given | {arm: LOSSES, twin: wrong}), arm, "nll"
    )


def test_the_right_document_must_do_better_pair_by_pair() -> None:
    """A gain of 0.02 nats on every document shows; so does the lack of any."""
    assert check_nll(tuple(loss + 0.02 for loss in LOSSES)) == "passed"
    assert check_nll(LOSSES).startswith(
        "not judged: the right document over a wrong one gains 0 [0 0]"
    )
    unsure = tuple(loss + d for loss, d in zip(LOSSES, (0.1, -0.1) * 3, strict=True))
    assert "reaches zero" in check_nll(unsure)
    with pytest.raises(UnprovenError, match=r"worse than a wrong one, by -0\.02 .* in nll"):
        check_nll(tuple(loss - 0.02 for loss in LOSSES))


def test_the_arm_that_is_reported_has_its_own_wrong_document() -> None:
    arm = "mapped_repaired_32"
    assert "reaches zero" in check_nll(LOSSES, arm)
    assert check_nll(tuple(loss + 0.02 for loss in LOSSES), arm) == "passed"


def test_answers_must_come_from_the_right_document() -> None:
    right, wrong, none = (0.9, 0.5, 0.7, 0.8), (0.3, 0.2, 0.4, 0.3), (0.3, 0.2, 0.2, 0.3)

    def check(**changed: tuple[float, ...]) -> str:
        given = {"mapped": right, "wrong_document": wrong, "no_context": none} | changed
        return controls.check_wrong_document(draws_of("accuracy", **given), "mapped", "accuracy")

    assert check() == "passed"
    assert check(mapped=wrong).startswith("not judged")
    with pytest.raises(UnprovenError, match="worse than a wrong one"):
        check(mapped=(0.1, 0.1, 0.1, 0.1))
    with pytest.raises(UnprovenError, match="lies above that of no context"):
        check(wrong_document=(0.5, 0.5, 0.4, 0.5), mapped=(1.0, 1.0, 1.0, 1.0))
    alone = draws_of("accuracy", mapped=right, no_context=none)
    said = controls.check_wrong_document(alone, "mapped", "accuracy")
    assert said.startswith("not judged: there is no other document")


def test_a_map_that_reads_nothing_is_not_proven(tiny: Tiny) -> None:
    """Every matrix zero: the target sees the bias, the same for all documents. Both report, and
    only the map that reads earns evidence."""
    source, target, fitted = tiny
    items = read_items(TaskConfig(num_items=6, context_tokens=160, seed=77), target.tokenizer)
    config = EvaluationConfig(metric="nll", first_tokens=4, repair_window=8, resamples=200)
    zeroed = tuple(
        g if g.weight is None else replace(g, weight=torch.zeros_like(g.weight))
        for g in fitted.groups
    )
    reads = evaluate(fitted, source, target, items, config)
    assert reads.controls["wrong_document"] == "passed"
    assert not flaw_of(evidence(reads), fitted.map_digest())
    deaf = evaluate(replace(fitted, groups=zeroed), source, target, items, config)
    assert "reaches zero" in deaf.controls["wrong_document"]
    with pytest.raises(UnprovenError, match="wrong_document"):
        evidence(deaf)


def test_evidence_names_every_control_that_runs() -> None:
    assert (*controls.CONTROLS, "wrong_document") == CONTROLS
