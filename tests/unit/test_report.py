"""A written-down report as a file, as a page and as a table."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from report_case import HOSTILE, SECONDS, figure, hostile_report, written_report
from rich.console import Console

from trtllm_kvmap.errors import FormatError, InputError
from trtllm_kvmap.evaluate import charts
from trtllm_kvmap.evaluate.gates import Gates, judge_gates
from trtllm_kvmap.evaluate.latency import break_even, ratios
from trtllm_kvmap.evaluate.markdown import markdown
from trtllm_kvmap.evaluate.page import html
from trtllm_kvmap.evaluate.report import Report, table
from trtllm_kvmap.evaluate.sections import sections

VOID = {"meta", "link", "br", "hr", "img", "input", "path", "rect", "line", "use"}


@pytest.fixture
def report() -> Report:
    return written_report()


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
    labels = {value or "" for name, value in page.attributes if name == "aria-label"}
    starts = (
        "accuracy of every arm",
        "accuracy of single",
        "Cosine by",
        "R2 of keys:",
        "R2 of val",
    )
    for start in (*starts, "Steps of a hand-over", "Break-even"):
        assert any(label.startswith(start) for label in labels), start


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
    report.contexts["metric"] = {name: [2.0] for name in report.contexts["metric"]}
    page = read_page(report)
    assert any((value or "").startswith("nll of every arm") for _, value in page.attributes)
    assert "accuracy" not in printed(report).split("gate")[0]


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


def test_gates_judge_the_figure_and_its_whole_interval() -> None:
    def judged(value: float | None, low: float | None, high: float | None) -> list[tuple]:
        entry = {"value": value, "low": low, "high": high}
        names = ("retention", "perplexity_ratio", "top1_agreement")
        gates = judge_gates(Gates(), dict.fromkeys(names, entry), dict.fromkeys(names, entry))
        return [(gate["verdict"], gate["clear"]) for gate in gates]

    # At least 0.8, at most 1.25, at least 0.8.
    assert judged(0.9, 0.85, 0.95) == [("pass", True), ("pass", True), ("pass", True)]
    assert judged(0.9, 0.75, 0.95) == [("pass", False), ("pass", True), ("pass", False)]
    assert judged(1.3, 1.2, 1.4) == [("pass", True), ("fail", False), ("pass", True)]
    assert judged(0.7, 0.6, 0.75) == [("fail", True), ("pass", True), ("fail", True)]
    assert judged(0.8, None, None) == [("pass", False), ("pass", False), ("pass", False)]
    assert judged(None, None, None) == [("not measured", False)] * 3
    with pytest.raises(InputError, match="max_perplexity_ratio"):
        Gates(max_perplexity_ratio=float("nan"))


def test_ratios_and_break_even_follow_the_formula() -> None:
    found = ratios(SECONDS)
    # Native: 0.03 + 0.01 and 0.19 + 0.01; six stages of 0.01 and 0.02, the first the source's.
    assert found["cold"] == pytest.approx([0.06 / 0.04, 0.12 / 0.20])
    assert found["warm"] == pytest.approx([0.05 / 0.04, 0.10 / 0.20])
    assert break_even([100, 200, 400], [2.0, 1.5, 0.5]) == pytest.approx(300)
    assert break_even([100, 200, 400], [0.9, 1.5, 0.5]) == pytest.approx(300)  # for good
    assert break_even([100, 200], [0.5, 0.4]) == 100
    assert break_even([100, 200], [0.5, 1.4]) is None
    assert break_even([], []) is None


def test_every_context_that_all_three_judged_is_a_line(report: Report) -> None:
    assert charts.slopes(report, "").count("stroke-opacity: 0.5") == 2  # the third has a None


def test_page_and_markdown_hold_every_cell_of_every_section(report: Report) -> None:
    page, document = read_page(report), MarkdownIt("gfm-like", {"linkify": False})
    rendered = Page()
    rendered.feed(document.render(markdown(report)))
    for section in sections(report):
        for grid in section.grids:
            for text in (section.title, *grid.header, *(cell for row in grid.rows for cell in row)):
                assert text in page.text
                assert text in rendered.text


def test_hostile_names_and_documents_stay_text() -> None:
    report, rendered = hostile_report(), Page()
    page, source = read_page(report), markdown(report)
    rendered.feed(MarkdownIt("gfm-like", {"linkify": False}).render(source))
    for read in (page, rendered):
        assert read.open == []
        assert not read.tags & {"script", "img", "a", "iframe"}
        assert not [name for name, _ in read.attributes if name.startswith("on")]
        assert " ".join(HOSTILE.split()) in " ".join(read.text.split())
