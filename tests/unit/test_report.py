"""A report as a file and as a terminal's table; its gates, ratios and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from report_case import (
    TURNS,
    whole_report,
    written_diagnosis,
    written_report,
)
from report_reading import printed

from trtllm_kvmap.errors import FormatError, InputError, MismatchError
from trtllm_kvmap.evaluate.diagnosis.diagnosis import Diagnosis
from trtllm_kvmap.evaluate.gates import Gates, judge_gates
from trtllm_kvmap.evaluate.latency import break_even, break_even_by_turn, ratios, turn_ratios
from trtllm_kvmap.evaluate.report.report import Report, fixed


@pytest.fixture
def report() -> Report:
    return whole_report()


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
    with pytest.raises(FormatError, match=r"report.json is not a report of this version: it "):
        Report.load(path)
    older = written_report().to_json()
    del older["diagnosis"]
    path.write_text(json.dumps(older))
    assert Report.load(path) == written_report()


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
        ({**content, "more": 1}, "version: it has more beside its own. Write it again"),
        ([], "version: it must hold entries with names, got list. "),
        ({"lengths": 3}, "version: it lacks attention_cosine, config, .*, tokens. Write"),
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
