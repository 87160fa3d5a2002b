"""The sections on what the map achieved: gates, arms, single contexts, layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trtllm_kvmap.evaluate.report import charts
from trtllm_kvmap.evaluate.report.report import (
    UNRESOLVED,
    Report,
    columns_with_values,
    decimal,
    gap_reason,
    is_unresolved,
    number,
    written,
)
from trtllm_kvmap.evaluate.report.section import Grid, Section, drawn


def gates(report: Report) -> Section:
    rows = [
        (
            gate["name"].replace("_", " "),
            gate["verdict"],
            written(gate["figure"], interval=True),
            f"{gate['side']} {number(gate['limit'])}",
            written(gate["source"], interval=True),
            "yes" if gate["clear"] else "no",
        )
        for gate in report.gates
    ]
    header = ("gate", "verdict", report.config["arm"], "declared", "source alone", "clear")
    asks = (
        gap_reason(report)
        or f"The gap recovered does: {written(report.gap_recovered, interval=True)} in "
        f"{report.config['metric']}."
    )
    return Section(
        "Gates",
        f"Declared before the run. A gate is clear when its whole interval says the same. Gates do "
        f"not ask whether the map beats the source alone. {asks}",
        grids=(Grid("The gates", header, tuple(rows), texts=frozenset({0, 1, 3, 5})),),
    )


METRICS = {"accuracy": "Accuracy", "nll": "Loss (nats per token, less is better)"}
ANSWERS = {
    "gap_recovered": "gap recovered",
    "accuracy": "accuracy",
    "retention": "retention",
    "retention_normalised": "above chance",
}
LIKENESS = {
    "nll": "NLL",
    "perplexity_ratio": "perplexity ratio",
    "top1_agreement": "top-1",
    "rollout_agreement": "rollout",
}
ARMS = {
    "target": "the target, which read the context itself",
    "source": "the source, which read the context itself",
    "mapped": "the source's cache through the map, but for the first S tokens",
    "mapped_repaired_N": "the same, with the last N tokens computed by the target on top",
    "copy": "the source's cache as it is, layer by layer: a map that learnt nothing",
    "repair_only": "what the target computes itself, with nothing mapped",
    "wrong_document": "the map, of another context: the text must matter",
    "wrong_document_repaired": "the same, with this context's last N tokens computed by the target",
    "no_context": "the first tokens alone",
    "reinjection": "the target's own cache taken out and put back: must change nothing",
}


def arms(report: Report) -> Section:
    config, metric = report.config, report.config["metric"]
    floor = "" if report.chance is None else f" Guessing has an accuracy of {report.chance:.3f}."
    caption = (
        f"{METRICS[metric]} of every arm with its 95 % interval, n = {config['num_items']} "
        f"contexts. Solid line: the native target; dashed: the source alone"
        f"{'; dotted: guessing' if charts.shows_chance(report) else ''}."
    )
    notes = [gap_reason(report), f"{UNRESOLVED}." if is_unresolved(report) else ""]
    return Section(
        "All arms",
        f"[low high] is the 95 % paired bootstrap interval over contexts. Gap recovered, in "
        f"{metric}: 0 is the source alone, 1 the native target. Above chance: retention without "
        f"what guessing retains.{floor} NLL is in nats per token; top-1 and rollout are the shares "
        f"of tokens on which the arm and the native target agree, one at a time and until they "
        f"first differ. {' '.join(filter(None, notes))}".rstrip(),
        (drawn(caption, charts.bars_of_arms, report),),
        (
            _arms_table(report, "Answers, by arm", ANSWERS, ("mapped tokens", _mapped)),
            _arms_table(
                report,
                "Likeness to the native target, by arm",
                LIKENESS,
                ("attention cosine", lambda arm: decimal(arm["attention_cosine"])),
            ),
            Grid(
                "What the arms are",
                ("arm", "what goes on"),
                tuple(dict.fromkeys(_said(name) for name in report.arms)),
                texts=frozenset({0, 1}),
            ),
        ),
    )


def _arms_table(
    report: Report,
    caption: str,
    figures: dict[str, str],
    last: tuple[str, Callable[[dict[str, Any]], str]],
) -> Grid:
    columns = columns_with_values(report, figures)
    rows: list[tuple[str, ...]] = []
    chosen: set[int] = set()
    for name, arm in report.arms.items():
        if name == report.config["arm"]:
            chosen.add(len(rows))
        if "refused" in arm:
            rows.append((name, f"refused: {arm['refused']}"))
            continue
        cells = (written(arm[key], interval=True) for key in columns)
        rows.append((name, *cells, last[1](arm)))
    return Grid(caption, ("arm", *columns.values(), last[0]), tuple(rows), frozenset(chosen))


def _mapped(arm: dict[str, Any]) -> str:
    return f"{100 * arm['mapped_share']:.0f} %"


def _said(name: str) -> tuple[str, str]:
    """An arm, or the family of arms it belongs to, and what goes on in it."""
    family = f"{name.rstrip('0123456789')}N"
    return (family, ARMS[family]) if family in ARMS else (name, ARMS.get(name, "-"))


def contexts(report: Report) -> Section:
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
        rows.append((f"the {other}", *(f"{count:,}" for count in counts)))
    caption = (
        f"{METRICS[metric]} of single contexts (thin lines; n = {len(values[arm])}, of which the "
        f"first {charts.SLOPES} at most are drawn) and of all of them (thick, with 95 % "
        f"intervals), from the source alone over {arm} to the native target"
        f"{'. Dotted: guessing' if charts.shows_chance(report) else ''}."
    )
    return Section(
        "Context by context",
        "The same text under the source, the judged arm and the target.",
        (drawn(caption, charts.slopes, report),),
        (
            Grid(
                f"Contexts on which {arm} is",
                ("compared with", "better", "equal", "worse"),
                tuple(rows),
            ),
            _single_contexts(report),
        ),
    )


def _single_contexts(report: Report) -> Grid:
    """What the thin lines of the chart are drawn from."""
    metric, arm = report.config["metric"], report.config["arm"]
    names = ("source", arm, "target")
    columns = [report.contexts["metric"][name] for name in names]
    tokens = report.contexts["tokens"]
    rows = [
        (str(number), f"{length:,}", *map(decimal, values))
        for number, (length, *values) in enumerate(zip(tokens, *columns, strict=True))
    ]
    left_out = len(rows) - charts.SLOPES
    rest = f", the first {charts.SLOPES}; report.json has {left_out:,} more" if left_out > 0 else ""
    return Grid(
        f"{METRICS[metric]} of single contexts{rest}",
        ("context", "tokens", "source alone", arm, "target"),
        tuple(rows[: charts.SLOPES]),
    )


def layers(report: Report) -> Section:
    cosine, error = report.attention_cosine, report.kv_error
    columns = [error["key"]["nrmse"], error["key"]["cosine"]]
    columns += [error["value"]["nrmse"], error["value"]["cosine"]]
    attention = cosine["per_layer"] or [None] * len(columns[0])
    rows = [
        (str(layer), *(decimal(value) for value in row))
        for layer, row in enumerate(zip(attention, *columns, strict=True))
    ]
    lines = {"attention outputs": attention, "keys": columns[1], "values": columns[3]}
    header = ("layer", "attention cosine", "key NRMSE", "key cosine", "value NRMSE", "value cosine")
    return Section(
        "By layer",
        f"{report.config['arm']} against the native target. Attention outputs: mean cosine "
        f"{decimal(cosine['mean'])}, worst layer {decimal(cosine['worst'])}. 1 - NRMSE squared is "
        f"the held-out R2 of the mapped tokens.",
        (
            drawn(
                f"Cosine between {report.config['arm']} and the native target, by target layer; "
                f"the axis starts where the worst layer needs it. Mean over "
                f"{report.config['num_items']} contexts.",
                charts.by_layer,
                lines,
            ),
        ),
        (Grid("By target layer", header, tuple(rows)),),
    )
