"""Evidence as the command attaches it: what it makes of a map that reads, of one that does not, and
of one whose source is the better model.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.cli.verbs import app
from trtllm_kvmap.errors import UnprovenError
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.models import load_model
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import mostly_facts

ASKED = ("--num-items", 6, "--context-tokens", 160, "--first-tokens", 4, "--repair-window", 8)


def fitted(source: str, target: str, folder: Path) -> KvMap:
    pair = [load_model(model_folder(name)) for name in (source, target)]
    documents = [pair[1].tokenise(text) for text in mostly_facts(seed=1, count=40)]
    return fit(calibrate(*pair, documents, CalibrationConfig(), folder / "m"), FitConfig(n=8))


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


def attach(path: Path, source: str, target: str, *options: object, status: int = 0) -> str:
    models = ("--source", model_folder(source), "--target", model_folder(target))
    return run("evaluate", path, *models, *ASKED, *options, "--attach", status=status)


def test_a_map_that_reads_is_proven_and_one_that_does_not_stays_as_it_was(tmp_path: Path) -> None:
    kvmap, path, out = fitted("tiny-s", "tiny-m", tmp_path), tmp_path / "map", tmp_path / "r.json"
    deaf = [
        g if g.weight is None else replace(g, weight=torch.zeros_like(g.weight))
        for g in kvmap.groups
    ]
    replace(kvmap, groups=tuple(deaf)).save(path)
    before = path.read_bytes()
    said = attach(path, "tiny-s", "tiny-m", "--json", out, status=2)
    assert "proves nothing" in said
    assert "reaches zero" in said
    assert path.read_bytes() == before
    assert json.loads(out.read_text())["controls"]["wrong_document"].startswith("not judged")
    kvmap.save(path)
    assert "unproven" not in attach(path, "tiny-s", "tiny-m")
    assert KvMap.load(path).evidence["controls"]["wrong_document"] == "passed"
    run("registry", "add", tmp_path / "maps", path)
    assert run("registry", "verify", tmp_path / "maps").endswith(": sound")


def test_where_the_source_is_the_better_model_the_evidence_is_kept_and_proves_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "map"
    fitted("tiny-m", "tiny-s", tmp_path).save(path)
    said = attach(path, "tiny-m", "tiny-s")
    assert "The map stays unproven: its source alone is no worse than its target" in said
    with pytest.raises(UnprovenError, match="no gap to recover; let the source answer"):
        KvMap.load(path)
    kept = KvMap.load(path, allow_unproven=True).evidence
    assert kept["gap_recovered"] == {"value": None, "low": None, "high": None}
    run("registry", "add", tmp_path / "maps", path)
    said = run("registry", "verify", tmp_path / "maps", status=1)
    assert said.count("no gap to recover") == 1
    assert "--attach" not in said
