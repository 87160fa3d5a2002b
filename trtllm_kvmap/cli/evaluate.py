"""`trtllm-kvmap evaluate`"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from trtllm_kvmap.artifact.evidence import unproven
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.cli.app import (
    console,
    counted,
    progress,
    require_all_writable,
    say,
    verb,
    write_json,
)
from trtllm_kvmap.cli.flags import (
    JsonOption,
    KvMapArgument,
    SourceOption,
    TargetOption,
    config_flags,
)
from trtllm_kvmap.cli.report import HtmlOption, MarkdownOption, render_report, write_report
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.gates import Gates
from trtllm_kvmap.evaluate.latency import WAYS, measure_latency, turn_ratios
from trtllm_kvmap.evaluate.report.report import evidence, table
from trtllm_kvmap.evaluate.run import EvaluationConfig, require_scorable
from trtllm_kvmap.evaluate.run import evaluate as run_evaluation
from trtllm_kvmap.evaluate.suite import evaluate_tasks, suite_table, task_configs
from trtllm_kvmap.evaluate.tasks.items import require_unseen
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.mapper.backends import require_backend
from trtllm_kvmap.models import describe_pair, load_model, require_described
from trtllm_kvmap.serve.map_header import MapHeader


@verb
@config_flags(task_config=TaskConfig, config=EvaluationConfig, gates=Gates)
def evaluate(
    kvmap: KvMapArgument,
    source: SourceOption,
    target: TargetOption,
    task_config: TaskConfig,
    config: EvaluationConfig,
    gates: Gates,
    tasks: Annotated[
        str, typer.Option(help="several tasks, comma-separated; --data may be a folder of files")
    ] = "",
    json: JsonOption = None,
    html: HtmlOption = None,
    markdown: MarkdownOption = None,
    latency: Annotated[
        bool, typer.Option("--latency", help="also time every step by prompt length")
    ] = False,
    attach: Annotated[
        bool, typer.Option("--attach", help="store the evidence in the map, if controls passed")
    ] = False,
) -> None:
    """Judge a map: every arm and every control, on items that neither fit nor selection saw.

    An arm is a way to answer: each model alone, the target on the mapped cache, repaired or not,
    copied, of a wrong document. Controls must pass, or nothing is reported. Gap recovered is
    (mapped - source) / (target - source): 0 is the source alone, 1 the target itself.
    """
    if tasks and (html or markdown or latency or attach):
        raise InputError(
            "--html, --markdown, --latency and --attach are of one report; give --task, one at a "
            "time."
        )
    require_all_writable(html, markdown)
    require_backend(config.backend)
    loaded = KvMap.load(kvmap, allow_unproven=True)
    chosen_on = loaded.fitted.get("selected_on", [])
    described = describe_pair(source, target)
    tokenizer = described[1].tokenizer
    if tasks:
        suite = {
            name: (each, read_items(each, tokenizer))
            for name, each in task_configs(tasks, task_config).items()
        }
        for _, asked in suite.values():
            require_unseen(asked, chosen_on)
        require_described(loaded, *described)
        models = load_model(source), load_model(target)
        with progress() as show:
            reports = evaluate_tasks(loaded, *models, suite, config, gates, on_item=show)
        console.print(suite_table(reports))
        write_json(json, {"tasks": {name: report.to_json() for name, report in reports.items()}})
        return
    items = read_items(task_config, tokenizer)
    require_scorable(items, config.metric)
    require_unseen(items, chosen_on)
    require_described(loaded, *described)
    source_model, target_model = load_model(source), load_model(target)
    with counted("evaluate", len(items)) as show:
        report = run_evaluation(
            loaded,
            source_model,
            target_model,
            items,
            config,
            on_item=show,
            gates=gates,
            task=task_config,
        )
    if latency:
        bridge = KvBridge(loaded, source=source_model, target=target_model, backend=config.backend)
        measured = measure_latency(bridge, source_model, items, config)
        report = replace(report, latency=measured)
    console.print(table(report))
    if report.latency is not None:
        say(timing(report.latency))
    write_json(json, report.to_json())
    write_report(render_report(report, html, markdown))
    if attach:
        loaded.with_evidence(evidence(report)).save(kvmap)
        say(f"Stored the evidence in {kvmap}")
        header = MapHeader.read(kvmap)
        if why := unproven(header.evidence, header.map_digest):
            say(f"The map stays unproven: {why}.")


def timing(latency: dict[str, Any]) -> str:
    """The hand-over's time over the target's own, of what measure_latency gives."""
    if not latency["lengths"]:
        return "Time: no prompt is longer than S + N tokens and short enough for both models."
    length = latency["lengths"][-1]
    warm, cold = (f"{latency[way][-1]:.2f}{_spread(latency, way)}" for way in WAYS)
    return (
        f"Time to the second token at {length:,} tokens of prompt, over the target's own: "
        f"{warm} when the source has read the prompt, {cold} when it reads it first."
    )


def _spread(latency: dict[str, Any], way: str) -> str:
    """`` [0.24 0.31]``, the least and the most of all turns, of the longest prompt."""
    turns = turn_ratios(latency["turns"], way)[-1]
    return f" [{min(turns):.2f} {max(turns):.2f}]"
