"""`trtllm-kvmap promote`"""

from __future__ import annotations

from dataclasses import asdict
from functools import reduce
from operator import add
from pathlib import Path
from typing import Annotated

import typer

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.artifact.whole import require_writable
from trtllm_kvmap.calibrate.text import read_documents
from trtllm_kvmap.cli.app import say, verb, write_json
from trtllm_kvmap.cli.flags import JsonOption, KvMapArgument, SourceOption, TargetOption
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.promote import FigureJson, Trial, refit
from trtllm_kvmap.evaluate.promote import promote as run_trial
from trtllm_kvmap.evaluate.run import EvaluationConfig
from trtllm_kvmap.models import describe_pair, load_model, require_described


@verb
def promote(
    kvmap: KvMapArgument,
    source: SourceOption,
    target: TargetOption,
    text: Annotated[
        Path,
        typer.Option(help="prompts that neither map has seen: text, JSONL, or a folder of files"),
    ],
    out: Annotated[
        Path, typer.Option(help="the .kvmap.safetensors file to write, if the new map wins")
    ],
    new: Annotated[Path | None, typer.Option(help="the map that is to take its place")] = None,
    moments: Annotated[
        list[Path] | None,
        typer.Option(help="or moments to fit that map from, as this one was fitted; repeatable"),
    ] = None,
    first_tokens: Annotated[
        int, typer.Option(min=0, help="S: first tokens that the target computes itself")
    ] = 1,
    repair_window: Annotated[
        int, typer.Option(min=0, help="N: last tokens that the target computes itself")
    ] = 32,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="longer prompts are cut to so many tokens")
    ] = 1024,
    json: JsonOption = None,
) -> None:
    """Try a new map against the one that serves, and write it, with its evidence, if it is better.

    Half of the prompts try it, by the loss of their last tokens; the other half give its evidence.
    Exit status 1, and no map written, when the gain is not above zero with its whole interval.
    """
    if (new is None) == (not moments):
        raise InputError(
            "promote needs one new map: either --new, a map, or --moments, what to fit one from."
        )
    require_writable(out)
    described = describe_pair(source, target)
    longest = min(max_tokens, *(model.spec.max_positions for model in described))
    # One window of each: two of one text would stand in both halves.
    prompts = read_documents(text, described[1], min_tokens=2, max_tokens=longest, max_windows=1)
    served = KvMap.load(kvmap, allow_unproven=True)
    if new is None:
        candidate = refit(served, reduce(add, map(MomentSet.load, moments or ())))
    else:
        candidate = KvMap.load(new, allow_unproven=True)
    require_described(served, *described)
    models = load_model(source), load_model(target)
    config = EvaluationConfig("nll", first_tokens=first_tokens, repair_window=repair_window)
    winner, trial = run_trial(served, candidate, *models, prompts, config)
    say(told(trial))
    if trial.promoted:
        winner.save(out)
        say(f"Wrote {out}")
        if served.guard is not None and winner.guard is None:
            say(f"{kvmap} carries a guard and this map none: set one with `trtllm-kvmap guard`.")
    write_json(json, asdict(trial))
    if not trial.promoted:
        raise typer.Exit(1)


def told(trial: Trial) -> str:
    """What the trial found, in one line."""
    losses = ", ".join(f"{name} {_said(nll)}" for name, nll in trial.nll.items())
    gaps = ", ".join(f"{name} {_said(gap)}" for name, gap in trial.gap_recovered.items())
    return (
        f"{'Promoted' if trial.promoted else 'Not promoted'}: on {trial.prompts} prompts the new "
        f"map gains {_said(trial.gain)} nats a token ({losses}; gap recovered: {gaps})"
    )


def _said(figure: FigureJson) -> str:
    if figure["value"] is None:
        return "-"
    low, high = figure["low"], figure["high"]
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{figure['value']:.3f}{interval}"
