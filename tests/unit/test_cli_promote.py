"""The command that lets a new map take over, on the tiny family: with evidence, or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from handmade_maps import random_map
from typer.testing import CliRunner

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.cli.promote import told
from trtllm_kvmap.cli.verbs import app
from trtllm_kvmap.evaluate.promote import Trial, refit
from trtllm_kvmap.models import load_model
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the map that serves, which no fit made, moments in two files, and prompts."""
    folder = tmp_path_factory.mktemp("promote")
    pair = [load_model(model_folder(name)) for name in ("tiny-s", "tiny-m")]
    rng = np.random.default_rng(5)
    texts = [make_document(rng, 120, 12, 0).text for _ in range(60)]
    for name, some in (("a", texts[:20]), ("b", texts[20:40])):
        documents = [pair[0].tokenise(text) for text in some]
        calibrate(*pair, documents, CalibrationConfig(joint=True), folder / f"{name}.moments")
    lines = [json.dumps({"text": text}) + "\n" for text in texts[40:]]
    (folder / "prompts.jsonl").write_text("".join(lines))
    fitted = {"config": {"scope": "pooled", "k": 2, "ridge": 1e-3}}
    replace(random_map(*pair), fitted=fitted, guard={"of": "the old one"}).save(folder / "old")
    return folder


def promote(work: Path, served: Path, out: Path, *options: object, status: int = 0) -> str:
    models = ("--source", model_folder("tiny-s"), "--target", model_folder("tiny-m"))
    given = (*models, "--text", work / "prompts.jsonl", "--out", out, "--repair-window", 4)
    result = CliRunner().invoke(app, [str(a) for a in ("promote", served, *given, *options)])
    assert result.exit_code == status, result.output
    return result.output


def test_a_better_map_is_written_with_its_evidence_and_a_worse_one_is_not(
    work: Path, tmp_path: Path
) -> None:
    out, report = tmp_path / "new", tmp_path / "trial.json"
    both = ("--moments", work / "a.moments", "--moments", work / "b.moments")
    said = promote(work, work / "old", out, *both, "--json", report)
    assert "Promoted: on 10 prompts the new map gains" in said
    assert "source " in said
    assert f"Wrote {out}" in said
    assert "carries a guard and this map none" in said
    new, trial = KvMap.load(out), json.loads(report.read_text())
    assert trial["promoted"] is True
    assert trial["gain"]["low"] > 0
    assert new.evidence["trial"] == trial
    assert new.evidence["config"]["N"] == 4
    counted = MomentSet.load(work / "a.moments") + MomentSet.load(work / "b.moments")
    wanted = refit(KvMap.load(work / "old", allow_unproven=True), counted)
    for mine, theirs in zip(new.groups, wanted.groups, strict=True):
        assert mine.weight.equal(theirs.weight)

    before = {path: path.read_bytes() for path in (work / "old", out)}
    said = promote(work, out, tmp_path / "none", "--new", work / "old", status=1)
    assert "Not promoted: on 10 prompts the new map gains -" in said
    assert "Wrote" not in said
    assert not (tmp_path / "none").exists()
    assert {path: path.read_bytes() for path in before} == before


def test_a_long_prompt_counts_once(work: Path, tmp_path: Path) -> None:
    """Its windows would stand in both halves, and vouch for each other."""
    short = ("--new", work / "old", "--max-tokens", 60)
    said = promote(work, work / "old", tmp_path / "none", *short, status=1)
    assert "Not promoted: on 10 prompts the new map gains 0.000" in said


@pytest.mark.parametrize("options", [(), ("--new", "x", "--moments", "y")])
def test_one_new_map_is_asked_for(work: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    said = promote(work, work / "old", tmp_path / "new", *options, status=2)
    assert "promote needs one new map: either --new, a map, or --moments" in said
    assert not list(tmp_path.iterdir())


def test_a_figure_that_is_not_there_is_said() -> None:
    known, open_, none = (
        {"value": 0.5, "low": 0.25, "high": 0.75},
        {"value": -0.5, "low": None, "high": None},
        {"value": None, "low": None, "high": None},
    )
    nll, gap = {"old": known, "source": known}, {"old": open_, "new": none}
    assert told(Trial(False, 4, open_, nll, gap)) == (
        "Not promoted: on 4 prompts the new map gains -0.500 nats a token (old 0.500 [0.250, "
        "0.750], source 0.500 [0.250, 0.750]; gap recovered: old -0.500, new -)"
    )
