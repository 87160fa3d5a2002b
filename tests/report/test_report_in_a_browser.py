"""The page as a browser shows it: on a phone and on a desk, light and dark, printed, attacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_case import HOSTILE, hostile_report, whole_report

from trtllm_kvmap.evaluate.report.page import html
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
    assert len(seen["charts"]) == 14
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
    assert {"both", "keys", "values", "target layer", "share removed"} <= words[5]
    assert {"layers 0 to this", "this to the last"} <= words[6]
    assert {"KV head", "-0.25", "0.75"} <= words[7]
    assert {"0-15", "16-31", "digits", "keys", "values"} <= words[8]
    assert {"512", "2,048", "4,096", "mapped", "source alone", "target"} <= words[9]
    assert {"0.50", "0.90", "0.25"} <= words[10]  # R2 of keys, in the cells
    assert {"source prefill", "transfer", "own tokens", "map", "repair", "first step"} <= words[12]
    assert {"256", "1,024"} <= words[13]


def test_every_axis_says_what_it_measures(seen: dict[str, Any]) -> None:
    measures = [
        *("accuracy (share right)", "accuracy (share right)", "cosine"),
        *("share of the divergence removed", "KL from the native target, nats per token"),
        *("share removed", "share removed", "removed"),
        *("1 - R2 (0: exact, 1: as far off as the mean)", "loss, nats per token"),
        *("R2", "R2", "time, native target = 1", "time, native target = 1"),
    ]
    for chart, measure in zip(seen["charts"], measures, strict=True):
        assert measure in chart["words"], chart["name"]


def test_tables_are_read_inside_their_box(seen: dict[str, Any]) -> None:
    assert len(seen["tables"]) == 19
    for table in seen["tables"]:
        width, wide = table["box"][0], table["table"][0]
        assert 250 < width <= seen["viewport"]
        assert table["overflow"] == "auto"
        assert table["reached"] >= wide - 1, table["caption"]
        assert table["lastCellSeen"], table["caption"]
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


def test_the_page_prints_and_nothing_is_cut(opened: Any) -> None:
    assert 2 <= len(opened.sheets) <= 12
    for sheet in opened.sheets:
        assert sheet["left"] >= 0
        assert sheet["reached"][0] <= sheet["sheet"][0]
        assert sheet["reached"][1] <= sheet["sheet"][1]
    printed = " ".join(" ".join(sheet["text"] for sheet in opened.sheets).split())
    for section in sections(whole_report()):
        for grid in section.grids:
            for cell in (section.title, grid.caption, *(row[-1] for row in grid.rows)):
                assert " ".join(cell.split())[:30] in printed


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
