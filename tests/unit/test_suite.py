"""Several tasks in one run."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from evaluate_cases import QUICK
from handmade_maps import random_map
from report_case import whole_report
from rich.console import Console

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.gates import Gates
from trtllm_kvmap.evaluate.suite import evaluate_tasks, suite_table, task_configs
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items

# In words of the tiny vocabulary, which the random models read.
PIQA = [
    {"goal": "after anna", "sol1": "ben near", "sol2": "carl", "label": 0},
    {"goal": "after ben near", "sol1": "old mill", "sol2": "anna", "label": 1},
    {"goal": "again after ben", "sol1": "dora", "sol2": "emil stood", "label": 0},
]


def test_each_task_is_scored_as_the_field_does(random_model: Callable, tmp_path: Path) -> None:
    words = ["<pad>", "<bos>", "Question:", "Answer:", "after", "again", "near", "anna", "ben"]
    words += ["carl", "dora", "emil", "old", "mill", "stood"]
    source = random_model("qwen3", seed=1, words=words)
    target = random_model("qwen3", seed=2, layers=3, words=words)
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PIQA))
    (tmp_path / "text.txt").write_text("after anna ben old mill stood near again " * 20)
    configs = task_configs("piqa, text", TaskConfig(data=str(tmp_path), num_items=3))
    configs["text"] = replace(configs["text"], context_tokens=20, scored_tokens=5)
    seen: list[tuple[str, int, int]] = []
    config = replace(QUICK, first_tokens=1, repair_window=2)
    reports = evaluate_tasks(
        random_map(source, target),
        source,
        target,
        {name: (each, read_items(each, target.tokenizer)) for name, each in configs.items()},
        config,
        Gates(),
        on_item=lambda *progress: seen.append(progress),
    )
    said = {name: report.config for name, report in reports.items()}
    told = {n: (c["task"], c["metric"], c["length_normalised"]) for n, c in said.items()}
    assert told == {"piqa": ("piqa", "accuracy", True), "text": ("text", "nll", False)}
    assert said["piqa"]["data"] == str(tmp_path / "piqa.jsonl")
    assert seen == [(name, done, 3) for name in ("piqa", "text") for done in (1, 2, 3)]
    table = suite_table(reports)
    assert [str(next(iter(c.cells))) for c in table.columns][:2] == ["piqa", "accuracy"]


def test_every_figure_has_its_interval_and_keeps_its_mark() -> None:
    """Printed by a console that reads brackets as markup, as consoles do of themselves."""
    report = whole_report()
    console = Console(file=io.StringIO(), width=200)
    console.print(suite_table({"[bold]x": report}))
    row = " ".join(console.file.getvalue().splitlines()[-1].split())
    assert row == (
        "[bold]x accuracy 0.90 [0.85 0.95] 0.50 [0.45 0.55] 0.80 [0.75 0.85] 0.75 [0.70 0.80] "
        "0.85 [0.80 0.90] 88%"
    )
    report.arms["mapped_repaired_32"]["gap_recovered"] = {"value": 1.0, "low": None, "high": None}
    console.print(suite_table({"x": report}))
    assert "1.00 [unresolved]" in console.file.getvalue()


@pytest.mark.parametrize("tasks", ["piqa,piqa", "piqa,", ""])
def test_names_must_differ(tasks: str) -> None:
    with pytest.raises(InputError, match="different names"):
        task_configs(tasks, TaskConfig())
