"""The charts of a diagnosis, each an SVG from what its section says in its tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from trtllm_kvmap.evaluate.diagnosis.diagnosis import FigureJson, TokenError
from trtllm_kvmap.evaluate.report.charts import METRICS
from trtllm_kvmap.evaluate.report.drawing import (
    ACCENT,
    INK,
    MUTED,
    chart_style,
    label_of,
    new_figure,
    reach,
    svg_of,
)

LOOKS = ((ACCENT, "o", "-"), (INK, "s", "--"), (INK, "^", ":"))
REMOVED = "share of the divergence removed"


def removed_bars(regions: Mapping[str, FigureJson], alt: str) -> str:
    """One bar for each region that was replaced; lines at 0 (no change) and 1 (native target)."""
    with chart_style("regions"):
        figure, axes = new_figure(0.8 + 0.28 * len(regions))
        known = {name: entry for name, entry in regions.items() if entry["value"] is not None}
        errors = [reach(entry) for entry in known.values()]
        axes.barh(
            range(len(known)),
            [entry["value"] or 0.0 for entry in known.values()],
            color=ACCENT,
            xerr=[[low for low, _ in errors], [high for _, high in errors]],
            error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2},
        )
        axes.set_yticks(range(len(known)), [label_of(name) for name in known])
        for at in (0.0, 1.0):
            axes.axvline(at, color=INK, linewidth=0.8)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(REMOVED)
        return svg_of(figure, alt)


def removed_by_layer(
    lines: Mapping[str, Sequence[FigureJson]], chart: str, xlabel: str, alt: str
) -> str:
    """The share removed against a target layer, one line each, with intervals."""
    with chart_style(chart):
        figure, axes = new_figure(2.9)
        for index, (name, row) in enumerate(lines.items()):
            _line(axes, range(len(row)), row, name, index)
        for at in (0.0, 1.0):
            axes.axhline(at, color=MUTED, linewidth=0.8)
        axes.set_xlabel(xlabel)
        axes.set_ylabel("share removed")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside upper left", ncols=3, fontsize=9)
        return svg_of(figure, alt)


def token_bars(rows: Sequence[TokenError], alt: str) -> str:
    """Error of keys and of values, two bars for each position or kind of token."""
    with chart_style("tokens"):
        figure, axes = new_figure(1.1 + 0.34 * len(rows))
        for shift, name, colour in ((-0.2, "keys", ACCENT), (0.2, "values", MUTED)):
            axes.barh(
                [i + shift for i in range(len(rows))],
                [row.key if name == "keys" else row.value for row in rows],
                height=0.38,
                color=colour,
                label=name,
            )
        axes.set_yticks(range(len(rows)), [label_of(row.name) for row in rows])
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(left=0)
        axes.set_xlabel("1 - R2 (0: exact, 1: as far off as the mean)")
        figure.legend(loc="outside upper left", ncols=2, fontsize=9)
        return svg_of(figure, alt)


def by_length(
    tokens: Sequence[int], rows: Sequence[Sequence[FigureJson]], metric: str, alt: str
) -> str:
    """``metric`` of the map, the source alone and the native target (``rows`` [lengths][3]) against
    the context's length in ``tokens``.
    """
    with chart_style(f"lengths-{metric}"):
        figure, axes = new_figure(3.2)
        names = ("mapped", "source alone", "target")
        for index, (name, row) in enumerate(zip(names, zip(*rows, strict=True), strict=True)):
            _line(axes, tokens, row, name, index)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(tokens))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{round(at):,}"))
        axes.set_xlabel("context tokens")
        axes.set_ylabel(METRICS[metric])
        figure.legend(loc="outside upper left", ncols=3, fontsize=9)
        return svg_of(figure, alt)


def divergence_bars(arms: Mapping[str, FigureJson], alt: str) -> str:
    """KL from the native target of the map as it is (first) and of spoilt ones, on a log axis."""
    with chart_style("controls"):
        figure, axes = new_figure(0.9 + 0.34 * len(arms))
        values = [entry["value"] or 0.0 for entry in arms.values()]
        errors = [reach(entry) for entry in arms.values()]
        axes.barh(
            range(len(arms)),
            values,
            color=[ACCENT, *[MUTED] * (len(arms) - 1)],
            xerr=[[low for low, _ in errors], [high for _, high in errors]],
            error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2},
        )
        if min(values) > 0:
            axes.set_xscale("log")
            most = max(value + high for value, (_, high) in zip(values, errors, strict=True))
            axes.set_xlim(0.4 * min(values), 2 * most)  # a factor of 5 holds two labels
            axes.xaxis.set_major_locator(FixedLocator(log_ticks(*axes.get_xlim())))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:g}"))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set_yticks(range(len(arms)), [label_of(name) for name in arms])
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("KL from the native target, nats per token")
        return svg_of(figure, alt)


def log_ticks(low: float, high: float) -> list[float]:
    """Places of labels on a logarithmic axis, at most six: decades, or 1, 2 and 5 of each where
    there are few.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= 6:
            return ticks
    return ticks[:: -(-len(ticks) // 6)]


def _line(
    axes: Axes, places: Sequence[int], row: Sequence[FigureJson], name: str, index: int
) -> None:
    """One line of figures with their intervals; those that are not known are left out."""
    colour, marker, dashes = LOOKS[index]
    points = [
        (at, e["value"], *reach(e))
        for at, e in zip(places, row, strict=True)
        if e["value"] is not None
    ]
    axes.errorbar(
        [at for at, *_ in points],
        [value for _, value, *_ in points],
        yerr=[[low for *_, low, _ in points], [high for *_, high in points]],
        color=colour,
        marker=marker,
        linestyle=dashes,
        markersize=4,
        capsize=2,
        elinewidth=0.8,
        label=name,
    )
