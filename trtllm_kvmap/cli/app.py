"""The door: one typer application, and how a mistake of the user ends."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trtllm_kvmap.artifact.whole import write_text
from trtllm_kvmap.errors import KvMapError

Result = TypeVar("Result")

app = typer.Typer(
    name="trtllm-kvmap",
    help="Turn one model's KV cache into another's, so that a conversation changes models "
    "without being read again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
complaints = Console(stderr=True)

# Options that several verbs share.
SourceOption = Annotated[str, typer.Option(help="source model: a folder, or a hub id")]
TargetOption = Annotated[str, typer.Option(help="target model: a folder, or a hub id")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="write the result here as JSON")]
UnprovenOption = Annotated[
    bool, typer.Option("--allow-unproven", help="load a map that carries no evidence")
]


def verb(command: Callable[..., Result]) -> Callable[..., Result]:
    """Register a command; a KvMapError ends it with one sentence and exit status 2."""
    return register(app, command)


def register(group: typer.Typer, command: Callable[..., Result]) -> Callable[..., Result]:
    """verb() for a command of ``group``."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Result:
        try:
            return command(*args, **kwargs)
        except KvMapError as error:
            complaints.print(
                f"trtllm-kvmap: {error}", markup=False, highlight=False, soft_wrap=True
            )
            raise typer.Exit(2) from error

    run.__signature__ = inspect.signature(command, eval_str=True)  # type: ignore[attr-defined]
    group.command(command.__name__.removesuffix("_"))(run)
    return run


def write_json(path: Path | None, value: Any) -> None:
    """Write ``value`` to ``path``, whole or not at all; nothing when no path was given."""
    if path is None:
        return
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
    console.print(f"Wrote {path}", highlight=False)


def progress() -> Progress:
    """The one progress bar that long work shows."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=complaints,
    )
