"""`trtllm-kvmap refine`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.whole import require_writable
from trtllm_kvmap.calibrate.text import read_documents
from trtllm_kvmap.cli.app import counted, say, verb
from trtllm_kvmap.cli.flags import KvMapArgument, SourceOption, TargetOption, config_flags
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.models import describe_pair, load_model, require_described
from trtllm_kvmap.refine.config import RefineConfig
from trtllm_kvmap.refine.run import refine as run_refine


@verb
@config_flags(config=RefineConfig)
def refine(
    kvmap: KvMapArgument,
    source: SourceOption,
    target: TargetOption,
    text: Annotated[
        Path, typer.Option(help="what to train on: plain text, JSONL, or a folder of files")
    ],
    out: Annotated[Path, typer.Option(help="the .kvmap.safetensors file to write")],
    config: RefineConfig,
    max_tokens: Annotated[
        int, typer.Option(help="longer documents are read in windows of so many tokens")
    ] = 512,
) -> None:
    """Train a small network beside each matrix of a map, for what a matrix alone does not reach.

    The map that is written has no evidence: evaluate it again.
    """
    require_writable(out)
    if max_tokens < config.skip_first + 2:
        raise InputError(
            f"max_tokens must leave two tokens after skip_first = {config.skip_first}; got "
            f"{max_tokens}."
        )
    fitted = KvMap.load(kvmap, allow_unproven=True)
    described = describe_pair(source, target)
    documents = read_documents(
        text,
        described[1],
        min_tokens=config.skip_first + 2,
        max_tokens=max_tokens,
    )
    require_described(fitted, *described)
    loaded = load_model(source), load_model(target)
    with counted("refine", config.steps) as show:
        refined = run_refine(
            fitted,
            *loaded,
            documents,
            config,
            on_step=show,
        )
    refined.save(out)
    say(
        f"Wrote {out}: {config.term} of {config.width} channels, scale "
        f"{refined.fitted['refined']['scale']}, {refined.num_parameters:,} parameters. It carries "
        f"no evidence yet: run evaluate --attach."
    )
