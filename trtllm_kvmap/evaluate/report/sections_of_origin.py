"""The sections on where the figures come from: what the map reads, candidates, settings."""

from __future__ import annotations

from functools import partial
from typing import Any

from trtllm_kvmap.evaluate.report import charts
from trtllm_kvmap.evaluate.report.command import command
from trtllm_kvmap.evaluate.report.report import Report, decimal, number, written
from trtllm_kvmap.evaluate.report.section import Chart, Grid, Section, bands
from trtllm_kvmap.spec.slices import FIELDS


def layers_read(report: Report) -> Section:
    title = "What one source layer explains"
    found = report.kvmap["fitted"].get("layer_r2")
    if not found:
        return Section(
            title,
            "No heat map of source layers by target layers: the map's file does not say how much "
            "one source layer explains of a target layer. `trtllm-kvmap fit` counts it from the "
            "moments; a map that was made otherwise has it only if it was added "
            "(fit.layer_r2.with_layer_r2).",
        )
    pictures: list[Chart] = []
    grids: list[Grid] = []
    for field in FIELDS:
        rows = found[field]
        caption = f"R2 of {field}s: target layers by the one source layer they are read from."
        draw = partial(charts.heat, field, rows, "source layer", "R2", caption)
        pictures.append(Chart(caption, draw))
        grids += bands(f"R2 of {field}s", "target layer", "source layer", rows)
    return Section(
        title,
        "R2 on the calibration text of a ridge from all heads of one source layer (from the same "
        "head alone where the text was counted with scope head). It shows where a map can read, "
        "not how well the target goes on: it predicts no gap recovered.",
        tuple(pictures),
        tuple(grids),
    )


FITTED = {
    "r2_key": "R2 of keys",
    "r2_value": "R2 of values",
    "attention_cosine": "attention cosine",
}
TRIED = {"gap_recovered": "gap recovered", "nll": "NLL", "accuracy": "accuracy"}


def the_map(report: Report) -> Section:
    kvmap, fitted = report.kvmap, report.kvmap["fitted"]
    candidates = fitted.get("candidates", [])
    text = f"Scope {kvmap['scope']}, {number(kvmap['parameters'])} parameters."
    if not candidates:
        return Section("The map", text)
    fits: list[tuple[str, ...]] = []
    trials: list[tuple[str, ...]] = []
    chosen = frozenset(at for at, row in enumerate(candidates) if row["chosen"])
    for at, row in enumerate(candidates):
        config = row["config"]
        ridge = "-" if config["scope"] == "copy" else number(config["ridge"])
        front = (str(at), config["scope"], _reads(config), ridge, str(config["fields"]))
        if row["refused"]:
            fits.append((*front, f"refused: {row['refused']}"))
            continue
        fits.append((*front, number(row["parameters"]), *(decimal(row.get(n)) for n in FITTED)))
        trials.append((str(at), *(_tried(row, name) for name in TRIED)))
    selection = fitted.get("selection")
    for name in ("source", "target") if selection else ():
        known = {"gap_recovered": None, **selection[name]}
        trials.append((f"the {name} alone", *(_tried(known, figure) for figure in TRIED)))
    marked = frozenset(i for i, row in enumerate(trials) if row[0] in map(str, chosen))
    names = ("candidate", "scope", "reads", "ridge", "fields", "parameters", *FITTED.values())
    return Section(
        "The map",
        f"{text} {_chosen_by(selection)} These figures chose the map and prove nothing about it: "
        f"the best of many looks better than it is.",
        grids=(
            Grid("Candidates", names, tuple(fits), chosen, frozenset({0, 1, 2, 3, 4})),
            Grid(
                "Candidates on the items that chose",
                ("candidate", *TRIED.values()),
                tuple(trials),
                marked,
            ),
        ),
    )


def _tried(row: dict[str, Any], name: str) -> str:
    """A figure with its interval; the value alone in a map that keeps none."""
    value, interval = row.get(name), row.get("intervals")
    if value is None or interval is None:
        return decimal(value)
    low, high = interval[name]
    return written({"value": value, "low": low, "high": high}, interval=True, digits=3)


def _chosen_by(selection: dict[str, Any] | None) -> str:
    """What chose among the candidates."""
    if selection is None:
        return "Chosen among these candidates on items that this report never saw."
    chosen_by = str(selection.get("chosen_by"))
    by = {"loss": "held-out loss", "cosine": "the cosine of attention outputs"}
    kept = "intervals" in selection["target"]
    return (
        f"Chosen among these candidates by {by.get(chosen_by, 'what the map does not say')} "
        f"on {number(selection['items'])} items that this report never saw, with "
        f"S = {number(selection['S'])} and N = {number(selection['N'])}. Gap recovered is in "
        f"{selection['metric']}; "
        f"{'[low high] is the 95 % interval over items' if kept else 'the map keeps no intervals'}."
    )


def _reads(config: dict[str, Any]) -> str:
    if config["scope"] == "slice":
        return "1 slice" if config["n"] == 1 else f"{config['n']} slices"
    count = 1 if config["scope"] == "copy" else config["k"]
    return "1 layer" if count == 1 else f"{count} layers"


def controls(report: Report) -> Section:
    rows = tuple((name.replace("_", " "), said) for name, said in report.controls.items())
    words = frozenset({0, 1})
    return Section(
        "Controls",
        "Checks without which no figure means anything; a run stops when one fails.",
        grids=(Grid("The controls", ("control", "result"), rows, texts=words),),
    )


def configuration(report: Report) -> Section:
    config, span = report.config, report.config["context_tokens"]
    said = config | {"context_tokens": f"{span['shortest']} to {span['longest']}"}
    said |= {"context_tokens asked": span["asked"]} if "asked" in span else {}
    said |= {f"version of {name}": each for name, each in said.pop("versions", {}).items()}
    again = command(report)
    settings = [("command", again)] if again else []
    settings += [(name, "-" if value in (None, "") else str(value)) for name, value in said.items()]
    digests = tuple(
        (model, part, digest)
        for model, parts in report.fingerprints.items()
        for part, digest in parts.items()
    )
    lack = (
        " No command can be given: no task read the items, or the report is of a version that did "
        "not keep which."
    )
    return Section(
        "Configuration and fingerprints",
        f"What it takes to run this again: what was asked, the settings, the digests of the items, "
        f"of the map (without the evidence and the guard that may be added to it) and of both "
        f"models, and the versions that computed the figures.{'' if again else lack}",
        grids=(
            Grid("Configuration", ("setting", "value"), tuple(settings), texts=frozenset({0, 1})),
            Grid("Fingerprints", ("model", "part", "SHA-256"), digests, texts=frozenset({0, 1, 2})),
        ),
    )
