"""`trtllm-kvmap registry list | verify | find | add | sign | sizes`"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from trtllm_kvmap.artifact.entry import Entry, Unusable
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.registry import Registry
from trtllm_kvmap.cli.app import app, console, register, say, write_json
from trtllm_kvmap.cli.flags import JsonOption, KvMapArgument, SourceOption, TargetOption
from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.fit.config import FitConfig
from trtllm_kvmap.fit.sizes import router_sizes
from trtllm_kvmap.machine import say_bytes
from trtllm_kvmap.models import describe_pair, read_fingerprint, read_spec
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.rope import RopeParams

Result = TypeVar("Result")

group = typer.Typer(help="A folder (or fsspec URL) of maps over many pairs.", no_args_is_help=True)
app.add_typer(group, name="registry")

UrlArgument = Annotated[str, typer.Argument(help="a folder, or an fsspec URL")]
KeyOption = Annotated[
    Path | None, typer.Option(help="ed25519 public key (PEM) that maps must be signed with")
]
# (layers, KV heads, head_dim) as their configurations have them.
QWEN3 = {
    "Qwen3-32B": (64, 8, 128),
    "Qwen3-14B": (40, 8, 128),
    "Qwen3-8B": (36, 8, 128),
    "Qwen3-4B": (36, 8, 128),
    "Qwen3-1.7B": (28, 8, 128),
}
SCOPES = (FitConfig("pooled", k=8), FitConfig("head", k=8), FitConfig("slice", n=12))
BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}
PUBLISHED = {3: 39, 4: 79, 5: 131}  # GB, at its authors' average mapper size, for their models


def verb(command: Callable[..., Result]) -> Callable[..., Result]:
    return register(group, command)


@verb
def list_(url: UrlArgument, json: JsonOption = None) -> None:
    """Every map: its pair, scope, size, evidence; and the files that are none, with the reason."""
    found = list(Registry(url).scan())
    if not found:
        say(f"{url} holds no map; `trtllm-kvmap registry add` stores one.")
    _print([entry for entry in found if isinstance(entry, Entry)])
    unusable = [entry for entry in found if isinstance(entry, Unusable)]
    for each in unusable:
        say(f"unusable: {each.path}: {each.reason}")
    maps = [entry.to_json() for entry in found if isinstance(entry, Entry)]
    write_json(json, {"maps": maps, "unusable": [asdict(each) for each in unusable]})


@verb
def verify(url: UrlArgument, public_key: KeyOption = None, json: JsonOption = None) -> None:
    """Read every map as a whole: digest, numbers, fingerprints, evidence, signature.

    The signature is checked when a key is given. Exit status 1 when anything is wrong.
    """
    registry = Registry(url, public_key=_bytes(public_key))
    said = {}
    for entry in registry.scan():
        if isinstance(entry, Unusable):
            said[entry.path] = [entry.reason]
        else:
            said[entry.path] = registry.problems(entry)
        verdict = "; ".join(said[entry.path]) or "sound"
        say(f"{entry.path}: {verdict}")
    if not said:
        say(f"{url} holds no map.")
    write_json(json, said)
    if any(said.values()):
        raise typer.Exit(1)


@verb
def find(
    url: UrlArgument, source: SourceOption, target: TargetOption, json: JsonOption = None
) -> None:
    """The maps from one model to another, the best first.

    Their weights are compared, read from the files.
    """
    describe_pair(source, target)
    prints = [read_fingerprint(model) for model in (source, target)]
    found = Registry(url).find(*prints)
    if not found:
        raise MismatchError(
            f"{url} has no map from {source} to {target}; `trtllm-kvmap registry list {url}` shows "
            f"which pairs it has."
        )
    _print(found)
    write_json(json, [entry.to_json() for entry in found])


@verb
def add(
    url: UrlArgument,
    kvmap: KvMapArgument,
) -> None:
    """Store a map under a name made of its pair and digest, whole or not at all."""
    entry = Registry(url).add(KvMap.load(kvmap, allow_unproven=True))
    say(f"Stored {entry.path}")


@verb
def sign(
    url: UrlArgument,
    path: Annotated[str, typer.Argument(help="the name of a map, as registry list shows it")],
    private_key: Annotated[Path, typer.Option(help="ed25519 private key (PEM)")],
) -> None:
    """Write a detached signature beside a map, after reading the map as a whole."""
    registry = Registry(url)
    found = [entry for entry in registry.entries() if entry.path == path]
    if not found:
        raise InputError(f"{url} has no readable map {path!r}; `registry list` shows the names.")
    registry.sign(found[0], _bytes(private_key) or b"")
    say(f"Signed {path}")


@verb
def sizes(
    model: Annotated[
        list[str] | None, typer.Option(help="a model: a folder, or a hub id; repeatable")
    ] = None,
    json: JsonOption = None,
) -> None:
    """What a router among 2, 3, ... models keeps, by scope: computed from shapes alone.

    Without --model: the Qwen3 family, largest first.
    """
    specs = [read_spec(each) for each in model] if model else qwen3()
    table = Table(title=" ".join(spec.name for spec in specs), box=None, title_justify="left")
    for heading in ("models", "maps", "scope", "parameters", *BYTES, "published"):
        table.add_column(heading, justify="left" if heading == "scope" else "right")
    rows = []
    for config in SCOPES:
        name = f"{config.scope}, {'n' if config.scope == 'slice' else 'k'} = "
        name += str(config.n if config.scope == "slice" else config.k)
        for size in router_sizes(specs, config):
            stored = {dtype: size.parameters * width for dtype, width in BYTES.items()}
            published = PUBLISHED.get(size.models) if config.scope == "pooled" else None
            rows.append({**asdict(size), "scope": name, "bytes": stored, "published_gb": published})
            table.add_row(
                str(size.models),
                str(size.maps),
                name,
                f"{size.parameters / 1e9:.3g} B",
                *(say_bytes(count) for count in stored.values()),
                "" if published is None else f"{published} GB",
            )
    console.print(table)
    say(
        "Published: pooled ridge mappers of the average size of that publication's own models, "
        "which are not these."
    )
    write_json(json, rows)


def qwen3() -> list[ModelSpec]:
    """Shapes only: what the size of a map depends on."""
    return [
        ModelSpec(name, "qwen3", layers, heads, heads, dim, 0, 0, RopeParams(rotary_dim=dim))
        for name, (layers, heads, dim) in QWEN3.items()
    ]


def _print(entries: list[Entry]) -> None:
    """A map's name stands alone on its line, never folded, so that it can be copied."""
    for entry in entries:
        gap = "-" if entry.gap_recovered is None else f"{entry.gap_recovered:.2f}"
        said = (
            f"  {entry.source.name} to {entry.target.name}: {entry.scope}, "
            f"{say_bytes(entry.size)}, {f'gap recovered {gap}' if entry.proven else 'unproven'}, "
            f"{'signed' if entry.signed else 'not signed'}"
        )
        for line in (entry.path, said):
            say(line)


def _bytes(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}).") from error
