"""`trtllm-kvmap plan`: from a map and speeds, measured or given, to a choice with its figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evidence_case import vouched
from test_routing import SPEEDS, evidence
from typer.testing import CliRunner

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.cli.verbs import app
from trtllm_kvmap.decode.routing.speeds import Speeds
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.models import load_model
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document


@pytest.fixture(scope="module")
def kvmap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    source, target = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))
    rng = np.random.default_rng(0)
    texts = [source.tokenise(make_document(rng, 120, 8, 0).text) for _ in range(4)]
    moments = calibrate(source, target, texts, CalibrationConfig(), folder / "m.safetensors")
    fitted = fit(moments, FitConfig(n=2))
    vouched(fitted, evidence()).save(folder / "map.safetensors")
    fitted.save(folder / "unproven.safetensors")
    fitted.with_evidence(evidence()).save(folder / "another's.safetensors")
    return folder / "map.safetensors"


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


def test_plan_tells_what_was_chosen_and_why(kvmap: Path, tmp_path: Path) -> None:
    speeds = replace(SPEEDS, transfer_bytes_per_second=1e7)
    speeds.save(tmp_path / "s.json")
    out = tmp_path / "plan.json"
    given = ("--tokens", 1000, "--reply-tokens", 51, "--speeds", tmp_path / "s.json")
    said = run(kvmap, *given, "--json", out)
    found = json.loads(out.read_text())
    assert found["choice"] == "map"
    assert "map: The target's first token takes" in said
    # 3 layers x 2 KV heads x 32 x (K, V) x 4 bytes; 968 mapped tokens at 1e7 bytes a second.
    sent = 968 * 1536 / 1e7
    first = sent + 0.0968 + 0.1
    assert found["first_token"]["map"] == pytest.approx(first)
    assert found["compute"]["map"]["active"] == pytest.approx(0.25 + first + sent + 0.0968 + 2)
    assert found["compute"]["map"]["reserved"] == pytest.approx(2 * (0.25 + first + 2))
    assert found["compute"]["stay"]["reserved"] == pytest.approx(0.25 + 0.51)
    assert Speeds.from_json(found["speeds"]) == speeds
    # What is mirrored is done earlier, not for nothing.
    run(kvmap, *given, "--mirrored", "--json", out)
    mirrored = json.loads(out.read_text())
    assert mirrored["first_token"]["map"] == pytest.approx(0.1)
    assert mirrored["compute"]["map"] == pytest.approx(found["compute"]["map"])


def test_plan_measures_both_models_and_keeps_the_speeds(kvmap: Path, tmp_path: Path) -> None:
    models = "--source", model_folder("tiny-s"), "--target", model_folder("tiny-m")
    kept = tmp_path / "s.json"
    run(kvmap, "--tokens", 260, "--measure", *models, "--speeds", kept)
    speeds = Speeds.load(kept)
    assert [n for n, _ in speeds.target_prefill.points] == [65, 130, 260]
    assert [n for n, _ in speeds.map.points] == [33, 98, 228]
    assert speeds.repair_window == 32  # the report's


@pytest.mark.parametrize("said", [None, {}, {"config": None}, {"config": {"S": None, "N": "32"}}])
def test_plan_measures_with_the_defaults_where_a_report_says_none(
    kvmap: Path, tmp_path: Path, said: object
) -> None:
    models = "--source", model_folder("tiny-s"), "--target", model_folder("tiny-m")
    odd = replace(KvMap.load(kvmap), evidence=said)
    odd.save(tmp_path / "odd")
    run(tmp_path / "odd", "--tokens", 66, "--measure", *models, "--speeds", tmp_path / "s.json")
    assert Speeds.load(tmp_path / "s.json").repair_window == 32


def test_plan_needs_speeds_and_evidence(kvmap: Path, tmp_path: Path) -> None:
    assert "--speeds" in run(kvmap, "--tokens", 100, status=2)
    assert "--source and --target" in run(kvmap, "--tokens", 100, "--measure", status=2)
    SPEEDS.save(tmp_path / "s.json")
    for name, flaw in (("unproven", "no evidence"), ("another's", "evidence is of another map")):
        path = kvmap.with_name(f"{name}.safetensors")
        said = run(path, "--tokens", 1000, "--speeds", tmp_path / "s.json")
        assert "reprefill: " in said
        assert flaw in " ".join(said.split())
    never = (kvmap, "--tokens", 100, "--speeds", tmp_path / "s.json", "--max-seconds", 0)
    assert "--max-seconds must be above 0, got 0.0." in run(*never, status=2)
