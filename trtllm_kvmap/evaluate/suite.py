"""Several tasks, one report each, and the table that shows them side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rich.table import Table
from rich.text import Text

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.gates import Gates
from trtllm_kvmap.evaluate.report.report import Report, written
from trtllm_kvmap.evaluate.run import EvaluationConfig, evaluate
from trtllm_kvmap.evaluate.tasks.choice import NORMALISED
from trtllm_kvmap.evaluate.tasks.config import TaskConfig
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.evaluate.tasks.named import named_task
from trtllm_kvmap.models import LoadedModel


def evaluate_tasks(
    kvmap: KvMap,
    source: LoadedModel,
    target: LoadedModel,
    tasks: Mapping[str, tuple[TaskConfig, Sequence[Item]]],
    config: EvaluationConfig,
    gates: Gates,
    on_item: Callable[[str, int, int], None],
) -> dict[str, Report]:
    """The report of each task, on its items. Scores are length-normalised where the task's
    published accuracy is (or everywhere, if ``config`` says so); a task without questions is judged
    by nll. ``on_item(task, done, total)``.
    """
    reports = {}
    for name, (task, items) in tasks.items():
        asked = any(item.questions for item in items)
        judged = replace(
            config,
            metric=config.metric if asked else "nll",
            length_normalised=config.length_normalised or name in NORMALISED,
        )

        def report_progress(done: int, total: int, name: str = name) -> None:
            on_item(name, done, total)

        reports[name] = evaluate(
            kvmap,
            source,
            target,
            items,
            judged,
            on_item=report_progress,
            gates=gates,
            task=task,
        )
    return reports


def task_configs(tasks: str, config: TaskConfig) -> dict[str, TaskConfig]:
    """``config`` for each of the comma-separated ``tasks``, see named_task. Raises InputError
    for a task that is named twice, or for no name.
    """
    names = [name.strip() for name in tasks.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise InputError(f"tasks needs different names between commas, got {tasks!r}.")
    return {name: named_task(config, name) for name in names}


def suite_table(reports: Mapping[str, Report]) -> Table:
    """One task a row: the models alone, the mapped target, and what it recovers of the gap, each
    with its interval.
    """
    table = Table(box=None, pad_edge=False, title_justify="left")
    for index, column in enumerate(
        (
            "task",
            "metric",
            "target",
            "source",
            "mapped",
            "gap recovered",
            "above chance",
            "tokens mapped",
        )
    ):
        table.add_column(Text(column), justify="right" if index > 1 else "left")
    for name, report in reports.items():
        metric, arms = report.config["metric"], report.arms
        arm = arms[report.config["arm"]]
        figures = [arms["target"][metric], arms["source"][metric], arm[metric]]
        figures += [arm["gap_recovered"], arm["retention_normalised"]]
        cells = [written(entry, interval=True) for entry in figures]
        share = f"{arm['mapped_share']:.0%}"
        # Text, since a figure ends in [unresolved] where a console may read brackets as markup.
        table.add_row(*(Text(cell) for cell in (name, metric, *cells, share)))
    return table
