"""The model rounded to four bits reads, the model itself answers: copy, head and slice maps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from smollm2 import round_to_4_bits
from stdlib_text import DOCSTRINGS, REFERENCE, write_texts

from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.calibrate.text import read_documents
from trtllm_kvmap.evaluate.report.report import Report, table
from trtllm_kvmap.evaluate.run import EvaluationConfig, evaluate
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.models import LoadedModel

pytestmark = pytest.mark.real
CONTEXT = 256
EVERY = 11  # of the windows of the language reference, one in so many is calibrated on
JUDGED = EvaluationConfig(metric="nll", first_tokens=4, repair_window=32)
# head and slice give a target head the same number of weights.
SCOPES = {
    "copy": FitConfig(scope="copy"),
    "head": FitConfig(scope="head", k=4),
    "slice": FitConfig(scope="slice", n=4),
}


@pytest.fixture(scope="module")
def moments(rounded: LoadedModel, smollm2: LoadedModel, tmp_path_factory: Callable) -> MomentSet:
    folder: Path = tmp_path_factory.mktemp("calibration")
    write_texts(folder / "text", REFERENCE)
    config = CalibrationConfig(max_tokens=CONTEXT)
    documents = read_documents(
        folder / "text", rounded, min_tokens=config.min_tokens, max_tokens=CONTEXT
    )
    return calibrate(rounded, smollm2, documents[::EVERY], config, folder / "moments.safetensors")


@pytest.fixture(scope="module")
def items(smollm2: LoadedModel, tmp_path_factory: Callable) -> list[Item]:
    """The beginning of each docstring, so that every other one is a stranger."""
    files = write_texts(tmp_path_factory.mktemp("report") / "text", DOCSTRINGS)
    tasks = [
        TaskConfig("text", str(file), num_items=1, context_tokens=CONTEXT, scored_tokens=40)
        for file in files
    ]
    return [item for task in tasks for item in read_items(task, smollm2.tokenizer)]


@pytest.fixture(scope="module")
def judge(
    moments: MomentSet,
    rounded: LoadedModel,
    smollm2: LoadedModel,
    items: list[Item],
    summarise: Callable[[str], None],
) -> Callable[[str], Report]:
    """The report of the map of a scope; its table of arms goes to the summary."""

    def report_of(scope: str) -> Report:
        kvmap = fit(moments, SCOPES[scope])
        report = evaluate(kvmap, rounded, smollm2, items, JUDGED)
        r2 = {field: found["mean"] for field, found in kvmap.fitted["r2"].items()}
        summarise(
            f"\n{scope}: {kvmap.num_parameters:,} parameters, "
            f"{moments.record['tokens']:,} calibration tokens, "
            f"R2 of keys {r2['key']:.4f}, of values {r2['value']:.4f}, "
            f"cosine of attention outputs {report.attention_cosine['mean']:.4f}"
        )
        console = Console(width=100)
        with console.capture() as captured:
            console.print(table(report))
        summarise(captured.get())
        return report

    return report_of


@pytest.mark.parametrize("scope", SCOPES)
def test_every_arm_and_control(scope: str, judge: Callable[[str], Report]) -> None:
    """What holds of any map of this pair. How good each is, the tables say."""
    report = judge(scope)
    arms = report.arms
    assert set(report.controls.values()) == {"passed"}, report.controls
    assert not [name for name, arm in arms.items() if "refused" in arm]
    assert arms["reinjection"] == arms["target"]
    nll = {name: arm["nll"]["value"] for name, arm in arms.items()}
    assert nll["mapped"] < nll["wrong_document"]
    # The rounded model's cache, as it is, is nearly the model's own: better than the rounded model
    # alone, and for less than a fifth of what reading nothing costs.
    assert nll["copy"] < nll["source"]
    assert nll["copy"] - nll["target"] < 0.2 * (nll["no_context"] - nll["target"])


def test_rounding_by_hand() -> None:
    """A group whose largest magnitude is 14 has steps of 2; zeros stay zeros; groups are apart."""
    row = torch.zeros(96)
    row[:6] = torch.tensor([-14.0, 12.9, 2.9, 3.1, -0.9, -1.1])
    row[32:34] = torch.tensor([0.07, 0.044])
    wanted = torch.zeros(96)
    wanted[:6] = torch.tensor([-14.0, 12.0, 2.0, 4.0, 0.0, -2.0])
    wanted[32:34] = torch.tensor([0.07, 0.04])
    torch.testing.assert_close(round_to_4_bits(row[None])[0], wanted)
