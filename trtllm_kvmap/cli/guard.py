"""`trtllm-kvmap guard`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.whole import require_writable
from trtllm_kvmap.cli.app import console, counted, verb, write_json
from trtllm_kvmap.cli.flags import JsonOption, SourceOption, TargetOption, config_flags
from trtllm_kvmap.evaluate.guard import GuardConfig, set_guard
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.models import load_model


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
    json: JsonOption = None,
) -> None:
    """Set the guard of a map: from which signals on a hand-over is taken back and the prompt read.

    The items are handed over by the map and by damaged copies of it. Give items that neither fit,
    selection nor report sees, and the S and N that hand-overs will have.
    """
    require_writable(kvmap)
    loaded = KvMap.load(kvmap, allow_unproven=True)
    source_model, target_model = load_model(source), load_model(target)
    items = read_items(task_config, target_model.tokenizer)
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
    console.print(said, highlight=False, soft_wrap=True)
    for each in (found, found.recalling):
        if each and (warning := taken_back_too_often(each.measured, config.taken_back)):
            console.print(warning, highlight=False, soft_wrap=True)
    write_json(json, found.to_json())


def _rates(measured: dict[str, Any]) -> str:
    return (
        f"takes back {measured['false_fallback_rate']:.1%} of the others and misses "
        f"{measured['missed_bad_rate']:.1%}"
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
