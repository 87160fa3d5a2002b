"""`trtllm-kvmap plan`"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from trtllm_kvmap.artifact.kvmap import KvMap, read_map
from trtllm_kvmap.artifact.whole import require_writable
from trtllm_kvmap.cli.app import console, say, verb, write_json
from trtllm_kvmap.cli.flags import JsonOption, KvMapArgument
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.routing.routing import Choice, Route, Situation, route
from trtllm_kvmap.decode.routing.speeds import Speeds, bytes_per_token
from trtllm_kvmap.decode.routing.vouched import Direction, RoutingPolicy
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.accounting import Compute, Phases, compute_of
from trtllm_kvmap.evaluate.measure_speeds import measure_speeds
from trtllm_kvmap.models import describe_pair, load_model, require_described

MEASURED_LENGTHS = 6  # the conversation's own, its half, and so on


@verb
def plan(
    kvmap: KvMapArgument,
    num_tokens: Annotated[
        int, typer.Option("--tokens", help="length of the conversation, in tokens")
    ],
    reply_tokens: Annotated[int, typer.Option(help="tokens still to be said")] = 64,
    direction: Annotated[
        Direction | None,
        typer.Option(
            help="why the target is wanted: up: it answers better; down: it answers sooner "
            "(default: up if it decodes more slowly)"
        ),
    ] = None,
    mirrored: Annotated[
        bool,
        typer.Option("--mirrored", help="the target stands by: its cache is kept mapped already"),
    ] = False,
    speeds: Annotated[
        Path | None,
        typer.Option(help="measured speeds as JSON: read from here, or with --measure written"),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="measure the speeds of --source and --target now")
    ] = False,
    source: Annotated[str | None, typer.Option(help="source model, to measure")] = None,
    target: Annotated[str | None, typer.Option(help="target model, to measure")] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="longest wait for the first token, in seconds")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Map, read again, or stay: what each costs a conversation, and from which length on it pays.

    A map whose evidence does not speak for it is never chosen.
    """
    loaded, map_digest = read_map(kvmap)
    situation = Situation(num_tokens, reply_tokens, direction, mirrored)
    policy = RoutingPolicy(max_seconds=max_seconds)
    if measure:
        known = _measure(loaded, source, target, num_tokens, speeds)
    elif speeds is not None:
        known = Speeds.load(speeds)
    else:
        raise InputError("Give --speeds FILE, or --measure with --source and --target.")
    per_token = bytes_per_token(loaded.source)
    found = route(
        situation,
        known,
        loaded.evidence,
        map_digest,
        bytes_per_token=per_token,
        max_positions=loaded.target.max_positions,
        policy=policy,
    )
    costs = compute_by_choice(situation, known, found, per_token)
    console.print(_table(loaded, situation, found, costs))
    say(_break_even(found))
    say(f"{found.choice}: {found.reason}")
    write_json(
        json,
        {
            **asdict(found),
            "compute": {name: cost._asdict() for name, cost in costs.items()},
            "situation": asdict(situation),
            "speeds": known.to_json(),
        },
    )


def compute_by_choice(
    situation: Situation, speeds: Speeds, found: Route, per_token: int
) -> dict[Choice, Compute]:
    """Device-seconds of the whole request, the source's reading included. What is mirrored costs
    the same work; it is only done earlier.
    """
    count = situation.num_tokens
    mapped = max(count - speeds.repair_window, 0)
    read = float(speeds.source_prefill.seconds(count))
    said = {name: found.whole_reply[name] - found.first_token[name] for name in found.first_token}
    phases: dict[Choice, tuple[Phases, int]] = {
        "map": (
            Phases(
                source_prefill=read,
                transfer=float(speeds.transfer(mapped, per_token)),
                map=float(speeds.map.seconds(mapped)),
                repair=float(speeds.repair.seconds(count)),
                decode=said["map"],
            ),
            2,
        ),
        "reprefill": (
            Phases(
                source_prefill=read,
                target_prefill=found.first_token["reprefill"],
                decode=said["reprefill"],
            ),
            2,
        ),
        "stay": (Phases(source_prefill=read, decode=found.whole_reply["stay"]), 1),
    }
    return {name: compute_of(*each) for name, each in phases.items()}


def _break_even(found: Route) -> str:
    even, reply = found.break_even_tokens, found.break_even_reply
    lengths = "at no length" if even is None else f"from {even} tokens on"
    replies = "no reply ends" if reply is None else f"replies from {reply} tokens on end"
    return (
        f"Mapping is sooner than reading again {lengths}; {replies} sooner with the switch than "
        f"without."
    )


def _measure(
    kvmap: KvMap, source: str | None, target: str | None, tokens: int, out: Path | None
) -> Speeds:
    if source is None or target is None:
        raise InputError("--measure runs both models: give --source and --target.")
    if out is not None:
        require_writable(out)
    require_described(kvmap, *describe_pair(source, target))
    models = load_model(source), load_model(target)
    bridge = KvBridge(kvmap, source=models[0], target=models[1])
    first_tokens, repair_window = _repaired(kvmap)
    needed = first_tokens + repair_window
    lengths = [max(tokens, 2 * needed)]
    while lengths[0] // 2 > needed and len(lengths) < MEASURED_LENGTHS:
        lengths.insert(0, lengths[0] // 2)
    found = measure_speeds(
        bridge,
        models[0],
        lengths,
        first_tokens=first_tokens,
        repair_window=repair_window,
    )
    if out is not None:
        found.save(out)
        say(f"Wrote {out}")
    return found


def _repaired(kvmap: KvMap) -> tuple[int, int]:
    """S and N of the report, 1 and 32 where there is none or it does not say them."""
    config = (kvmap.evidence or {}).get("config")
    said = config if isinstance(config, Mapping) else {}
    first, last = (
        said[key] if type(said.get(key)) is int else default
        for key, default in (("S", 1), ("N", 32))
    )
    return max(first, 0), max(last, 1)


def _table(kvmap: KvMap, situation: Situation, found: Route, costs: dict[Choice, Compute]) -> Table:
    shown = Table(
        title=f"{kvmap.source.name} to {kvmap.target.name} ({found.direction}), "
        f"{situation.num_tokens} tokens, a reply of {situation.reply_tokens}",
        title_justify="left",
        box=None,
    )
    for heading in ("", "first token", "whole reply", "active", "reserved"):
        shown.add_column(heading, justify="right" if heading else "left")
    for name, cost in costs.items():
        figures = found.first_token[name], found.whole_reply[name], cost.active, cost.reserved
        cells = (f"{seconds:.3g} s" for seconds in figures)
        shown.add_row(name, *cells, style="bold" if name == found.choice else None)
    return shown
