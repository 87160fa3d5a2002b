"""`trtllm-kvmap evaluate`"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.whole import require_writable
from trtllm_kvmap.cli.app import (
    JsonOption,
    SourceOption,
    TargetOption,
    console,
    progress,
    verb,
    write_json,
)
from trtllm_kvmap.cli.flags import config_flags
from trtllm_kvmap.cli.report import HtmlOption, MarkdownOption, write_report
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.evaluate.gates import Gates
from trtllm_kvmap.evaluate.latency import measure_latency
from trtllm_kvmap.evaluate.report import evidence, table
from trtllm_kvmap.evaluate.run import EvaluationConfig
from trtllm_kvmap.evaluate.run import evaluate as run_evaluation
from trtllm_kvmap.evaluate.tasks import TaskConfig, read_items
from trtllm_kvmap.models import load_model


@verb
@config_flags(task_config=TaskConfig, config=EvaluationConfig, gates=Gates)
def evaluate(
    kvmap: Annotated[Path, typer.Argument(help="a .kvmap.safetensors file")],
    source: SourceOption,
    target: TargetOption,
    task_config: TaskConfig,
    config: EvaluationConfig,
    gates: Gates,
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
    """Judge a map: every arm and every control, on items that neither fit nor selection saw."""
    for path in filter(None, (json, html, markdown)):
        require_writable(path)
    loaded = KvMap.load(kvmap, allow_unproven=True)
    source_model, target_model = load_model(source), load_model(target)
    items = read_items(task_config, target_model.tokenizer)
    with progress() as bar:
        task = bar.add_task("evaluate", total=len(items))
        report = run_evaluation(
            loaded,
            source_model,
            target_model,
            items,
            config,
            on_item=lambda done, total: bar.update(task, completed=done, total=total),
            gates=gates,
        )
    if latency:
        bridge = KvBridge(loaded, source=source_model, target=target_model, backend=config.backend)
        measured = measure_latency(bridge, source_model, items, config)
        report = replace(report, latency=measured)
    console.print(table(report))
    write_json(json, report.to_json())
    write_report(report, html, markdown)
    if attach:
        loaded.with_evidence(evidence(report)).save(kvmap)
        console.print(f"Stored the evidence in {kvmap}", highlight=False)
