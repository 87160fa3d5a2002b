"""The page as a browser shows it: on a phone and on a desk, light and dark, printed, attacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_case import HOSTILE, hostile_report, large_report, whole_report

from trtllm_kvmap.evaluate.report.page import html
from trtllm_kvmap.evaluate.report.report import Report
from trtllm_kvmap.evaluate.report.sections import sections

PHONE, DESK = 390, 1280
MEASURE = (Path(__file__).parent / "measure.js").read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html(whole_report()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def opened(browser: Any, page: Path) -> Any:
    return browser.open(page, MEASURE, widths=(PHONE, DESK), pdf=str(page.with_suffix(".pdf")))


@pytest.fixture(scope="module")
def dark(browser: Any, page: Path) -> Any:
    return browser.open(page, MEASURE, widths=(PHONE,), dark=True)


@pytest.fixture(scope="module")
def large(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("large") / "report.html"
    path.write_text(html(large_report()), encoding="utf-8")
    return browser.open(path, MEASURE, widths=(PHONE, DESK), pdf=str(path.with_suffix(".pdf")))


@pytest.fixture(params=[PHONE, DESK])
def seen(opened: Any, request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = opened.found[str(request.param)]
    return found


def test_the_console_is_silent_and_only_the_page_is_asked_for(opened: Any, page: Path) -> None:
    assert opened.console == []
    assert opened.asked == [page.as_uri()]


def test_the_page_does_not_scroll_sideways(seen: dict[str, Any]) -> None:
    assert seen["page"] <= seen["viewport"]


def test_charts_are_drawn(seen: dict[str, Any]) -> None:
    assert len(seen["charts"]) == 15
    for chart in seen["charts"]:
        width, height = chart["box"]
        assert 250 < width <= seen["viewport"]
        assert height > 100
        assert chart["drawn"] >= 6, chart["name"]
        assert chart["words"], chart["name"]
        assert chart["smallest"] >= 8, chart["name"]
        assert chart["outside"] == [], chart["name"]


def test_charts_hold_what_the_report_says(seen: dict[str, Any]) -> None:
    words = [set(chart["words"]) for chart in seen["charts"]]
    assert {"target", "source", "mapped_repaired_32", "no_context"} <= words[0]
    assert {"source alone", "mapped_repaired_32", "target"} <= words[1]
    assert {"all keys", "all values", "part 1/8", "part 8/8", "digits", "words"} <= words[3]
    assert {"the map as it is", "keys 16 positions off", "values one token off"} <= words[4]
    assert {"0.1", "0.5", "1", "5"} <= words[4]  # of a logarithmic axis
    assert {"both", "keys", "values", "target layer", "share removed"} <= words[5]
    assert {"layers 0 to this", "this to the last"} <= words[6]
    assert {"KV head", "-0.25", "0.75"} <= words[7]
    assert {"0-15", "16-31", "digits", "keys", "values"} <= words[8]
    assert {"512", "2,048", "4,096", "mapped", "source alone", "target"} <= words[9]
    assert {"512", "2,048", "4,096", "mapped", "source alone", "target"} <= words[10]
    assert {"0.50", "0.90", "0.25"} <= words[11]  # R2 of keys, in the cells
    assert {"source prefill", "transfer", "own tokens", "map", "repair", "first step"} <= words[13]
    assert {"256", "1,024"} <= words[14]


def test_every_axis_says_what_it_measures(seen: dict[str, Any]) -> None:
    measures = [
        *("accuracy (share right)", "accuracy (share right)", "cosine"),
        *("share of the divergence removed", "KL from the native target, nats per token"),
        *("share removed", "share removed", "removed"),
        "1 - R2 (0: exact, 1: as far off as the mean)",
        *("accuracy (share right)", "loss, nats per token (less is better)"),
        *("R2", "R2", "time, native target = 1", "time, native target = 1"),
    ]
    for chart, measure in zip(seen["charts"], measures, strict=True):
        assert measure in chart["words"], chart["name"]


def test_tables_are_read_inside_their_box(seen: dict[str, Any]) -> None:
    assert len(seen["tables"]) == 22
    for table in seen["tables"]:
        width, wide = table["box"][0], table["table"][0]
        assert 250 < width <= seen["viewport"]
        assert table["overflow"] == "auto"
        assert table["reached"] >= wide - 1, table["caption"]
        assert table["lastCellSeen"], table["caption"]
        assert table["headingsSeen"], table["caption"]
        assert table["box"][1] < 600, table["caption"]  # longer ones scroll in their box
        assert table["clipped"] == [], table["caption"]
        assert min(table["rows"]) > 15
        assert table["font"] >= 12
        assert table["described"]


def test_text_stands_out_from_its_ground(opened: Any, dark: Any) -> None:
    light, night = opened.found[str(PHONE)], dark.found[str(PHONE)]
    assert light["ground"] == [255, 255, 255]
    assert night["dark"]
    assert max(night["ground"]) < 60
    assert light["faint"] == night["faint"] == []


def test_a_phone_shows_verdicts_and_gaps_before_it_is_scrolled(opened: Any) -> None:
    seen = opened.found[str(PHONE)]
    for caption, heading in (("The gates", "verdict"), ("Answers, by arm", "gap recovered")):
        (table,) = [table for table in seen["tables"] if table["caption"] == caption]
        assert table["columns"][table["headings"].index(heading)] <= PHONE, caption


def test_a_page_of_64_layers_is_no_longer_than_its_charts_and_boxes(large: Any) -> None:
    for width in (PHONE, DESK):
        seen = large.found[str(width)]
        assert seen["page"] <= seen["viewport"]
        for table in seen["tables"]:
            assert table["box"][1] < 600, table["caption"]
            assert table["lastCellSeen"], table["caption"]
            assert table["headingsSeen"], table["caption"]


def test_print_keeps_its_size_and_every_column_of_64_by_40_layers(opened: Any, large: Any) -> None:
    """A table that is wider than a sheet makes the browser shrink all of them, or is cut."""
    assert large.sheets[0]["first_line"] == pytest.approx(opened.sheets[0]["first_line"], rel=0.01)
    assert_printed(large.sheets, large_report())


def test_the_page_prints_and_nothing_is_cut(opened: Any) -> None:
    assert 2 <= len(opened.sheets) <= 12
    assert_printed(opened.sheets, whole_report())


def assert_printed(sheets: list[dict[str, Any]], report: Report) -> None:
    """Text inside the edges, every row of short cells as a whole, and the last cell of the others,
    which is the right edge of their table.
    """
    for sheet in sheets:
        assert sheet["left"] >= 0
        assert sheet["reached"][0] <= sheet["sheet"][0]
        assert sheet["reached"][1] <= sheet["sheet"][1]
    printed = "".join("".join(sheet["text"] for sheet in sheets).split())
    for section in sections(report):
        assert "".join(section.title.split()) in printed
        for grid in section.grids:
            assert "".join(grid.caption.split())[:30] in printed
            for row in grid.rows:
                short = all(len(cell) <= 24 for cell in row)
                assert "".join(("".join(row) if short else row[-1][:30]).split()) in printed, row


def test_a_hostile_report_runs_nothing(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(html(hostile_report()), encoding="utf-8")
    opened = browser.open(path, MEASURE, widths=(PHONE,))
    seen = opened.found[str(PHONE)]
    assert seen["hurt"] is None
    assert seen["foreign"] == 0
    assert opened.console == []  # a refusal by the page's own policy would be heard here
    assert opened.asked == [path.as_uri()]
    assert HOSTILE in seen["text"]
    assert seen["page"] <= seen["viewport"]
