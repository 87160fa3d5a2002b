"""A diagnosis as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from trtllm_kvmap.evaluate.diagnosis.diagnosis import Diagnosis, FigureJson, Intervention
from trtllm_kvmap.evaluate.diagnosis.lengths import length_tables

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
    shown += [_table(t.title, t.header, t.rows) for t in length_tables(diagnosis, _cell)]
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
    if low is None or high is None:
        return f"{value:.3f} [unresolved]"
    return f"{value:.3f} [{low:.3f} {high:.3f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
