"""`trtllm-kvmap alternate`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.pair import require_pair
from trtllm_kvmap.cli.app import console, counted, say, verb, write_json
from trtllm_kvmap.cli.flags import JsonOption, SourceOption, TargetOption, config_flags
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.evaluate.alternation import alternate as run_alternation
from trtllm_kvmap.evaluate.alternation import table
from trtllm_kvmap.evaluate.tasks.conversations import read_conversations
from trtllm_kvmap.evaluate.tasks.named import TaskConfig
from trtllm_kvmap.models import describe_pair, load_model, require_described


@verb
@config_flags(task_config=TaskConfig)
def alternate(
    there: Annotated[Path, typer.Argument(help="the map from source to target")],
    back: Annotated[Path, typer.Argument(help="the map from target to source")],
    source: SourceOption,
    target: TargetOption,
    task_config: TaskConfig,
    first_tokens: Annotated[
        int, typer.Option(min=0, help="S: first tokens that the model taking over computes itself")
    ] = 1,
    repair_window: Annotated[
        int, typer.Option(min=0, help="N: last tokens that the model taking over computes itself")
    ] = 32,
    json: JsonOption = None,
) -> None:
    """Let two models take turns in conversations (--task coqa or tiny): does the drift grow?"""
    maps = [KvMap.load(path, allow_unproven=True) for path in (there, back)]
    described = describe_pair(source, target)
    talks = read_conversations(task_config, described[1].tokenizer)
    require_described(maps[0], *described, what=f"The map {there} was fitted")
    require_pair(
        maps[1],
        maps[0].target_fingerprint,
        maps[0].source_fingerprint,
        what=f"The map {back} was fitted",
    )
    models = load_model(source), load_model(target)
    prints = [model.fingerprint for model in models]
    require_pair(maps[0], prints[0], prints[1], what=f"The map {there} was fitted")
    with counted("alternate", len(talks)) as show:
        found = run_alternation(
            KvBridge(maps[0], source=models[0], target=models[1]),
            KvBridge(maps[1], source=models[1], target=models[0]),
            talks,
            first_tokens=first_tokens,
            repair_window=repair_window,
            on_talk=show,
        )
    console.print(table(found))
    for name, slope in found.drift.items():
        said = "-" if slope["value"] is None else f"{slope['value']:+.4f} nats a turn"
        if slope["low"] is not None:
            said += f" [{slope['low']:+.4f} {slope['high']:+.4f}]"
        say(f"drift where {name} answers: {said}")
    write_json(json, found.to_json())
