"""The sections on what the map achieved: gates, arms, single contexts, layers."""

from __future__ import annotations

from trtllm_kvmap.evaluate import charts
from trtllm_kvmap.evaluate.report import COLUMNS, Report, columns_with_values, number, written
from trtllm_kvmap.evaluate.section import Grid, Section, drawn


def gates(report: Report) -> Section:
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


def arms(report: Report) -> Section:
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
        (drawn(caption, charts.bars_of_arms, report),),
        (Grid("Every arm", header, tuple(rows), frozenset(chosen)),),
    )


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
        f"{metric} of single contexts (thin lines, at most {charts.SLOPES}) and of all of them "
        f"(thick, with intervals), from the source alone over {arm} to the native target."
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
        ),
    )


def layers(report: Report) -> Section:
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
            drawn(
                "Cosine by target layer of attention outputs, keys and values.",
                charts.by_layer,
                lines,
            ),
        ),
        (Grid("By target layer", header, tuple(rows)),),
    )
