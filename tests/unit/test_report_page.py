"""A report as a page and as Markdown: whole, self-contained, nothing in it but text."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from markdown_it import MarkdownIt
from report_case import (
    HOSTILE,
    figure,
    hostile_report,
    whole_report,
    written_report,
)
from report_reading import Page, parsed, printed, section

from trtllm_kvmap.evaluate.report import charts
from trtllm_kvmap.evaluate.report.charts_of_diagnosis import log_ticks
from trtllm_kvmap.evaluate.report.markdown import markdown
from trtllm_kvmap.evaluate.report.page import html
from trtllm_kvmap.evaluate.report.report import Report
from trtllm_kvmap.evaluate.report.sections import sections


@pytest.fixture
def report() -> Report:
    return whole_report()


@pytest.fixture(scope="module")
def written() -> str:
    """The page of the fixture ``report``."""
    return html(whole_report())


def test_the_page_loads_nothing(written: str) -> None:
    page = parsed(written)
    for reference in ("http://", "https://", "@import", "<!DOCTYPE svg", "<?xml"):
        assert reference not in written
    assert not page.tags & {"script", "link", "img", "iframe", "object"}
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href"):
            assert (value or "").startswith("#")
        assert "url(" not in (value or "").replace("url(#", "")


def test_the_page_is_whole(report: Report, written: str) -> None:
    page = parsed(written)
    assert page.open == []
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for name in report.arms:
        assert name in page.text
    for part in ("0.75 [0.70 0.80]", "[not here]", "small <b>", "not judged: <one item>"):
        assert part in page.text
    for part in ("123,456", "12 slices", "4 layers", "head needs equal <KV heads>", "aa" * 32):
        assert part in page.text
    labels = {value or "" for name, value in page.attributes if name == "aria-label"}
    starts = (
        "Accuracy of every arm",
        "Accuracy of single",
        "Cosine between mapped_repaired_32",
        "R2 of keys:",
        "R2 of val",
    )
    diagnosed = (
        "Divergence removed by keys or values",
        "Divergence of the map and of maps spoilt",
        "Divergence removed by one layer",
        "Divergence removed by a run of layers",
        "Divergence removed by one head",
        "Error of mapped keys and values",
        "Loss by length",
    )
    for start in (*starts, *diagnosed, "Steps of a hand-over", "Break-even"):
        assert any(label.startswith(start) for label in labels), start


def test_equal_reports_give_equal_pages(report: Report, written: str) -> None:
    again = Report.from_json(json.loads(json.dumps(report.to_json())))
    assert html(again) == written


def test_a_report_of_losses_alone_has_a_page_and_a_table(report: Report) -> None:
    for entry in report.arms.values():
        for name in ("accuracy", "retention", "retention_normalised"):
            if name in entry:
                entry[name] = figure(None)
    report.config["metric"] = "nll"
    report.kvmap["fitted"].pop("candidates")
    report.contexts["metric"] = {name: [2.0] * 3 for name in report.contexts["metric"]}
    page = parsed(html(report))
    assert any((value or "").startswith("Loss (nats per token") for _, value in page.attributes)
    assert "accuracy" not in printed(report).split("gate")[0]
    assert not [c for c in section(report, "All arms").charts if "guessing" in c.caption]


def test_every_context_that_all_three_judged_is_a_line(report: Report) -> None:
    assert charts.slopes(report, "").count("stroke-opacity: 0.5") == 2  # the third has a None


def test_page_and_markdown_hold_every_cell_of_every_section(report: Report, written: str) -> None:
    page, document = parsed(written), MarkdownIt("gfm-like", {"linkify": False})
    rendered = Page()
    rendered.feed(document.render(markdown(report)))
    for each in sections(report):
        for grid in each.grids:
            for text in (each.title, *grid.header, *(cell for row in grid.rows for cell in row)):
                assert text in page.text
                assert text in rendered.text


def test_hostile_names_and_documents_stay_text() -> None:
    report, rendered = hostile_report(), Page()
    page, source = parsed(html(report)), markdown(report)
    rendered.feed(MarkdownIt("gfm-like", {"linkify": False}).render(source))
    for read in (page, rendered):
        assert read.open == []
        assert not read.tags & {"script", "img", "a", "iframe"}
        assert not [name for name, _ in read.attributes if name.startswith("on")]
        assert " ".join(HOSTILE.split()) in " ".join(read.text.split())


def test_commands_are_set_as_code_and_nothing_else_is(report: Report) -> None:
    bare = replace(written_report(), latency=None)
    bare.config["arm"] = "`a` `trtllm-kvmap"
    for name in (bare.arms, bare.contexts["metric"]):
        name["`a` `trtllm-kvmap"] = name.get("mapped", [None] * 3)
    page = html(bare)
    assert "<code>trtllm-kvmap evaluate --latency</code>" in page
    assert "`trtllm-kvmap evaluate" not in page
    assert "<code>a" not in page
    rendered = MarkdownIt("gfm-like", {"linkify": False}).render(markdown(bare))
    assert "<code>trtllm-kvmap evaluate --latency</code>" in rendered
    assert "<code>a" not in rendered
    assert "`a` `trtllm-kvmap" in parsed(rendered).text


def test_colours_of_heat_reach_below_zero() -> None:
    def bar(rows: list[list[float | None]]) -> list[str]:
        drawn = charts.heat("x", rows, "KV head", "removed", "")
        return re.findall(r"<text[^>]*>([-\u2212]?[\d.]+)</text>", drawn)

    assert not [text for text in bar([[0.5, 1.0]] * 40) if not text[0].isdigit()]
    assert "\u22120.4" in bar([[0.5, -0.44]] * 40)
    assert charts.BELOW not in charts.heat("x", [[0.5, -0.44]] * 40, "", "", "")
    assert charts.BELOW in charts.heat("x", [[0.5, -7.0]] * 40, "", "", "")  # and says it goes on


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.08, 8.0, [0.1, 0.2, 0.5, 1, 2, 5]),
        (0.9, 1.5, [1]),
        (0.02, 40, [0.1, 1, 10]),
        (1e-9, 1e9, [1e-9, 1e-5, 1e-1, 1e3, 1e7]),
    ],
)
def test_a_logarithmic_axis_has_labels(low: float, high: float, ticks: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(ticks)
