"""What a report says, section by section, as text: the page and the Markdown are two ways to set
it, so that neither can say less than the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_kvmap.evaluate import charts
from trtllm_kvmap.evaluate.latency import STAGES, break_even
from trtllm_kvmap.evaluate.report import COLUMNS, Report, columns_with_values, number, written
from trtllm_kvmap.spec.slices import FIELDS


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of text. A row shorter than the header ends in a cell that spans the rest; columns in
    ``texts`` hold words, all others numbers; rows in ``chosen`` are those of the judged arm.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    chosen: frozenset[int] = frozenset()
    texts: frozenset[int] = frozenset({0})


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture of what a grid of the same section holds: ``alt`` says it in words, ``draw()`` is
    the SVG.
    """

    caption: str
    draw: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    text: str
    charts: tuple[Chart, ...] = ()
    grids: tuple[Grid, ...] = ()


def sections(report: Report) -> list[Section]:
    """All sections that this report has something for, in the order they are read."""
    return [
        _gates(report),
        _arms(report),
        _contexts(report),
        _layers(report),
        *_heat(report),
        *_latency(report),
        _map(report),
        _controls(report),
        _configuration(report),
    ]


def _gates(report: Report) -> Section:
    rows = [
        (
            gate["name"].replace("_", " "),
            f"{gate['side']} {number(gate['limit'])}",
            written(gate["figure"], interval=True),
            written(gate["source"], interval=True),
            gate["verdict"],
            "yes" if gate["clear"] else "no",
        )
        for gate in report.gates
    ]
    header = ("gate", "declared", report.config["arm"], "source alone", "verdict", "clear")
    return Section(
        "Gates",
        "Declared before the run. A gate is clear when its whole interval says the same. Gates do "
        "not ask whether the map beats the source alone: the gap recovered does, "
        f"{written(report.gap_recovered, interval=True)} in {report.config['metric']}.",
        grids=(Grid("The gates", header, tuple(rows), texts=frozenset({0, 1, 4, 5})),),
    )


ARM_COLUMNS = {
    **COLUMNS,
    "retention": "retention",
    "perplexity_ratio": "perplexity ratio",
    "rollout_agreement": "rollout",
}


def _arms(report: Report) -> Section:
    columns = columns_with_values(report, ARM_COLUMNS)
    rows: list[tuple[str, ...]] = []
    chosen: set[int] = set()
    for name, arm in report.arms.items():
        if name == report.config["arm"]:
            chosen.add(len(rows))
        if "refused" in arm:
            rows.append((name, f"refused: {arm['refused']}"))
            continue
        cells = (written(arm[key], interval=True) for key in columns)
        share = f"{100 * arm['mapped_share']:.0f} %"
        rows.append((name, *cells, number(arm["attention_cosine"]), share))
    header = ("arm", *columns.values(), "attention cosine", "mapped tokens")
    said = "" if report.chance is None else f" Guessing has an accuracy of {number(report.chance)}."
    metric = report.config["metric"]
    caption = (
        f"{metric} of every arm with its 95 % interval. Solid line: the native target; dashed: the "
        f"source alone{'' if report.chance is None else '; dotted: guessing'}."
    )
    return Section(
        "All arms",
        "[low high] is the 95 % paired bootstrap interval over contexts. Gap recovered: 0 is the "
        "source alone, 1 the native target. Above chance: retention without what guessing "
        f"retains.{said}",
        (_chart(caption, charts.bars_of_arms, report),),
        (Grid("Every arm", header, tuple(rows), frozenset(chosen)),),
    )


def _contexts(report: Report) -> Section:
    metric, arm = report.config["metric"], report.config["arm"]
    sign = 1 if metric == "accuracy" else -1
    values = report.contexts["metric"]
    rows = []
    for other in ("source", "target"):
        pairs = zip(values[arm], values[other], strict=True)
        gains = [sign * (a - b) for a, b in pairs if None not in (a, b)]
        counts = (
            sum(gain > 0 for gain in gains),
            sum(gain == 0 for gain in gains),
            sum(gain < 0 for gain in gains),
        )
        rows.append((f"against the {other}", *(f"{count:,}" for count in counts)))
    caption = (
        f"{metric} of single contexts (thin lines, at most {charts.SLOPES}) and of all of them "
        f"(thick, with intervals), from the source alone over {arm} to the native target."
    )
    return Section(
        "Context by context",
        "The same text under the source, the judged arm and the target.",
        (_chart(caption, charts.slopes, report),),
        (Grid(f"Contexts on which {arm} is", ("", "better", "equal", "worse"), tuple(rows)),),
    )


def _layers(report: Report) -> Section:
    cosine, error = report.attention_cosine, report.kv_error
    columns = [error["key"]["nrmse"], error["key"]["cosine"]]
    columns += [error["value"]["nrmse"], error["value"]["cosine"]]
    attention = cosine["per_layer"] or [None] * len(columns[0])
    rows = [
        (str(layer), *(number(value) for value in row))
        for layer, row in enumerate(zip(attention, *columns, strict=True))
    ]
    lines = {"attention outputs": attention, "keys": columns[1], "values": columns[3]}
    header = ("layer", "attention cosine", "key NRMSE", "key cosine", "value NRMSE", "value cosine")
    return Section(
        "By layer",
        f"{report.config['arm']} against the native target. Attention outputs: mean cosine "
        f"{number(cosine['mean'])}, worst layer {number(cosine['worst'])}. 1 - NRMSE squared is "
        f"the held-out R2 of the mapped tokens.",
        (
            _chart(
                "Cosine by target layer of attention outputs, keys and values.",
                charts.by_layer,
                lines,
            ),
        ),
        (Grid("By target layer", header, tuple(rows)),),
    )


def _heat(report: Report) -> list[Section]:
    found = report.kvmap["fitted"].get("layer_r2")
    if not found:
        return []
    pictures, grids = [], []
    for field in FIELDS:
        rows = found[field]
        caption = f"R2 of {field}s: target layers by the one source layer they are read from."
        pictures.append(
            Chart(caption, lambda f=field, r=rows, c=caption: charts.heat(f, r, c))  # type: ignore[misc]
        )
        header = ("target layer", *(f"source {layer}" for layer in range(len(rows[0]))))
        cells = tuple(
            (str(layer), *("-" if v is None else f"{v:.2f}" for v in row))
            for layer, row in enumerate(rows)
        )
        grids.append(Grid(f"R2 of {field}s", header, cells))
    return [
        Section(
            "What one source layer explains",
            "R2 on the calibration text of a ridge from all heads of one source layer. It shows "
            "where a map can read, not how well the target goes on: it predicts no gap recovered.",
            tuple(pictures),
            tuple(grids),
        )
    ]


def _latency(report: Report) -> list[Section]:
    latency = report.latency
    if not latency or not latency["lengths"]:
        return []
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
    return [
        Section(
            "Time",
            f"Medians of {latency['rounds']} turns side by side in one run, "
            f"{latency['threads']} threads: figures of this machine under its load of that hour. "
            f"Transfer is one copy of the source's cache in memory. {said}",
            (
                _chart(
                    "Steps of a hand-over from scratch, stacked, over the native target's prefill "
                    "and first step, by prompt length.",
                    charts.latency_stack,
                    latency,
                ),
                _chart(
                    "Break-even: the hand-over's time over the native target's, by prompt length; "
                    "below 1 the hand-over is faster.",
                    charts.break_even_curve,
                    latency,
                ),
            ),
            (Grid("Milliseconds by prompt length", header, rows),),
        )
    ]


def _equal_from(tokens: float | None, lengths: Sequence[int]) -> str:
    if tokens is None:
        return f"no break-even up to {lengths[-1]:,} tokens"
    if tokens <= lengths[0]:
        return f"faster from {lengths[0]:,} tokens on, the shortest length measured"
    return f"break-even at about {tokens:,.0f} tokens"


CANDIDATE_FIGURES = {
    "parameters": "parameters",
    "r2_key": "R2 of keys",
    "r2_value": "R2 of values",
    "attention_cosine": "attention cosine",
    "nll": "NLL",
    "accuracy": "accuracy",
    "gap_recovered": "gap recovered",
}


def _map(report: Report) -> Section:
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
            rows.append((*front, *(number(row.get(name)) for name in CANDIDATE_FIGURES)))
    header = ("scope", "reads", "ridge", "fields", *CANDIDATE_FIGURES.values())
    return Section(
        "The map",
        f"{text} Chosen among these candidates on items that this report never saw.",
        grids=(
            Grid("Candidates", header, tuple(rows), frozenset(chosen), frozenset({0, 1, 2, 3})),
        ),
    )


def _reads(config: dict[str, Any]) -> str:
    if config["scope"] == "slice":
        return f"{config['n']} slices"
    return "1 layer" if config["scope"] == "copy" else f"{config['k']} layers"


def _controls(report: Report) -> Section:
    rows = tuple((name.replace("_", " "), said) for name, said in report.controls.items())
    words = frozenset({0, 1})
    return Section(
        "Controls",
        "Checks without which no figure means anything; a run stops when one fails.",
        grids=(Grid("The controls", ("control", "result"), rows, texts=words),),
    )


def _configuration(report: Report) -> Section:
    settings = tuple((name, str(value)) for name, value in report.config.items())
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


def _chart(caption: str, draw: Callable[[Any, str], str], content: Any) -> Chart:
    """A chart whose caption is also read out in its place; the numbers stand in the grid."""
    return Chart(caption, lambda: draw(content, caption))
