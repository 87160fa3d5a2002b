"""A written-down report as a file, as a page and as a table."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trtllm_kvmap.errors import FormatError
from trtllm_kvmap.evaluate.page import html
from trtllm_kvmap.evaluate.report import Report, table

VOID = {"meta", "link", "br", "hr", "img", "input", "path", "rect", "line", "use"}


def figure(value: float | None, reach: float = 0.05) -> dict[str, float | None]:
    if value is None:
        return {"value": None, "low": None, "high": None}
    return {"value": value, "low": value - reach, "high": value + reach}


def arm(accuracy: float | None, nll: float | None, gap: float | None) -> dict[str, Any]:
    return {
        "accuracy": figure(accuracy),
        "nll": figure(nll),
        "perplexity": figure(7.5),
        "perplexity_ratio": figure(1.1),
        "top1_agreement": figure(0.8),
        "rollout_agreement": figure(None),
        "retention": figure(None if accuracy is None else accuracy / 0.9),
        "retention_normalised": figure(None if accuracy is None else (accuracy - 0.25) / 0.65),
        "gap_recovered": figure(gap),
        "attention_cosine": 0.91,
        "mapped_share": 0.875,
    }


@pytest.fixture
def report() -> Report:
    arms = {
        "target": arm(0.9, 1.8, 1.0),
        "source": arm(0.5, 2.3, 0.0),
        "mapped": arm(0.72, 2.0, 0.55),
        "mapped_repaired_32": arm(0.8, 1.9, 0.75),
        "copy": {"refused": "copy needs equal (KV heads, head_dim) [not here]"},
        "repair_only": arm(0.3, 2.9, -1.25),
        "wrong_document": arm(0.25, 3.0, None),
        "no_context": arm(0.24, 3.1, None),
    }
    fit = {"scope": "slice", "k": 4, "n": 12, "ridge": 1e-3, "fields": "same"}
    chosen = {"config": fit, "parameters": 123456, "r2_key": 0.76, "r2_value": 0.59, "nll": 1.93}
    candidates = [
        {**chosen, "accuracy": 0.8, "gap_recovered": 0.7, "chosen": True, "refused": None},
        {
            **dict.fromkeys((*chosen, "accuracy", "gap_recovered")),
            "config": {**fit, "scope": "head"},
            "chosen": False,
            "refused": "head needs equal <KV heads>",
        },
    ]
    nrmse = {"nrmse": [0.25, 0.5], "cosine": [0.97, None]}
    return Report(
        arms=arms,
        gap_recovered=figure(0.75),
        retention=figure(0.8 / 0.9),
        retention_normalised=figure(0.55 / 0.65),
        top1_agreement=figure(0.8),
        perplexity_ratio=figure(1.1),
        attention_cosine={"mean": 0.91, "worst": 0.87, "per_layer": [0.95, 0.87]},
        kv_error={"key": nrmse, "value": nrmse},
        controls={"reinjection": "passed", "wrong_document": "not judged: <one item>"},
        config={
            "source": "small <b>",
            "target": "large",
            "arm": "mapped_repaired_32",
            "metric": "accuracy",
            "N": 32,
            "S": 1,
            "num_items": 60,
            "context_tokens": {"shortest": 256, "longest": 1024},
        },
        fingerprints={"source": {"weights": "aa" * 32}, "target": {"weights": "bb" * 32}},
        kvmap={"scope": "slice", "parameters": 123456, "fitted": {"candidates": candidates}},
    )


class Page(HTMLParser):
    """Keeps the text and every attribute, and counts open elements."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read_page(report: Report) -> Page:
    page = Page()
    page.feed(html(report))
    page.close()
    return page


def test_the_page_loads_nothing(report: Report) -> None:
    written, page = html(report), read_page(report)
    for reference in ("http://", "https://", "@import", "<!DOCTYPE svg", "<?xml"):
        assert reference not in written
    assert not page.tags & {"script", "link", "img", "iframe", "object"}
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href"):
            assert (value or "").startswith("#")
        assert "url(" not in (value or "").replace("url(#", "")


def test_the_page_is_whole(report: Report) -> None:
    page = read_page(report)
    assert page.open == []
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for name in report.arms:
        assert name in page.text
    for part in ("0.75 [0.70 0.80]", "[not here]", "small <b>", "not judged: <one item>"):
        assert part in page.text
    for part in ("123,456", "12 slices", "4 layers", "head needs equal <KV heads>", "aa" * 32):
        assert part in page.text
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert labels == ["accuracy of every arm", "attention-output cosine by layer"]


def test_equal_reports_give_equal_pages(report: Report) -> None:
    again = Report.from_json(json.loads(json.dumps(report.to_json())))
    assert html(again) == html(report)


def test_a_report_of_losses_alone_has_a_page_and_a_table(report: Report) -> None:
    for entry in report.arms.values():
        for name in ("accuracy", "retention", "retention_normalised"):
            if name in entry:
                entry[name] = figure(None)
    report.config["metric"] = "nll"
    report.kvmap["fitted"].pop("candidates")
    page = read_page(report)
    assert "nll of every arm" in [value for _, value in page.attributes]
    assert "accuracy" not in printed(report)


def printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(table(report))
    return console.file.getvalue()


def test_the_table_shows_every_arm_on_one_line_of_80_columns(report: Report) -> None:
    lines = printed(report).splitlines()
    row = {line.split()[0]: line for line in lines if line.split()}
    assert set(row) >= set(report.arms)
    assert "0.80 [0.75 0.85] 0.75 [0.70 0.80] 0.846 1.900 0.800" in " ".join(
        row["mapped_repaired_32"].split()
    )
    assert row["wrong_document"].split()[1:] == [
        "0.25",
        "[0.20",
        "0.30]",
        "-",
        "0.000",
        "3.000",
        "0.800",
    ]
    assert "-1.25 [-1.30 -1.20]" in row["repair_only"]
    assert "small <b> to large" in lines[0]
    assert "copy: copy needs equal (KV heads, head_dim) [not here]" in printed(report)
    assert "unresolved" not in printed(report)
    report.arms["mapped"]["gap_recovered"]["low"] = None
    assert "0.55 [unresolved]" in printed(report)


def test_a_report_is_written_and_read(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report.save(path)
    assert json.loads(path.read_text()) == report.to_json()
    assert Report.load(path) == report
    path.write_text(path.read_text()[:-100])
    with pytest.raises(FormatError, match="cannot be read"):
        Report.load(path)
    with pytest.raises(FormatError, match="cannot be read"):
        Report.load(tmp_path / "absent.json")
    path.write_text(json.dumps({**report.to_json(), "more": 1}))
    with pytest.raises(FormatError, match="exactly the entries"):
        Report.load(path)
