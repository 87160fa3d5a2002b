"""`trtllm-kvmap guard`"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.whole import require_writable
from trtllm_kvmap.cli.app import counted, say, verb, write_json
from trtllm_kvmap.cli.flags import JsonOption, SourceOption, TargetOption, config_flags
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.guard import GuardConfig, set_guard
from trtllm_kvmap.evaluate.tasks.items import require_unseen
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.models import describe_pair, load_model, require_described


@verb
@config_flags(task_config=TaskConfig, config=GuardConfig)
def guard(
    kvmap: Annotated[
        Path, typer.Argument(help="a .kvmap.safetensors file; the guard goes into it")
    ],
    source: SourceOption,
    target: TargetOption,
    task_config: TaskConfig,
    config: GuardConfig,
    also: Annotated[
        list[str] | None,
        typer.Option(help="another kind of traffic, TASK or TASK=FILE; repeatable"),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Set the guard of a map: by which signals a hand-over is taken back and the prompt read.

    The items, --num-items of each kind, are handed over by the map and by damaged copies of it.
    Give every kind of traffic that the map will meet, items that neither fit, selection nor report
    sees, and the S and N that hand-overs will have.
    """
    require_writable(kvmap)
    loaded = KvMap.load(kvmap, allow_unproven=True)
    described = describe_pair(source, target)
    tokenizer = described[1].tokenizer
    items = {
        kind: read_items(each, tokenizer)
        for kind, each in kinds_of(task_config, also or ()).items()
    }
    for asked in items.values():
        require_unseen(asked, loaded.fitted.get("selected_on", []))
    require_described(loaded, *described)
    source_model, target_model = load_model(source), load_model(target)
    with counted("guard") as show:
        found = set_guard(
            loaded,
            source_model,
            target_model,
            items,
            config,
            on_map=show,
        )
    loaded.with_guard(found.to_json()).save(kvmap)
    measured = found.measured
    said = (
        f"Stored a guard in {kvmap}: of {measured['cases']} hand-overs, {measured['bad']} worse "
        f"than the source, it {_rates(measured)}"
    )
    if found.recalling is not None:
        said += f"; where recall is weighed, it {_rates(found.recalling.measured)}"
    say(said)
    if len(items) > 1:
        for kind, figures in (found.recalling or found).measured["kinds"].items():
            line = f"  {kind}: {_rates(figures)}"
            say(line)
    for each in (found, found.recalling):
        if each and (warning := taken_back_too_often(each.measured, config.taken_back)):
            say(warning)
    write_json(json, found.to_json())


def kinds_of(config: TaskConfig, also: Sequence[str]) -> dict[str, TaskConfig]:
    """``config``, and it again for each TASK or TASK=FILE of ``also``, by how they are named there.
    Raises InputError for a kind that is given twice.
    """
    named = f"{config.task}={config.data}" if config.data else config.task
    kinds = {named: config}
    for kind in also:
        task, _, data = kind.partition("=")
        if kind in kinds:
            raise InputError(f"The kind of traffic {kind!r} is given twice; give each once.")
        kinds[kind] = replace(config, task=task, data=data)
    return kinds


def _rates(measured: dict[str, Any]) -> str:
    others, bad = measured["false_fallback_rate"], measured["missed_bad_rate"]
    return (
        f"takes back {'none' if others is None else f'{others:.1%}'} of the others and misses "
        f"{'none' if bad is None else f'{bad:.1%}'} of {measured['bad']}"
    )


def taken_back_too_often(measured: dict[str, Any], allowed: float) -> str:
    """What to do about a guard that takes back more of the others than ``allowed``, by more than
    one hand-over; empty where it keeps to that.
    """
    others, rate = measured["cases"] - measured["bad"], measured["false_fallback_rate"]
    if rate * others <= allowed * others + 1:
        return ""
    return (
        f"It takes back {rate:.1%} of the hand-overs that were not worse, and --taken-back allows "
        f"{allowed:.1%}: the signals of these items do not tell the bad ones apart well enough for "
        f"--missed. Give more items, compute more tokens (--selected-tokens), fit a better map, or "
        f"allow more of --missed."
    )
