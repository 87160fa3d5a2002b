"""`trtllm-kvmap triton`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtllm_kvmap.cli.app import say, verb
from trtllm_kvmap.cli.flags import SourceOption, TargetOption, UnprovenOption, config_flags
from trtllm_kvmap.decode.routing.speeds import Speeds
from trtllm_kvmap.serve.repository import LANES, write_repository
from trtllm_kvmap.serve.settings import ServeConfig


@verb
@config_flags(config=ServeConfig)
def triton(
    out: Annotated[Path, typer.Option(help="the model repository to write, a new folder")],
    kvmap: Annotated[Path, typer.Option(help="a .kvmap.safetensors file")],
    source: SourceOption,
    target: TargetOption,
    config: ServeConfig,
    lane: Annotated[str, typer.Option(help=f"who runs the models: {', '.join(LANES)}")] = "hf",
    allow_unproven: UnprovenOption = False,
    speeds: Annotated[
        Path | None,
        typer.Option(help="route each request by these speeds (plan --measure writes them)"),
    ] = None,
) -> None:
    """Write a Triton model repository: one model reads, the other answers from mapped KV."""
    files = write_repository(
        out,
        kvmap,
        source,
        target,
        config,
        lane=lane,
        allow_unproven=allow_unproven,
        speeds=None if speeds is None else Speeds.load(speeds),
    )
    say(f"Wrote {out}: {len(files)} files, lane {lane}")
