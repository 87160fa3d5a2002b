"""What each section of a report says, and says when something is missing."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace

import pytest
from report_case import (
    TURNS,
    figure,
    whole_report,
    written_diagnosis,
    written_report,
)
from report_reading import parsed, printed, section

from trtllm_kvmap.evaluate.diagnosis.diagnosis import Diagnosis
from trtllm_kvmap.evaluate.report.cards import summary
from trtllm_kvmap.evaluate.report.page import html
from trtllm_kvmap.evaluate.report.report import Report
from trtllm_kvmap.evaluate.report.section import bands
from trtllm_kvmap.evaluate.report.sections import sections
from trtllm_kvmap.evaluate.tasks.config import TaskConfig


@pytest.fixture
def report() -> Report:
    return whole_report()


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
