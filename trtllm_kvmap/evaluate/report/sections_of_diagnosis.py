"""The sections on where a map goes wrong: regions, layers and heads, tokens, lengths, controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from trtllm_kvmap.evaluate.diagnosis.diagnosis import (
    UNKNOWN,
    Diagnosis,
    FigureJson,
    Intervention,
)
from trtllm_kvmap.evaluate.diagnosis.lengths import length_tables
from trtllm_kvmap.evaluate.report import charts, charts_of_diagnosis
from trtllm_kvmap.evaluate.report.cards import drawn_from
from trtllm_kvmap.evaluate.report.report import Report, decimal, written
from trtllm_kvmap.evaluate.report.section import Chart, Grid, Section, bands, drawn
from trtllm_kvmap.spec.slices import FIELDS

SPOILT = {
    "permuted_heads": "source heads permuted",
    "shifted_positions": "keys 16 positions off",
    "shifted_values": "values one token off",
}
Rows = dict[str, dict[str, Intervention]]  # by group, then by name, in order


def diagnosis(report: Report) -> list[Section]:
    """One section that says so when the report holds no diagnosis."""
    if report.diagnosis is None:
        return [
            Section(
                "Diagnosis",
                "Not in this report: `trtllm-kvmap diagnose --json F` says where the error does "
                "harm, and `trtllm-kvmap report --diagnosis F` shows it here.",
            )
        ]
    found = Diagnosis.from_json(report.diagnosis)
    rows: Rows = {}
    for each in found.interventions:
        rows.setdefault(each.group, {})[each.name] = each
    lengths = [_lengths(found)] if found.lengths else []
    return [_regions(found, rows), _layers(found, rows), _tokens(found), *lengths]


def _regions(found: Diagnosis, rows: Rows) -> Section:
    config, names = found.config, {"field": "all {}", "position": "part {}", "kind": "{}"}
    shown = {
        names[group].format(name): each
        for group in names
        for name, each in rows.get(group, {}).items()
    }
    cells = tuple(
        (name, _kl(each.divergence), _share(each.removed)) for name, each in shown.items()
    )
    spoilt = {"the map as it is": found.divergence} | {
        SPOILT.get(name, name): each.divergence for name, each in rows.get("control", {}).items()
    }
    refused = [(SPOILT.get(name, name), f"not run: {said}") for name, said in found.refused.items()]
    controls = [(name, _kl(entry)) for name, entry in spoilt.items()] + refused
    n = f"n = {config['num_items']} contexts"
    removed = {name: each.removed for name, each in shown.items()}
    return Section(
        "Diagnosis: where the error does harm",
        f"Over {config['num_items']} contexts{_named(found)}, S = {config['S']}, "
        f"N = {config['N']}, the mapped cache diverges from the native target by "
        f"{_kl(found.divergence)} (KL, nats per token asked). One region of it at a time is "
        f"replaced by the target's own keys and values, and the target goes on from there. Removed "
        f"is the share of the divergence that is then gone: 1 is the native target, 0 no change, "
        f"below 0 worse than mapped. A map that is plainly wrong (controls) shows what the same "
        f"measure makes of it.",
        (
            drawn(
                f"Divergence removed by keys or values, by eighths of the mapped span (part 1/8 is "
                f"nearest the beginning) and by kind of token, with 95 % intervals, {n}.",
                charts_of_diagnosis.removed_bars,
                removed,
            ),
            drawn(
                f"Divergence of the map and of maps spoilt on purpose, with 95 % intervals, {n}.",
                charts_of_diagnosis.divergence_bars,
                spoilt,
            ),
        ),
        (
            Grid("Replaced by the target's own", ("replaced", "KL, nats", "removed"), cells),
            Grid("Controls", ("map", "KL, nats"), tuple(controls)),
        ),
    )


def _layers(found: Diagnosis, rows: Rows) -> Section:
    layers = range(len(found.kv_error["key"]["nrmse"]))
    last = len(layers) - 1
    single = {
        "both": [f"layer {layer}" for layer in layers],
        **{f"{field}s": [f"{field}s of layer {layer}" for layer in layers] for field in FIELDS},
    }
    below = [f"layers 0-{layer}" for layer in layers]
    above = [f"layers {layer}-{last}" for layer in layers]
    alone = {name: _removed(rows, "layer", wanted) for name, wanted in single.items()}
    together = {
        "layers 0 to this": _removed(rows, "layers_below", below),
        "this to the last": _removed(rows, "layers_above", above),
    }
    columns = [*alone.values(), *together.values()]
    cells = [
        (
            str(layer),
            *(_share(column[layer]) for column in columns),
            *(decimal(found.kv_error[field]["nrmse"][layer]) for field in FIELDS),
        )
        for layer in layers
    ]
    header = ("layer", *alone, *together, "key NRMSE", "value NRMSE")
    n = f"n = {found.config['num_items']} contexts"
    pictures = [
        _by_layer(
            f"Divergence removed by one layer alone, with 95 % intervals, {n}.", "layer", alone
        ),
        _by_layer(
            f"Divergence removed by a run of layers, with 95 % intervals, {n}.", "layers", together
        ),
    ]
    grids = [Grid("Divergence removed by layer, and its error", header, tuple(cells))]
    heads = _by_head(rows, len(layers))
    if heads:
        caption = f"Divergence removed by one head, keys and values together, {n}."
        pictures.append(
            Chart(caption, lambda: charts.heat("removed", heads, "KV head", "removed", caption))
        )
        grids += bands("Divergence removed by head", "target layer", "KV head", heads)
    return Section(
        "Diagnosis: layers and heads",
        "Where replacing removes little although the error (NRMSE) is large, the target makes "
        "little of that layer.",
        tuple(pictures),
        tuple(grids),
    )


def _tokens(found: Diagnosis) -> Section:
    rows = tuple(
        (row.name, f"{row.tokens:,}", decimal(row.key), decimal(row.value)) for row in found.tokens
    )
    return Section(
        "Diagnosis: error by token",
        "Squared error of mapped keys and values over the variance that the context's mapped "
        "tokens have (1 - R2), mean over layers, by position in the context and by kind of token.",
        (
            drawn(
                "Error of mapped keys and values by position and by kind of token.",
                charts_of_diagnosis.token_bars,
                found.tokens,
            ),
        ),
        (Grid("1 - R2 by token", ("tokens", "count", "keys", "values"), rows),),
    )


def _lengths(found: Diagnosis) -> Section:
    metric = found.config.get("metric")
    of_gap = (
        f"The gap recovered is in {metric}, and stands beside the figures that it is taken from."
        if metric
        else "This diagnosis does not name the metric of its gap recovered; it need not be the "
        "loss beside it."
    )
    tokens = [row.tokens for row in found.lengths]
    tables = length_tables(found, _kl)
    pictures = []
    for each in tables:
        caption = (
            f"{each.title}, with 95 % intervals, n = {found.config['num_items']} contexts of each "
            f"length: mapped, the source alone, the native target."
        )
        pictures.append(
            Chart(
                caption,
                partial(charts_of_diagnosis.by_length, tokens, each.figures, each.measure, caption),
            )
        )
    return Section(
        "Diagnosis: other lengths",
        f"The map on contexts of other lengths, also longer than any it was fitted on, with 95 % "
        f"intervals over contexts. {of_gap} KL is of the mapped cache from the native target.",
        tuple(pictures),
        tuple(Grid(t.title, t.header, t.rows) for t in tables),
    )


def _by_layer(caption: str, name: str, lines: Mapping[str, Sequence[FigureJson]]) -> Chart:
    draw = charts_of_diagnosis.removed_by_layer
    return Chart(caption, lambda: draw(lines, f"removed-{name}", "target layer", caption))


def _removed(rows: Rows, group: str, names: Sequence[str]) -> list[FigureJson]:
    found = rows.get(group, {})
    return [found[name].removed if name in found else UNKNOWN for name in names]


def _by_head(rows: Rows, layers: int) -> list[list[float | None]]:
    """[layers][heads]; empty for a target of one head."""
    heads = rows.get("head", {}).values()
    count = max((each.head + 1 for each in heads if each.head is not None), default=0)
    cells: list[list[float | None]] = [[None] * count for _ in range(layers)]
    for each in heads:
        if each.layer is not None and each.head is not None:
            cells[each.layer][each.head] = each.removed["value"]
    return cells if count else []


def _named(found: Diagnosis) -> str:
    config = found.config
    task = config.get("task")
    return "" if task is None else f" of the task {task} ({drawn_from(config)})"


def _kl(entry: FigureJson) -> str:
    return written(entry, interval=True, digits=3)


def _share(entry: FigureJson) -> str:
    return written(entry, interval=True)
