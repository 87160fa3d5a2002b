"""`trtllm-kvmap fit`"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.artifact.pair import require_pair
from trtllm_kvmap.artifact.whole import require_writable
from trtllm_kvmap.cli.app import counted, say, verb, write_json
from trtllm_kvmap.cli.flags import JsonOption, config_flags
from trtllm_kvmap.cli.inspect import describe
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.run import EvaluationConfig, require_scorable
from trtllm_kvmap.evaluate.select import ChooseBy, select
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.fit import FitConfig
from trtllm_kvmap.fit import fit as run_fit
from trtllm_kvmap.fit.estimate import estimate_fit
from trtllm_kvmap.fit.grid import FitGrid
from trtllm_kvmap.fit.layer_r2 import layer_r2_flops, with_layer_r2
from trtllm_kvmap.machine import matmul_rate, say_seconds, total_memory
from trtllm_kvmap.mapper.backends import require_backend
from trtllm_kvmap.models import describe_pair, load_model, require_described


@verb
@config_flags(grid=FitGrid, task_config=TaskConfig, config=EvaluationConfig)
def fit(
    moments: Annotated[list[Path], typer.Argument(help=".moments.safetensors files of one pair")],
    grid: FitGrid,
    task_config: TaskConfig,
    config: EvaluationConfig,
    out: Annotated[Path | None, typer.Option(help="the .kvmap.safetensors file to write")] = None,
    source: Annotated[
        str | None, typer.Option(help="source model: to choose among several candidates")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="target model: to choose among several candidates")
    ] = None,
    choose_by: Annotated[
        ChooseBy, typer.Option(help="the target's held-out loss, or cosine: of attention outputs")
    ] = "loss",
    estimate: Annotated[
        bool, typer.Option("--estimate", help="print memory, disk and time of each, and stop")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Solve moments for a map. Of several candidates the target's own held-out loss chooses one.

    Every combination of repeated options is a candidate. The items of --task choose among them, and
    evaluate refuses to report on those.
    """
    candidates = grid.candidates()
    if estimate:
        _print_estimates(moments, candidates)
        return
    if out is None:
        raise InputError("fit needs --out, the file to write; only --estimate writes none.")
    require_writable(out)
    if len(candidates) == 1:
        kvmap = run_fit((MomentSet.load(path) for path in moments), candidates[0])
        kvmap = with_layer_r2(kvmap, (MomentSet.load(path) for path in moments))
    else:
        kvmap = _choose(moments, candidates, source, target, task_config, config, choose_by)
    kvmap.save(out)
    say(f"Wrote {out}: {kvmap.scope}, {kvmap.num_parameters:,} parameters")
    write_json(json, describe(kvmap))


def _choose(
    moments: list[Path],
    candidates: list[FitConfig],
    source: str | None,
    target: str | None,
    task_config: TaskConfig,
    config: EvaluationConfig,
    choose_by: ChooseBy,
) -> KvMap:
    if source is None or target is None:
        raise InputError(
            f"{len(candidates)} candidates need both models to choose among them: give --source "
            f"and --target, or one value for each of --scope, --k, --n, --ridge, --rank and --cut."
        )
    if len(moments) > 1:
        raise InputError("Candidates are chosen from one moments file; give one, or one candidate.")
    require_backend(config.backend)
    described = describe_pair(source, target)
    items = read_items(task_config, described[1].tokenizer)
    require_scorable(items, config.metric)
    known = MomentSet.load(moments[0])
    require_described(known, *described, what="The moments were calibrated")
    loaded = load_model(source), load_model(target)
    prints = loaded[0].fingerprint, loaded[1].fingerprint
    require_pair(known, *prints, what="The moments were calibrated")
    with counted("choose", len(candidates)) as show:
        kvmap, rows = select(
            known,
            candidates,
            *loaded,
            items,
            config,
            on_candidate=show,
            choose_by=choose_by,
        )
    for row in rows:
        say(_line(row))
    return kvmap


def candidate_name(config: dict[str, Any]) -> str:
    """The options of ``config`` (asdict of a FitConfig) that its scope reads."""
    scope, ridge = config["scope"], f"ridge={config['ridge']:g}"
    if scope == "copy":
        return "copy"
    reads = f"n={config['n']}" if scope == "slice" else f"k={config['k']}"
    low = f" rank={config['rank']} cut={config['cut']}" if config["rank"] else ""
    return f"{scope} {reads} {ridge}{low}"


def _line(row: dict[str, Any]) -> str:
    name = candidate_name(row["config"])
    if row["refused"]:
        return f"  {name}: refused: {row['refused']}"
    mark = "->" if row["chosen"] else "  "
    figures = " ".join(
        f"{key} {row[key]:.4g}"
        for key in ("nll", "attention_cosine", "accuracy", "gap_recovered")
        if row[key] is not None
    )
    return f"{mark} {name}: {figures}"


def _print_estimates(moments: list[Path], candidates: list[FitConfig]) -> None:
    rate, available = matmul_rate(torch.float64), total_memory()
    specs = MomentSet.read_specs(moments[0])
    for candidate in candidates:
        found = estimate_fit(*specs, candidate, flops_per_second=rate, available=available)
        name = candidate_name(asdict(candidate))
        say(f"{name}: {' '.join(found.sentences())}")
    seconds = layer_r2_flops(*specs) / rate
    say(f"What each source layer explains, for the report: about {say_seconds(seconds)} more.")
