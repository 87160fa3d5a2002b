"""`trtllm-kvmap diagnose`"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.cli.app import console, counted, say, verb, write_json
from trtllm_kvmap.cli.flags import (
    JsonOption,
    KvMapArgument,
    SourceOption,
    TargetOption,
    config_flags,
)
from trtllm_kvmap.evaluate.diagnosis.diagnose import diagnose as run_diagnosis
from trtllm_kvmap.evaluate.diagnosis.tables import headline, tables
from trtllm_kvmap.evaluate.run import EvaluationConfig
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.mapper.backends import require_backend
from trtllm_kvmap.models import describe_pair, load_model, require_described


@verb
@config_flags(task_config=TaskConfig, config=EvaluationConfig)
def diagnose(
    kvmap: KvMapArgument,
    source: SourceOption,
    target: TargetOption,
    task_config: TaskConfig,
    config: EvaluationConfig,
    length: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="also judge contexts of so many tokens (not of published tasks); repeatable",
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Say where a map goes wrong: which keys, values, layers, heads, positions and lengths."""
    require_backend(config.backend)
    loaded = KvMap.load(kvmap, allow_unproven=True)
    described = describe_pair(source, target)
    tokenizer = described[1].tokenizer
    items = read_items(task_config, tokenizer)
    longer = {
        tokens: read_items(replace(task_config, context_tokens=tokens), tokenizer)
        for tokens in length or ()
    }
    require_described(loaded, *described)
    source_model, target_model = load_model(source), load_model(target)
    with counted("diagnose", len(items)) as show:
        diagnosis = run_diagnosis(
            loaded,
            source_model,
            target_model,
            items,
            config,
            longer,
            on_item=show,
            task=task_config,
        )
    say(headline(diagnosis))
    for table in tables(diagnosis):
        console.print(table)
        console.print()
    for name, reason in diagnosis.refused.items():
        say(f"{name}: not run, {reason}")
    write_json(json, diagnosis.to_json())
