"""A written-down report as a file, as a page and as a table."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from report_case import (
    HOSTILE,
    SECONDS,
    figure,
    hostile_report,
    whole_report,
    written_diagnosis,
    written_report,
)
from rich.console import Console

from trtllm_kvmap.errors import FormatError, InputError, MismatchError
from trtllm_kvmap.evaluate.diagnosis.diagnosis import Diagnosis
from trtllm_kvmap.evaluate.gates import Gates, judge_gates
from trtllm_kvmap.evaluate.latency import break_even, ratios
from trtllm_kvmap.evaluate.report import charts
from trtllm_kvmap.evaluate.report.markdown import markdown
from trtllm_kvmap.evaluate.report.page import html
from trtllm_kvmap.evaluate.report.report import Report, fixed, table
from trtllm_kvmap.evaluate.report.section import Section
from trtllm_kvmap.evaluate.report.sections import sections

VOID = {"meta", "link", "br", "wbr", "hr", "img", "input", "path", "rect", "line", "use"}


@pytest.fixture
def report() -> Report:
    return whole_report()


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


def parsed(written: str) -> Page:
    page = Page()
    page.feed(written)
    page.close()
    return page


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
    report.contexts["metric"] = {name: [2.0] for name in report.contexts["metric"]}
    page = parsed(html(report))
    assert any((value or "").startswith("Loss (nats per token") for _, value in page.attributes)
    assert "accuracy" not in printed(report).split("gate")[0]
    assert not [c for c in section(report, "All arms").charts if "guessing" in c.caption]


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
    assert "[unresolved]: source and target are too close" in " ".join(printed(report).split())


def test_a_report_is_written_and_read(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report.save(path)
    assert json.loads(path.read_text()) == report.to_json()
    assert Report.load(path) == report
    for text in (path.read_text()[:-100], "[" * 200_000):
        path.write_text(text)
        with pytest.raises(FormatError, match=r"report.json cannot be read"):
            Report.load(path)
    with pytest.raises(FormatError, match="cannot be read"):
        Report.load(tmp_path / "absent.json")
    path.write_text(json.dumps({**report.to_json(), "more": 1}))
    with pytest.raises(FormatError, match=r"report.json is not a report: .* exactly the entries"):
        Report.load(path)
    older = written_report().to_json()
    del older["diagnosis"]
    path.write_text(json.dumps(older))
    assert Report.load(path) == written_report()


def section(report: Report, title: str) -> Section:
    (found,) = [each for each in sections(report) if each.title == title]
    return found


def test_a_diagnosis_is_shown_region_by_region(report: Report) -> None:
    regions, layers, tokens, lengths = (
        section(report, f"Diagnosis: {title}")
        for title in (
            "where the error does harm",
            "layers and heads",
            "error by token",
            "other lengths",
        )
    )
    assert "12 contexts, S = 2, N = 16" in regions.text
    assert "0.200 [0.150 0.250] (KL, nats per token asked)" in regions.text
    replaced, controls = regions.grids
    assert [row[0] for row in replaced.rows] == [
        *("all keys", "all values"),
        *(f"part {i}/8" for i in range(1, 9)),
        *("digits", "words"),
    ]
    assert replaced.rows[0] == ("all keys", "0.050 [0.000 0.100]", "0.75 [0.70 0.80]")
    assert controls.rows == (
        ("the map as it is", "0.200 [0.150 0.250]"),
        ("keys 16 positions off", "0.500 [0.450 0.550]"),
        ("values one token off", "4.000 [3.950 4.050]"),
        ("source heads permuted", "not run: large has one KV head"),
    )
    by_layer, by_head = layers.grids
    assert by_layer.rows[1] == (
        "1",
        "0.75 [0.70 0.80]",  # both
        *["0.35 [0.30 0.40]"] * 2,  # keys, values
        "0.95 [0.90 1.00]",  # layers 0 to 1
        "0.73 [0.68 0.78]",  # layer 1 to the last
        *["0.500"] * 2,  # NRMSE
    )
    assert by_head.rows == (("0", "0.000", "1.000"), ("1", "-0.250", "0.750"))
    assert tokens.grids[0].rows[0] == ("0-15", "1,234", "0.042", "0.021")
    assert [row[:2] for row in lengths.grids[0].rows] == [
        ("512", "within"),
        ("2,048", "longer"),
        ("4,096", "not known"),
    ]
    assert len(regions.charts + layers.charts + tokens.charts + lengths.charts) == 7


def test_what_a_report_lacks_is_said(report: Report) -> None:
    bare = replace(written_report(), latency=None)
    bare.kvmap["fitted"].pop("layer_r2")
    assert "report --diagnosis" in section(bare, "Diagnosis").text
    assert "--latency" in section(bare, "Time").text
    assert "No heat map" in section(bare, "What one source layer explains").text
    page = parsed(html(bare))
    for text in ("No heat map", "evaluate --latency", "report --diagnosis"):
        assert text in page.text
    one_head = replace(written_diagnosis(), lengths=(), interventions=())
    assert len(sections(written_report().with_diagnosis(one_head))) == len(sections(report)) - 1


def test_a_diagnosis_of_another_map_is_refused() -> None:
    diagnosis = written_diagnosis()
    for changed in ({"parameters": 1}, {"fitted": {}}, {"scope": "head"}):
        other = replace(written_report(), kvmap=written_report().kvmap | changed)
        with pytest.raises(MismatchError, match="diagnose the map that was evaluated"):
            other.with_diagnosis(diagnosis)
    nameless = replace(diagnosis, config={"num_items": 1})
    with pytest.raises(MismatchError, match="the diagnosis of None"):
        written_report().with_diagnosis(nameless)


def test_what_is_no_diagnosis_is_refused(tmp_path: Path) -> None:
    path, content = tmp_path / "diagnosis.json", written_diagnosis().to_json()
    path.write_text(json.dumps(content))
    assert Diagnosis.load(path) == written_diagnosis()
    for spoilt in (
        {**content, "tokens": [{}]},
        {**content, "more": 1},
        [],
        {"lengths": 3},
        {**content, "config": []},
    ):
        path.write_text(json.dumps(spoilt))
        with pytest.raises(FormatError, match=r"diagnosis.json is not a diagnosis"):
            Diagnosis.load(path)
    for text in ("{", "[" * 200_000):
        path.write_text(text)
        with pytest.raises(FormatError, match=r"diagnosis.json cannot be read"):
            Diagnosis.load(path)


def test_no_minus_stands_before_a_zero() -> None:
    assert [fixed(value, 2) for value in (-0.004, -0.006, 0.0, 0.004)] == [
        "0.00",
        "-0.01",
        "0.00",
        "0.00",
    ]


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


def test_page_and_markdown_hold_every_cell_of_every_section(report: Report, written: str) -> None:
    page, document = parsed(written), MarkdownIt("gfm-like", {"linkify": False})
    rendered = Page()
    rendered.feed(document.render(markdown(report)))
    for section in sections(report):
        for grid in section.grids:
            for text in (section.title, *grid.header, *(cell for row in grid.rows for cell in row)):
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
