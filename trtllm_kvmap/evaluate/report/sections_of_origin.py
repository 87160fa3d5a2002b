"""The sections on what the map is and costs: what it reads, time, candidates, controls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from trtllm_kvmap.evaluate.latency import STAGES, break_even
from trtllm_kvmap.evaluate.report import charts
from trtllm_kvmap.evaluate.report.report import Report, decimal, fixed, number
from trtllm_kvmap.evaluate.report.section import Chart, Grid, Section, drawn
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
    pictures, grids = [], []
    for field in FIELDS:
        rows = found[field]
        caption = f"R2 of {field}s: target layers by the one source layer they are read from."
        draw = partial(charts.heat, field, rows, "source layer", "R2", caption)
        pictures.append(Chart(caption, draw))
        header = ("target layer", *(f"source {layer}" for layer in range(len(rows[0]))))
        cells = tuple(
            (str(layer), *("-" if v is None else fixed(v, 2) for v in row))
            for layer, row in enumerate(rows)
        )
        grids.append(Grid(f"R2 of {field}s", header, cells))
    return Section(
        title,
        "R2 on the calibration text of a ridge from all heads of one source layer (from the same "
        "head alone where the text was counted with scope head). It shows where a map can read, "
        "not how well the target goes on: it predicts no gap recovered.",
        tuple(pictures),
        tuple(grids),
    )


def time_by_step(report: Report) -> Section:
    latency = report.latency
    if not latency or not latency["lengths"]:
        return Section("Time", "Not measured; `trtllm-kvmap evaluate --latency` does.")
    seconds, lengths = latency["seconds"], latency["lengths"]
    names = (*STAGES, "target_prefill", "target_first_step")
    rows = tuple(
        (
            f"{length:,}",
            *(f"{1000 * seconds[name][i]:.1f}" for name in names),
            f"{latency['warm'][i]:.2f}",
            f"{latency['cold'][i]:.2f}",
        )
        for i, length in enumerate(lengths)
    )
    header = ("tokens", *(name.replace("_", " ") for name in names), "warm ratio", "cold ratio")
    said = " ".join(
        f"{name}: {_equal_from(break_even(lengths, latency[key]), lengths)}."
        for name, key in (
            ("When the source has read the prompt", "warm"),
            ("When it reads the prompt first", "cold"),
        )
    )
    return Section(
        "Time",
        f"Medians of {latency['rounds']} turns side by side in one run, "
        f"threads: {latency['threads']}. Figures of this machine under its load of that hour. "
        f"Transfer is one copy of the source's cache in memory. {said}",
        (
            drawn(
                "Steps of a hand-over from scratch, stacked, over the native target's prefill "
                "and first step, by prompt length.",
                charts.latency_stack,
                latency,
            ),
            drawn(
                "Break-even: the hand-over's time over the native target's, by prompt length; "
                "below 1 the hand-over is faster.",
                charts.break_even_curve,
                latency,
            ),
        ),
        (Grid("Milliseconds by prompt length", header, rows),),
    )


def _equal_from(tokens: float | None, lengths: Sequence[int]) -> str:
    if tokens is None:
        return f"no break-even up to {lengths[-1]:,} tokens"
    if tokens <= lengths[0]:
        return f"faster from {lengths[0]:,} tokens on, the shortest length measured"
    return f"break-even at about {tokens:,.0f} tokens"


CANDIDATE_FIGURES = {
    "r2_key": "R2 of keys",
    "r2_value": "R2 of values",
    "attention_cosine": "attention cosine",
    "nll": "NLL",
    "accuracy": "accuracy",
    "gap_recovered": "gap recovered",
}


def the_map(report: Report) -> Section:
    kvmap = report.kvmap
    candidates = kvmap["fitted"].get("candidates", [])
    text = f"Scope {kvmap['scope']}, {number(kvmap['parameters'])} parameters."
    if not candidates:
        return Section("The map", text)
    rows: list[tuple[str, ...]] = []
    chosen: set[int] = set()
    for row in candidates:
        config = row["config"]
        if row["chosen"]:
            chosen.add(len(rows))
        ridge = "-" if config["scope"] == "copy" else number(config["ridge"])
        front = (config["scope"], _reads(config), ridge, str(config["fields"]))
        if row["refused"]:
            rows.append((*front, f"refused: {row['refused']}"))
        else:
            figures = (decimal(row.get(name)) for name in CANDIDATE_FIGURES)
            rows.append((*front, number(row["parameters"]), *figures))
    header = ("scope", "reads", "ridge", "fields", "parameters", *CANDIDATE_FIGURES.values())
    return Section(
        "The map",
        f"{text} Chosen among these candidates on items that this report never saw.",
        grids=(
            Grid("Candidates", header, tuple(rows), frozenset(chosen), frozenset({0, 1, 2, 3})),
        ),
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
    span = report.config["context_tokens"]
    said = report.config | {"context_tokens": f"{span['shortest']} to {span['longest']}"}
    settings = tuple((name, str(value)) for name, value in said.items())
    digests = tuple(
        (model, part, digest)
        for model, parts in report.fingerprints.items()
        for part, digest in parts.items()
    )
    return Section(
        "Configuration and fingerprints",
        "What it takes to run this again: the settings, and the digests of both models.",
        grids=(
            Grid("Configuration", ("setting", "value"), settings, texts=frozenset({0, 1})),
            Grid("Fingerprints", ("model", "part", "SHA-256"), digests, texts=frozenset({0, 1, 2})),
        ),
    )
