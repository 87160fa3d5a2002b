"""What a diagnosis found: where the divergence of a mapped cache lives, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from trtllm_kvmap.artifact.json_file import read_json
from trtllm_kvmap.errors import FormatError

FigureJson = dict[str, float | None]  # value, low and high, see bootstrap.Figure


@dataclass(frozen=True, slots=True)
class Intervention:
    """A mapped cache of which one region was replaced (or one thing spoilt, group ``control``).

    ``group`` says which regions are compared: ``field``, ``layer``, ``head``, ``position``,
    ``kind`` are replaced one at a time, ``layers_below`` and ``layers_above`` cumulatively.
    ``field`` (key or value), ``layer`` and ``head`` are None where all of them were replaced.
    ``divergence`` is KL(native || this), nats per token asked; ``removed`` the share of the mapped
    cache's divergence that is gone: 1 is the native target, negative is worse than mapped.
    """

    group: str
    name: str
    field: str | None
    layer: int | None
    head: int | None
    divergence: FigureJson
    removed: FigureJson


@dataclass(frozen=True, slots=True)
class TokenError:
    """The error of mapped keys and values at some tokens: squared, over the variance that all
    mapped tokens of the context have, mean over layers (1 - R2; 0 is exact). ``group`` is
    ``position`` or ``kind``; ``tokens`` were counted.
    """

    group: str
    name: str
    tokens: int
    key: float
    value: float


@dataclass(frozen=True, slots=True)
class LengthRow:
    """The map on contexts of at most ``tokens`` tokens; ``beyond_calibration``: the longest of them
    is longer than any document that the map was fitted on (None: it does not say). The losses are
    nats per token.
    """

    tokens: int
    beyond_calibration: bool | None
    nll: FigureJson
    source_nll: FigureJson
    target_nll: FigureJson
    gap_recovered: FigureJson
    divergence: FigureJson


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The content of a diagnosis file, key by key. ``config`` names models, map, S, N and items;
    ``divergence`` is the mapped cache's; ``kv_error`` as in a report (by layer: nrmse and cosine of
    keys and values); ``attention_cosine`` the attention outputs' cosine by layer; ``refused`` says
    why a control was not run.
    """

    config: dict[str, Any]
    divergence: FigureJson
    interventions: tuple[Intervention, ...]
    kv_error: dict[str, Any]
    attention_cosine: dict[str, Any]
    tokens: tuple[TokenError, ...]
    lengths: tuple[LengthRow, ...]
    refused: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return {
            name: list(held) if isinstance(held, tuple) else held
            for name, held in asdict(self).items()
        }

    @staticmethod
    def from_json(entry: Any, name: str = "This") -> Diagnosis:
        """The inverse of to_json, also after a round through JSON text. Raises FormatError, which
        begins with ``name``, for other entries than a diagnosis has.
        """
        rows = {"interventions": Intervention, "tokens": TokenError, "lengths": LengthRow}
        try:
            made = {name: tuple(row(**each) for each in entry[name]) for name, row in rows.items()}
            return Diagnosis(**{**entry, **made, "config": dict(**entry["config"])})
        except (LookupError, TypeError, AttributeError) as error:
            raise FormatError(
                f"{name} is not a diagnosis ({error!r}). Write it again with `trtllm-kvmap "
                f"diagnose`."
            ) from error

    @staticmethod
    def load(path: str | Path) -> Diagnosis:
        """Raises FormatError when there is no diagnosis at ``path``."""
        entry = read_json(path, "a diagnosis", "trtllm-kvmap diagnose --json")
        return Diagnosis.from_json(entry, str(path))


_TITLES = {
    "field": "keys or values",
    "layer": "one layer",
    "head": "one head",
    "position": "an eighth of the mapped span",
    "kind": "one kind of token",
    "layers_below": "layers from the bottom up",
    "layers_above": "layers from the top down",
    "control": "controls",
}


def headline(diagnosis: Diagnosis) -> str:
    """How far the mapped cache is from the native target's, in one line."""
    config = diagnosis.config
    return (
        f"{config['source']} to {config['target']}, {config['num_items']} contexts: KL of the "
        f"mapped cache {_cell(diagnosis.divergence)} nats per token asked"
    )


def tables(diagnosis: Diagnosis) -> list[Table]:
    """One table for each group of interventions, then error by layer, by token, and by length."""
    groups: dict[str, list[Intervention]] = {}
    for each in diagnosis.interventions:
        groups.setdefault(each.group, []).append(each)
    shown = [
        _table(
            _TITLES[group],
            ("replaced" if group != "control" else "spoilt", "KL, nats", "removed"),
            [(each.name, _cell(each.divergence), _cell(each.removed)) for each in rows],
        )
        for group, rows in groups.items()
    ]
    errors, cosines = diagnosis.kv_error, diagnosis.attention_cosine["per_layer"]
    shown.append(
        _table(
            "by layer",
            ("layer", "key NRMSE", "value NRMSE", "key cos", "value cos", "attention cos"),
            [
                (str(layer), *(_number(x) for x in row))
                for layer, row in enumerate(
                    zip(
                        errors["key"]["nrmse"],
                        errors["value"]["nrmse"],
                        errors["key"]["cosine"],
                        errors["value"]["cosine"],
                        cosines,
                        strict=True,
                    )
                )
            ],
        )
    )
    shown.append(
        _table(
            "by token: 1 - R2",
            ("tokens", "count", "key", "value"),
            [(t.name, str(t.tokens), f"{t.key:.3f}", f"{t.value:.3f}") for t in diagnosis.tokens],
        )
    )
    if diagnosis.lengths:
        shown.append(
            _table(
                "by length (*: longer than the calibration)",
                ("tokens", "NLL", "source", "target", "gap recovered", "KL, nats"),
                [
                    (
                        f"{row.tokens}{'*' if row.beyond_calibration else ''}",
                        _cell(row.nll),
                        _cell(row.source_nll),
                        _cell(row.target_nll),
                        _cell(row.gap_recovered),
                        _cell(row.divergence),
                    )
                    for row in diagnosis.lengths
                ],
            )
        )
    return shown


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _cell(figure: FigureJson) -> str:
    value, low, high = figure["value"], figure["low"], figure["high"]
    if value is None:
        return "-"
    return f"{value:.3f}" if low is None else f"{value:.3f} [{low:.3f} {high:.3f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
