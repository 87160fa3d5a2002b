"""Every recipe at a small size, from the command to its files; and the figures it adds, by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.registry import Registry
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.cli.verbs import app
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import UnprovenError
from trtllm_kvmap.evaluate.bootstrap import draw
from trtllm_kvmap.evaluate.controls import check_wrong_document
from trtllm_kvmap.evaluate.report.report import Report
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.inject.hf_cache import view_pool
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.recipes import per_head_controls, steps
from trtllm_kvmap.recipes.divergence import teacher_divergence
from trtllm_kvmap.recipes.lowrank_residual import lifted, multiplied_out
from trtllm_kvmap.recipes.pair import OwnModels
from trtllm_kvmap.recipes.pooled_multiturn import failing
from trtllm_kvmap.recipes.run import config_of, run_recipe
from trtllm_kvmap.recipes.steps import ratio_figure
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document

SMALL: dict[str, Any] = {
    "fit": {"num_items": 12},
    "selection": {"num_items": 2, "context_tokens": 256},
    "report": {"num_items": 4, "context_tokens": 256, "questions": 4},
    "judged": {"rollout_steps": 2, "resamples": 200},
}
OWN: dict[str, dict[str, Any]] = {
    "copy-repair-speculate": {"answers": 2, "new_tokens": 6, "rounds": 1},
    "ridge-k": {"candidates": {"k": [1, 3], "ridge": [1.0e-3]}},
    "lowrank-residual": {
        "candidates": {"k": [2], "rank": [8]},
        "residual": {"steps": 3},
        "lessons": {"num_items": 4, "context_tokens": 100},
        "lengths": [80, 160],
    },
    "per-head-controls": {"k": [1, 2]},
    "pooled-multiturn": {
        "more_targets": [],
        "candidates": {"k": [2]},
        "failing_above": 1.0,
        "mlp": {"steps": 20, "hidden": 8, "batch_tokens": 32},
        "mlp_documents": 4,
        "conversations": {"num_items": 2, "context_tokens": 120, "questions": 4},
    },
}
Found = tuple[dict[str, Any], Path]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    """What a recipe wrote: recipe.json and the folder; run once each, through the command."""
    done: dict[str, Found] = {}

    def run(name: str) -> Found:
        if name not in done:
            out = tmp_path_factory.mktemp(name)
            config = out / "small.yaml"
            config.write_text(yaml.safe_dump({**SMALL, **OWN[name]}))
            arguments = ["recipe", name, "--config", str(config), "--out", str(out / "found")]
            result = CliRunner().invoke(app, arguments, catch_exceptions=False)
            assert result.exit_code == 0, result.output
            found = json.loads((out / "found" / "recipe.json").read_text())
            assert result.output.splitlines()[-1] == f"OK: {found['sentence']}"
            done[name] = found, out / "found"
        return done[name]

    return run


def map_of(found: Found, name: str) -> KvMap:
    return KvMap.load(found[1] / name / f"{name}.kvmap.safetensors", allow_unproven=True)


@pytest.mark.parametrize("name", OWN)
def test_a_recipe_writes_its_maps_their_reports_and_what_it_found(
    ran: Callable[[str], Found], name: str
) -> None:
    found, out = ran(name)
    assert set(found) == {"recipe", "config", "summary", "tables", "left_out", "sentence"}
    assert found["recipe"] == name
    assert found["config"]["fit"]["num_items"] == 12
    assert found["config"]["report"]["seed"] == 3  # what is not overridden is the recipe's own
    for each, summary in found["summary"].items():
        report = Report.load(out / each / "report.json")
        arms = {"native target": "target", "native source": "source"}
        arms["mapped"] = report.config["arm"]
        for shown, arm in arms.items():
            assert summary[shown] == report.arms[arm]["accuracy"]
        assert summary["gap recovered"] == report.gap_recovered
        assert (out / each / "report.html").read_text().startswith("<!doctype html>")
        assert map_of((found, out), each).num_parameters == report.kvmap["parameters"]


def test_copy_repair_speculate_learns_nothing_and_tells_every_repair(
    ran: Callable[[str], Found],
) -> None:
    found = ran("copy-repair-speculate")
    assert all(group.copies for group in map_of(found, "copy").groups)
    repaired, answers, drafts = found[0]["tables"].values()
    assert [row["arm"] for row in repaired][2:-1] == [
        f"mapped, repair {n}" for n in (0, 8, 16, 32, 64)
    ]
    assert answers[0]["way"] == "native target"
    assert answers[0]["whole answer"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert drafts[0]["verifier steps"] >= 2


def test_ridge_k_keeps_the_candidate_of_least_loss_and_judges_every_gate(
    ran: Callable[[str], Found],
) -> None:
    found = ran("ridge-k")
    candidates, arms, controls, gates = found[0]["tables"].values()
    least = min(candidates, key=lambda row: row["NLL"])
    assert [row["k"] for row in candidates] == [1, 3]
    assert [row for row in candidates if row["chosen"]] == [least]
    assert map_of(found, "ridge-k").fitted["config"]["k"] == least["k"]
    assert [row["arm"] for row in arms][2] == "direct injection"
    assert {row["found"] for row in controls} == {"passed"}
    assert {row["verdict"] for row in gates} <= {"pass", "fail"}
    assert len(gates) == 3


def test_lowrank_residual_trains_on_the_reader_and_counts_device_seconds(
    ran: Callable[[str], Found],
) -> None:
    found = ran("lowrank-residual")
    refined = map_of(found, "ridge-residual").fitted["refined"]
    assert refined["config"]["teacher"] == "source"
    assert refined["config"]["term"] == "residual"
    assert map_of(found, "ridge").groups[0].second is not None  # a rank of 8
    kl = found[0]["tables"]["KL from what the reader says, nats a token"][0]
    assert kl["windows"] == 4
    ratio = kl["with residual"]["value"] / kl["ridge"]["value"]
    assert kl["residual over ridge"]["value"] == pytest.approx(ratio)
    rows = found[0]["tables"]["device-seconds, a reply of 64 tokens"]
    assert [row["tokens"] for row in rows] == [80, 160]
    for row in rows:
        saved = 1 - row["active, split"] / row["active, reader"]
        assert row["active saved"] == pytest.approx(saved)
        assert row["reserved, split"] > row["active, split"]
        assert row["reserved, reader"] == row["active, reader"]


def test_per_head_controls_maps_heads_by_their_own_head_in_k_layers(
    ran: Callable[[str], Found],
) -> None:
    found = ran("per-head-controls")
    for k in (1, 2):
        for group in map_of(found, f"head-k{k}").groups:
            assert len({s.layer for s in group.slices}) == len(group.slices) == k
            assert {s.head for s in group.slices} == set(group.heads)
    controls, arms = found[0]["tables"].values()
    assert len(controls) == 7
    assert [row["arm"] for row in arms][3:] == ["head-k1", "head-k2"]


class CalibratedError(Exception):
    """Raised in place of calibrating; holds the documents and the config."""


@pytest.fixture
def instead_of_calibrating(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(source: object, target: object, *asked: Any, **rest: Any) -> None:
        raise CalibratedError(*asked[:2])

    monkeypatch.setattr(steps, "calibrate", seen)


@pytest.mark.parametrize("name", OWN)
def test_every_recipe_calibrates_as_its_config_says(
    instead_of_calibrating: None, tmp_path: Path, name: str
) -> None:
    for over, config in (
        ({}, CalibrationConfig()),  # as the studies had it
        ({"calibration": {"weighting": "attention"}}, CalibrationConfig(weighting="attention")),
    ):
        with pytest.raises(CalibratedError) as found:
            run_recipe(name, tmp_path, over={**SMALL, **OWN[name], **over})
        assert found.value.args[1] == config


def test_the_weighting_of_the_command_goes_over_the_file_and_keeps_its_rest(
    instead_of_calibrating: None, tmp_path: Path
) -> None:
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump({**SMALL, "calibration": {"joint": True}}))
    files = ["--config", str(config), "--out", str(tmp_path / "found")]
    command = ["recipe", "ridge-k", "--weighting", "attention", *files]
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, CalibratedError)
    assert error.args[1] == CalibrationConfig(weighting="attention", joint=True)


def test_text_of_your_own_is_read_in_windows_of_the_calibration(
    instead_of_calibrating: None, tmp_path: Path
) -> None:
    rng = np.random.default_rng(11)
    text, data = tmp_path / "corpus.txt", tmp_path / "held-out.txt"
    text.write_text(make_document(rng, 300, 8, 0).text)
    data.write_text(" ".join(make_document(rng, 1500, 24, 0).text.split()[1:]))
    source, target = map(str, map(model_folder, ("tiny-s", "tiny-m")))
    items = {"num_items": 3, "context_tokens": 150}
    over = {"selection": items, "report": items, "calibration": {"max_tokens": 90}}
    own = OwnModels(source, target, text, "text", data)
    with pytest.raises(CalibratedError) as found:
        run_recipe("ridge-k", tmp_path, over=over, own=own)
    lengths = [len(ids) for ids in found.value.args[0]]
    assert lengths[:3] == [90] * 3
    assert max(lengths) == 90


def stopped_by_chance(documents: int, questions: int) -> float:
    """How often the control of the wrong document stops a run in which that document and none at
    all both leave the target guessing among four: share of 1,000 runs.
    """
    rng, counts, runs = np.random.default_rng(0), draw(documents, 2000, 0), 1000
    stopped = 0
    for _ in range(runs):
        guessed = rng.binomial(questions, 0.25, (2, documents)) / (documents * questions)
        known = np.full(len(counts), 1.0), *(counts @ each for each in guessed)
        arms: Any = {
            name: SimpleNamespace(accuracy=accuracy)
            for name, accuracy in zip(
                ("mapped", "wrong_document", "no_context"), known, strict=True
            )
        }
        try:
            check_wrong_document(arms, "mapped", "accuracy")
        except UnprovenError:
            stopped += 1
    return stopped / runs


def test_every_recipe_judges_on_enough_documents_for_its_control() -> None:
    sizes = {(c.report.num_items, c.report.questions) for c in map(config_of, OWN)}
    found = {each: stopped_by_chance(*each) for each in sorted(sizes | {(4, 6), (8, 6)})}
    for (documents, _), share in found.items():
        print(f"{documents} documents: stopped by chance in {share:.1%} of the runs")
    assert max(found[each] for each in sizes) < 0.015
    assert found[4, 6] > 0.015  # too few


def test_a_control_that_fails_stops_before_any_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(loaded: LoadedModel, token_ids: object, *rest: object, **options: Any) -> Any:
        read = prefill(loaded, token_ids, *rest, **options)  # type: ignore[arg-type]
        return replace(read, logits=read.logits.flip(0)) if rest else read

    monkeypatch.setattr(per_head_controls, "prefill", broken)
    with pytest.raises(UnprovenError, match="cached decode failed"):
        run_recipe("per-head-controls", tmp_path / "out", over={**SMALL, "k": [1]})
    assert not list((tmp_path / "out").iterdir())


def test_pooled_multiturn_tells_each_pair_and_each_turn(ran: Callable[[str], Found]) -> None:
    found = ran("pooled-multiturn")
    directory, turns, drift = found[0]["tables"].values()
    assert [row["pair"] for row in directory] == ["tiny-s-to-tiny-m", "tiny-m-to-tiny-s"]
    # The folder is a registry of maps that carry their evidence; back, to the worse model, there is
    # no gap, and so nothing that a hand-over is proven to gain.
    entries = {entry.path.split("/")[0]: entry for entry in Registry(found[1]).entries()}
    assert all(entry.evidence for entry in entries.values())
    assert {name: entry.proven for name, entry in entries.items()} == {
        "tiny-s-to-tiny-m": True,
        "tiny-m-to-tiny-s": False,
    }
    # Any loss beyond the target's own fails here, so an MLP was tried for both.
    assert all(row["with MLP"]["value"] > 0 for row in directory)
    assert [row["answers"] for row in turns] == ["source", "target"] * 2
    # Before the first switch nothing is mapped: the source's own loss.
    assert turns[0]["loss"] == turns[0]["native"] == turns[0]["source alone"]
    assert (turns[0]["mapped tokens"], turns[1]["native"]) == (0, turns[1]["target alone"])
    assert turns[1]["loss"] != turns[1]["native"]
    assert [row["answers"] for row in drift] == ["source", "target"]


def test_a_pair_fails_by_its_loss_or_without_one_by_its_accuracy() -> None:
    kvmap: Any = SimpleNamespace(fitted={"selection": {"target": {"nll": 1.0, "accuracy": 0.9}}})
    row = {"NLL": 1.0 + math.log(1.2), "accuracy": 0.1}
    assert failing(kvmap, row, 1.19)
    assert not failing(kvmap, row, 1.21)
    row = {"NLL": None, "accuracy": 0.75}
    assert failing(kvmap, row, 1.19)
    assert not failing(kvmap, row, 1.21)


def test_a_ratio_is_of_sums_and_its_interval_paired() -> None:
    found = ratio_figure([2.0, 6.0, 10.0], [1.0, 3.0, 5.0])
    assert found == {"value": 2.0, "low": 2.0, "high": 2.0}
    assert ratio_figure([1.0, 9.0], [1.0, 4.0])["value"] == 2.0
    assert ratio_figure([1.0], [0.0])["value"] is None


@pytest.mark.parametrize(("metric", "sign"), [("accuracy", 1), ("nll", -1)])
def test_the_gap_downward_runs_from_the_writer_to_the_reader(metric: str, sign: int) -> None:
    contexts = {"source": [0.8, 1.0], "target": [0.4, 0.6], "mapped": [0.6, 0.7]}
    signed = {name: [sign * v for v in values] for name, values in contexts.items()}
    report: Any = SimpleNamespace(config={"metric": metric}, contexts={"metric": signed})
    # (0.65 - 0.5) / (0.9 - 0.5)
    assert lifted(report)["value"] == pytest.approx(0.375)
    same: Any = SimpleNamespace(
        config={"metric": metric}, contexts={"metric": signed | {"source": signed["target"]}}
    )
    assert lifted(same)["value"] is None  # nothing to close


@pytest.fixture(scope="module")
def small_map(tmp_path_factory: pytest.TempPathFactory) -> tuple[KvMap, LoadedModel, list[int]]:
    """tiny-s onto itself, of rank 8, and a document."""
    model = load_model(model_folder("tiny-s"))
    rng = np.random.default_rng(5)
    texts = [model.tokenise(make_document(rng, 120, 8, 0).text) for _ in range(8)]
    out = tmp_path_factory.mktemp("self") / "m.safetensors"
    moments = calibrate(model, model, texts, CalibrationConfig(), out)
    return fit(moments, FitConfig(scope="pooled", k=2, rank=8)), model, texts[0]


def test_a_low_rank_multiplied_out_is_the_same_map(
    small_map: tuple[KvMap, LoadedModel, list[int]],
) -> None:
    kvmap, model, ids = small_map
    out = multiplied_out(kvmap)
    assert all(group.second is None for group in out.groups)
    cache = prefill(model, ids).cache
    mapped = [
        view_pool(KvBridge(each, source=model, target=model).convert(cache, ids))
        for each in (kvmap, out)
    ]
    views = [pool.keys + pool.values for pool in mapped]
    for ours, theirs in zip(*views, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_the_divergence_from_the_reader_is_none_for_the_reader_itself(
    small_map: tuple[KvMap, LoadedModel, list[int]], tmp_path: Path
) -> None:
    kvmap, model, ids = small_map
    item = Item(tuple(ids[:-20]), continuation=tuple(ids[-20:]))
    judged = config_of("lowrank-residual").judged
    moments = calibrate(model, model, [ids], CalibrationConfig(), tmp_path / "m")
    own = KvBridge(fit(moments, FitConfig(scope="copy")), source=model, target=model)
    assert teacher_divergence(own, model, item, judged) == pytest.approx(0, abs=1e-5)
    # A map of rank 8 changes what is said.
    bridge = KvBridge(kvmap, source=model, target=model)
    found = teacher_divergence(bridge, model, item, judged)
    assert found > 1e-4


def test_models_of_your_own_are_fitted_and_judged_on_your_own_text(tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    text, data = tmp_path / "corpus.jsonl", tmp_path / "held-out.txt"
    texts = [make_document(rng, 150, 8, 0).text for _ in range(8)]
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    data.write_text(" ".join(make_document(rng, 1500, 24, 0).text.split()[1:]))
    config = tmp_path / "small.yaml"
    over = {**SMALL, **OWN["pooled-multiturn"]}
    over["selection"] = over["report"] = {"num_items": 3, "context_tokens": 150}
    config.write_text(yaml.safe_dump(over))
    own = {
        "--source": model_folder("tiny-s"),
        "--target": model_folder("tiny-m"),
        "--text": text,
        "--task": "text",
        "--data": data,
        "--config": config,
        "--out": tmp_path / "found",
    }
    arguments = [str(each) for pair in own.items() for each in pair]
    result = CliRunner().invoke(app, ["recipe", "pooled-multiturn", *arguments])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "found" / "recipe.json").read_text())
    assert found["config"]["report"]["skip"] == 3
    assert [summary["metric"] for summary in found["summary"].values()] == ["nll", "nll"]
    conversations, *unjudged = found["left_out"]
    assert conversations == "conversations in turn; they need --task coqa with its file."
    # Three documents: whether a map reads them at all may not show, and then it says so.
    assert all("carries no evidence" in each for each in unjudged)
    assert len(found["tables"]) == 1
