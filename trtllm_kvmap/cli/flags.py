"""The options of the verbs, each defined once: those that several verbs share, and one per field of
a frozen dataclass, so that a config and its flags cannot drift apart.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

Result = TypeVar("Result")

KvMapArgument = Annotated[Path, typer.Argument(help="a .kvmap.safetensors file")]
MODEL = "a folder, or a hub id (org/name)"
SOURCE, TARGET = f"source model, which reads: {MODEL}", f"target model, which answers: {MODEL}"
SourceOption = Annotated[str, typer.Option(help=SOURCE)]
TargetOption = Annotated[str, typer.Option(help=TARGET)]
JsonOption = Annotated[Path | None, typer.Option("--json", help="write the result here as JSON")]
UnprovenOption = Annotated[
    bool,
    typer.Option(
        "--allow-unproven", help="load a map that no evidence proves (evaluate --attach gives it)"
    ),
]


def config_flags(**configs: type) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Replace each named parameter of a command by the fields of its dataclass.

    ``@config_flags(config=FitConfig) def fit(..., config): ...`` becomes a command with an option
    for every field of FitConfig (help from the field's metadata "help"); the command receives the
    built instance. A field that is a tuple becomes an option that may be given several times.
    """

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        signature = inspect.signature(command, eval_str=True)
        parameters = [p for p in signature.parameters.values() if p.name not in configs]
        for config_type in configs.values():
            parameters += _options(config_type)

        def run(**given: Any) -> Result:
            built = {
                name: config_type(
                    **{
                        f.name: _to_field(given.pop(f.name))
                        for f in dataclasses.fields(config_type)
                    }
                )
                for name, config_type in configs.items()
            }
            return command(**given, **built)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        ordered = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        run.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in ordered}
        return run

    return decorate


def _options(config_type: type) -> list[inspect.Parameter]:
    hints = get_type_hints(config_type)
    options = []
    for field in dataclasses.fields(config_type):
        kind, default = hints[field.name], field.default
        if get_origin(kind) is tuple:
            kind, default = list[get_args(kind)[0]], list(default)  # type: ignore[misc,arg-type]
        option = typer.Option(help=field.metadata.get("help"))
        options.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[kind, option],
            )
        )
    return options


def _to_field(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
