"""The door: one typer application, and how a mistake of the user ends."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from typer.core import TyperGroup

from trtllm_kvmap.artifact.whole import require_writable, write_text
from trtllm_kvmap.cli.wording import flags_of, in_flags
from trtllm_kvmap.errors import FormatError, InputError, KvMapError

Result = TypeVar("Result")

WRITTEN = ("out", "json", "html", "markdown")  # the parameters that name a file to write


class Door(TyperGroup):
    """The group of every verb: what is said of a value that an option cannot take begins with no
    word of the library that judges it.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    name="trtllm-kvmap",
    cls=Door,
    help="Turn one model's KV cache into another's, so that a conversation changes models "
    "without being read again.\n\n"
    "The source is the model whose cache is read, the target the one whose cache is written, and "
    "a map what turns the one into the other: calibrate, fit and evaluate make and judge it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# What is printed holds paths and names from anywhere: no word of it is markup.
console = Console(markup=False, emoji=False, highlight=False)
complaints = Console(stderr=True, markup=False, emoji=False, highlight=False)


def say(sentence: str) -> None:
    """Print ``sentence`` as it is: one line, whatever the width."""
    console.print(sentence, soft_wrap=True)


def complain(sentence: str) -> None:
    """say() on standard error."""
    complaints.print(sentence, soft_wrap=True)


def verb(command: Callable[..., Result]) -> Callable[..., Result]:
    """Register a command. Whether its --json can be written, and is no file that is read, is asked
    before it does anything; a KvMapError ends it with one sentence, in the words of its flags, and
    exit status 2.
    """
    return register(app, command)


def register(group: typer.Typer, command: Callable[..., Result]) -> Callable[..., Result]:
    """verb() for a command of ``group``."""
    flags = flags_of(command)

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Result:
        try:
            require_apart(kwargs, flags)
            require_all_writable(kwargs.get("json"))
            return command(*args, **kwargs)
        except KvMapError as error:
            # What is wrong with a file is told in the names of its own entries.
            said = str(error) if isinstance(error, FormatError) else in_flags(str(error), flags)
            complain(f"trtllm-kvmap: {said}")
            raise typer.Exit(2) from error
        except KeyboardInterrupt as interrupt:
            complain(
                "trtllm-kvmap: interrupted. What was written is whole; every other file is as it "
                "was."
            )
            raise typer.Exit(130) from interrupt

    run.__signature__ = inspect.signature(command, eval_str=True)  # type: ignore[attr-defined]
    group.command(command.__name__.removesuffix("_"), help=flowing(command.__doc__ or ""))(run)
    return run


def flowing(text: str) -> str:
    """``text`` with one line a paragraph, which then breaks where the terminal ends."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def require_apart(given: Mapping[str, Any], flags: Mapping[str, str]) -> None:
    """Raise InputError where a verb would write over a file that it reads, or twice to one: what
    took hours would be lost.
    """
    taken: dict[Path, str] = {}
    for name in filter(given.get, WRITTEN):
        path = Path(given[name]).resolve()
        if path in taken:
            raise InputError(
                f"{taken[path]} and {flags[name]} would both write {given[name]}; give each a path "
                f"of its own."
            )
        taken[path] = flags[name]
    for name, value in given.items():
        every = value if isinstance(value, list) else [value]
        paths = [each for each in every if isinstance(each, Path) or (each and name == "data")]
        for each in paths if name not in WRITTEN else ():
            if flag := taken.get(Path(each).resolve()):
                how = "into" if Path(each).is_dir() else "over"
                raise InputError(
                    f"{flag} would write {how} {each}, which is read; give another path."
                )


def require_all_writable(*paths: Path | None) -> None:
    """require_writable for each path that was given, before any long work begins."""
    for path in filter(None, paths):
        require_writable(path)


def write_json(path: Path | None, value: Any) -> None:
    """Write ``value`` to ``path``, whole or not at all; nothing when no path was given."""
    if path is None:
        return
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
    say(f"Wrote {path}")


@contextmanager
def progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """The bars that long work shows: ``show(name, done, total)`` moves the bar of that name, which
    is there from its first call on; without one nothing is printed.
    """
    name = TextColumn("{task.description}", markup=False)
    columns = name, BarColumn(), MofNCompleteColumn()
    bars = Progress(*columns, TimeRemainingColumn(), console=complaints)
    shown: dict[str, TaskID] = {}

    def show(name: str, done: int, total: int | None = None) -> None:
        bars.start()
        if name not in shown:
            shown[name] = bars.add_task(name, total=total)
        bars.update(shown[name], completed=done, total=total)

    try:
        yield show
    finally:
        if shown:
            bars.stop()


@contextmanager
def counted(name: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """progress() of one bar: ``show(done, total)``, or ``show(done)`` where no total is known."""
    with progress() as show:
        show(name, 0, total)
        yield partial(show, name)
