"""The README's Python runs. Its commands: test_shown_commands.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from evidence_case import vouched

from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.models import load_model
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import mostly_facts

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def where_the_demo_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the map that the README loads, as the demo leaves it."""
    source, target = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))
    documents = [target.tokenise(text) for text in mostly_facts(seed=1, count=40)]
    moments = calibrate(source, target, documents, CalibrationConfig(), tmp_path / "m")
    kvmap = vouched(fit(moments, FitConfig(n=4)))
    kvmap.save(tmp_path / "kvmap-demo/tiny-s-to-tiny-m/tiny-s-to-tiny-m.kvmap.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_blocks_run(where_the_demo_wrote: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("python")
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.split() == ["ben"]
