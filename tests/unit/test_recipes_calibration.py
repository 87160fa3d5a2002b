"""What recipes calibrate with: their config, the command's weighting, text of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from recipe_case import OWN, SMALL
from typer.testing import CliRunner

from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.cli.verbs import app
from trtllm_kvmap.recipes import steps
from trtllm_kvmap.recipes.pair import OwnModels
from trtllm_kvmap.recipes.run import run_recipe
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document


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
