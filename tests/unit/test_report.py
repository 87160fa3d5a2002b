"""A written-down report as a file, as a page and as a table."""

from __future__ import annotations

import io
import json
import re
import shlex
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from report_case import (
    HOSTILE,
    TURNS,
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
from trtllm_kvmap.evaluate.latency import break_even, break_even_by_turn, ratios, turn_ratios
from trtllm_kvmap.evaluate.report import charts
from trtllm_kvmap.evaluate.report.cards import summary
from trtllm_kvmap.evaluate.report.charts_of_diagnosis import log_ticks
from trtllm_kvmap.evaluate.report.markdown import markdown
from trtllm_kvmap.evaluate.report.page import html
from trtllm_kvmap.evaluate.report.report import Report, fixed, table
from trtllm_kvmap.evaluate.report.section import Section, bands
from trtllm_kvmap.evaluate.report.sections import sections
from trtllm_kvmap.evaluate.tasks.config import TaskConfig

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
    report.contexts["metric"] = {name: [2.0] * 3 for name in report.contexts["metric"]}
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
    assert "12 contexts of the task tiny (seed 5), S = 2, N = 16" in regions.text
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
    assert by_head.header == ("target layer", "0", "1")
    assert by_head.rows == (("0", "0.00", "1.00"), ("1", "-0.25", "0.75"))
    assert tokens.grids[0].rows[0] == ("0-15", "1,234", "0.042", "0.021")
    accuracy, loss = lengths.grids
    assert [(row[0], row[-1]) for row in accuracy.rows] == [
        ("512", "within"),
        ("2,048", "longer"),
        ("4,096", "not known"),
    ]
    assert "The gap recovered is in accuracy" in lengths.text
    three = ("mapped", "source", "target")
    assert accuracy.header == ("tokens", "gap recovered in accuracy", *three, "calibration")
    assert loss.header == ("tokens", *three, "KL, nats", "calibration")
    taken = ("0.800 [0.750 0.850]", "0.650 [0.600 0.700]", "0.900 [0.850 0.950]")
    assert accuracy.rows[0][1:-1] == ("0.600 [0.550 0.650]", *taken)
    assert loss.rows[0][1] == "2.000 [1.950 2.050]"
    assert len(regions.charts + layers.charts + tokens.charts + lengths.charts) == 8


def test_a_gap_by_length_stands_beside_what_it_is_taken_from() -> None:
    """Of the loss when the metric is nll; an older diagnosis names none and has no accuracies."""
    found = written_diagnosis()
    by_loss = replace(found, config=found.config | {"metric": "nll"})
    section_of = {
        name: section(written_report().with_diagnosis(each), "Diagnosis: other lengths")
        for name, each in (("nll", by_loss), ("none", Diagnosis.from_json(older(found))))
    }
    accuracy, loss = section_of["nll"].grids
    assert accuracy.header == ("tokens", "mapped", "source", "target", "calibration")
    assert loss.header[1] == "gap recovered in nll"
    (alone,) = section_of["none"].grids
    assert alone.header[1] == "gap recovered (of which metric is not said)"
    assert "does not name the metric" in section_of["none"].text


def older(found: Diagnosis) -> dict:
    """What diagnose wrote before it named the metric."""
    content = found.to_json()
    content["config"] = {k: v for k, v in content["config"].items() if k not in ("metric", "task")}
    for row in content["lengths"]:
        for name in ("accuracy", "source_accuracy", "target_accuracy"):
            del row[name]
    return content


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
    for spoilt, said in (
        ({**content, "tokens": [{}]}, ""),
        ({**content, "more": 1}, "it needs exactly the entries attention_cosine, "),
        ([], "it needs exactly the entries attention_cosine, "),
        ({"lengths": 3}, "it needs exactly the entries attention_cosine, "),
        ({**content, "config": []}, ""),
    ):
        path.write_text(json.dumps(spoilt))
        with pytest.raises(FormatError, match=f"diagnosis.json is not a diagnosis.*{said}"):
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
    found = ratios(TURNS)
    # Native: 0.03 + 0.01 and 0.19 + 0.01; six stages of 0.01 and 0.02, the first the source's.
    assert found["cold"] == pytest.approx([0.06 / 0.04, 0.12 / 0.20])
    assert found["warm"] == pytest.approx([0.05 / 0.04, 0.10 / 0.20])
    warm = turn_ratios(TURNS, "warm")
    assert warm[0] == pytest.approx([0.05 / 0.04, 0.045 / 0.04, 0.07 / 0.04])
    assert warm[1] == pytest.approx([0.10 / 0.20, 0.09 / 0.20, 0.14 / 0.20])
    assert turn_ratios({}, "warm") == []
    assert break_even_by_turn([100, 200], [[2.0, 0.9, 1.0], [0.5, 0.4, 1.1]]) == [
        pytest.approx(100 + 100 * 1.0 / 1.5),
        100,
        None,
    ]
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


def test_a_break_even_is_told_as_far_as_turns_agree(report: Report) -> None:
    """The warm curve of each turn falls to 1 at 512, 398.2 and 804.6 tokens on a straight line."""
    time = section(report, "Time")
    assert "When the source has read the prompt: break-even between 398 and 805 tokens" in time.text
    (grid,) = time.grids
    assert grid.header == ("step", "256", "1,024")
    rows = {row[0]: row[1:] for row in grid.rows}
    assert rows["map"] == ("10.0 [5.0 30.0]", "20.0 [10.0 60.0]")
    assert rows["warm ratio"] == ("1.25 [1.12 1.75]", "0.50 [0.45 0.70]")
    latency = report.latency or {}
    slow = {**TURNS, "map": [[0.01] * 3, [0.02, 0.01, 0.2]]}
    apart = replace(report, latency={**latency, "turns": slow})
    assert "no break-even can be told, since 2 of 3 turns have one" in section(apart, "Time").text
    medians = {name: value for name, value in latency.items() if name != "turns"}
    old = section(replace(report, latency=medians), "Time")
    assert "their spread is not known" in old.text
    assert "as far as medians alone can tell" in old.text
    assert html(replace(report, latency=medians))


def test_what_was_asked_is_on_the_page_and_as_a_command(report: Report) -> None:
    found = section(report, "Configuration and fingerprints")
    settings = dict(found.grids[0].rows)
    for name, said in {
        "task": "hellaswag",
        "skip": "20",
        "seed": "3",
        "num_questions": "240",
        "items_digest": "cc" * 32,
        "map_digest": "dd" * 32,
        "version of torch": "2.13.0",
    }.items():
        assert settings[name] == said
    assert shlex.split(settings["command"]) == [
        *("trtllm-kvmap", "evaluate", "MAP", "--source", "small <b>", "--target", "large"),
        *("--task", "hellaswag", "--data", "held out.jsonl", "--num-items", "60", "--skip", "20"),
        *("--context-tokens", "1000", "--scored-tokens", "40", "--questions", "6", "--seed", "3"),
        *("--metric", "accuracy", "--first-tokens", "1", "--repair-window", "32"),
        *("--rollout-steps", "16", "--resamples", "2000", "--backend", "cpu"),
        *("--min-retention", "0.8", "--max-perplexity-ratio", "1.25"),
        *("--min-top1-agreement", "0.8", "--length-normalised"),
    ]
    opens = "60 contexts of the task hellaswag (from held out.jsonl, after the first 20) of 256"
    assert opens in parsed(html(report)).text
    asked = {f.name for f in fields(TaskConfig)} | {"num_questions", "items_digest", "map_digest"}
    for name in asked - {"num_items", "context_tokens"} | {"versions"}:
        del report.config[name]
    bare = section(report, "Configuration and fingerprints")
    assert "No command can be given" in bare.text
    assert "60 contexts of 256 to 1,024 tokens. The" in parsed(html(report)).text


def test_a_source_that_is_better_is_said_to_be(report: Report) -> None:
    """A report without a gap says why, wherever it would stand; one without a score says that."""
    none = figure(None)
    arms = {name: {**a, "gap_recovered": none} for name, a in report.arms.items()}
    arms["copy"] = report.arms["copy"]
    arms["source"]["accuracy"] = figure(0.95)
    bare = replace(report, arms=arms, gap_recovered=none)
    said = (
        "There is no gap to recover: in accuracy the source alone, 0.95 [0.90 1.00], is no worse "
        "than the target, 0.90 [0.85 0.95]."
    )
    for text in (section(bare, "Gates").text, section(bare, "All arms").text, printed(bare)):
        assert said in " ".join(text.split())
    assert summary(bare)[0].note.startswith(said)
    assert said not in " ".join(card.note for card in summary(report))
    arms["source"]["accuracy"] = none
    assert summary(bare)[0].note == "No gap recovered: these contexts give no accuracy."


def test_candidates_stand_with_what_chose_them(report: Report) -> None:
    found = section(report, "The map")
    assert "by the cosine of attention outputs on 24 items" in found.text
    assert "S = 4 and N = 32. Gap recovered is in accuracy; [low high] is the 95 %" in found.text
    fits, trials = found.grids
    assert fits.rows == (
        ("0", "slice", "12 slices", "0.001", "same", "123,456", "0.760", "0.590", "0.930"),
        ("1", "head", "4 layers", "0.001", "same", "refused: head needs equal <KV heads>"),
    )
    assert fits.chosen == trials.chosen == {0}
    assert trials.rows == (
        ("0", "0.700 [unresolved]", "1.930 [1.900 1.960]", "0.800 [0.700 0.900]"),
        ("the source alone", "-", "2.250 [2.000 2.500]", "0.500 [0.250 0.750]"),
        ("the target alone", "-", "1.750 [1.500 2.000]", "-"),
    )
    # As older maps have it.
    fitted = report.kvmap["fitted"]
    for kept in (fitted["candidates"][0], *(fitted["selection"][n] for n in ("source", "target"))):
        del kept["intervals"]
    del fitted["selection"]["chosen_by"]
    old = section(report, "The map")
    assert "by what the map does not say on 24 items" in old.text
    assert "the map keeps no intervals" in old.text
    assert old.grids[1].rows[0] == ("0", "0.700", "1.930", "0.800")
    del fitted["selection"]
    assert "on items that this report never saw" in section(report, "The map").text


def test_what_charts_draw_stands_in_tables_too(report: Report) -> None:
    single = section(report, "Context by context").grids[1]
    assert single.header == ("context", "tokens", "source alone", "mapped_repaired_32", "target")
    assert single.rows == (
        ("0", "256", "0.500", "0.750", "1.000"),
        ("1", "512", "0.250", "0.250", "0.750"),
        ("2", "1,024", "0.750", "-", "1.000"),
    )
    many = {name: values * 100 for name, values in report.contexts["metric"].items()}
    contexts = {"tokens": [256] * 300, "metric": many}
    long = section(replace(report, contexts=contexts), "Context by context").grids[1]
    assert (len(long.rows), "report.json has 100 more" in long.caption) == (200, True)


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


def test_a_wide_matrix_is_cut_into_tables_that_a_sheet_holds() -> None:
    rows = [[layer + source / 100 for source in range(48)] for layer in range(3)]
    grids = bands("R2", "target layer", "source layer", rows)
    assert [len(grid.header) for grid in grids] == [21, 21, 9]
    assert [grid.rows[2][1] for grid in grids] == ["2.00", "2.20", "2.40"]
    assert [grid.header[-1] for grid in grids] == ["19", "39", "47"]
    assert grids[2].caption == "R2, by target layer (down) and source layers 40 to 47 (across)"
    assert [g.caption for g in bands("R2", "layer", "head", [[0.5], [None]])] == [
        "R2, by layer (down) and head 0 (across)"
    ]


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


def test_figures_that_are_none_are_refused_before_anything_is_shown(
    report: Report, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    for spoilt in (float("nan"), float("inf"), "\ud800"):
        path.write_text(json.dumps({**report.to_json(), "chance": spoilt}))
        with pytest.raises(FormatError, match=r"report.json holds a number that is not finite, or"):
            Report.load(path)
        path.write_text(json.dumps({**written_diagnosis().to_json(), "divergence": spoilt}))
        with pytest.raises(FormatError, match=r"report.json holds a number that is not finite, or"):
            Diagnosis.load(path)
