"""`trtllm-kvmap recipe`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtllm_kvmap.calibrate.config import Weighting
from trtllm_kvmap.cli.app import console, progress, say, verb
from trtllm_kvmap.cli.flags import MODEL
from trtllm_kvmap.recipes.pair import OwnModels
from trtllm_kvmap.recipes.run import RECIPES, run_recipe
from trtllm_kvmap.recipes.strict import merged, read_yaml


@verb
def recipe(
    name: Annotated[str, typer.Argument(help=", ".join(RECIPES))],
    out: Annotated[
        Path | None, typer.Option(help="folder to write to (default: kvmap-recipes/NAME)")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML whose values take the place of the recipe's own")
    ] = None,
    source: Annotated[str | None, typer.Option(help=f"source model of your own: {MODEL}")] = None,
    target: Annotated[str | None, typer.Option(help=f"target model of your own: {MODEL}")] = None,
    text: Annotated[
        Path | None, typer.Option(help="text to fit on, for models of your own")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="task to choose and judge by (as in evaluate), for models of your own"),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="the task's file")] = None,
    weighting: Annotated[
        Weighting | None,
        typer.Option(help="how calibration weighs tokens, as in calibrate (recipes: uniform)"),
    ] = None,
) -> None:
    """Run the protocol of a published study, on the tiny family or on two models of your own.

    The tiny family is three models that come with this package. Models of your own need --source,
    --target, --text, --task and --data together. docs/recipes.md has the studies.
    """
    own = OwnModels(source, target, text, task, data)
    folder = out or Path("kvmap-recipes") / name
    with progress() as show:
        over = {} if config is None else read_yaml(config)
        if weighting is not None:
            over = merged(over, {"calibration": {"weighting": weighting}})
        outcome, files = run_recipe(name, folder, over=over, own=own, on_progress=show)
    outcome.show(console)
    for file in files:
        say(f"Wrote {file}")
    say(f"OK: {outcome.sentence}")
