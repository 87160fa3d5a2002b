"""A report.json that was edited at one place is refused before anything of it is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_case import figure, whole_report
from typer.testing import CliRunner

from trtllm_kvmap.cli.verbs import app
from trtllm_kvmap.errors import FormatError
from trtllm_kvmap.evaluate.report.report import Report

ARM = "mapped_repaired_32"


def edited(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    entry = json.loads(json.dumps(whole_report().to_json()))
    change(entry)
    return entry


def test_a_report_as_it_was_written_agrees() -> None:
    entry = edited(lambda report: None)
    assert Report.from_json(entry).to_json() == entry


@pytest.mark.parametrize(
    "name",
    ["gap_recovered", "retention", "retention_normalised", "top1_agreement", "perplexity_ratio"],
)
def test_a_figure_at_the_top_is_that_of_the_arm(name: str) -> None:
    def raise_it(report: dict[str, Any]) -> None:
        report[name]["value"] = 5.0

    with pytest.raises(FormatError, match=rf"contradicts itself: its {name} at the top .* {ARM}"):
        Report.from_json(edited(raise_it))
    other = edited(lambda report: report["arms"]["mapped"].update({name: figure(5.0)}))
    assert Report.from_json(other), "another arm has figures of its own"
    with pytest.raises(FormatError, match="contradicts itself"):
        Report.from_json(edited(lambda report: report["arms"][ARM].update({name: figure(5.0)})))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r["attention_cosine"].update(mean=1.0), "its attention_cosine"),
        (lambda r: r["gates"][1].update(verdict="fail"), "its gates"),
        (lambda r: r["gates"][1].update(limit=1.0), "its gates"),
        (lambda r: r["gates"].pop(), "its gates"),
        (lambda r: r["config"].update(arm="mapped"), "its gap_recovered, retention"),
        (lambda r: r["config"].update(arm="copy"), "not a whole report"),
        (lambda r: r["config"].pop("arm"), "not a whole report"),
        (lambda r: r["config"].update(arm=[]), "not a whole report"),
        (lambda r: r["gates"][0].update(limit=10**400), "not a whole report"),
        (lambda r: r["gates"][0].update(limit=-1), "not a whole report"),
        (lambda r: r.update(gates=None), "not a whole report"),
        (lambda r: r.update(arms=[]), "not a whole report"),
        (lambda r: r.update(attention_cosine=None), "not a whole report"),
    ],
)
def test_other_edits_are_told(change: Callable[[dict[str, Any]], Any], said: str) -> None:
    with pytest.raises(FormatError, match=f"^here .*{said}"):
        Report.from_json(edited(change), "here")


def test_the_command_shows_nothing_of_it(tmp_path: Path) -> None:
    entry = edited(lambda report: report["gap_recovered"].update(value=5.0))
    (tmp_path / "r.json").write_text(json.dumps(entry))
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "r.json"), "--html", str(page)])
    assert result.exit_code == 2
    assert "contradicts itself" in " ".join(result.output.split())
    assert "5.00" not in result.output
    assert not page.exists()
