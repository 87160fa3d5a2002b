"""Every recipe at a small size, from the command to its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from recipe_case import OWN, SMALL
from typer.testing import CliRunner

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.registry import Registry
from trtllm_kvmap.cli.verbs import app
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import UnprovenError
from trtllm_kvmap.evaluate.report.report import Report
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.recipes import per_head_controls
from trtllm_kvmap.recipes.run import run_recipe
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document

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
