"""The report's charts, each an SVG from what a section says in its tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from trtllm_kvmap.evaluate.latency import NATIVE, STAGES, turn_ratios
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
from trtllm_kvmap.evaluate.report.report import Report, fixed, scored_arms

STAGE_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")
METRICS = {"accuracy": "accuracy (share right)", "nll": "loss, nats per token (less is better)"}
LEAST, BELOW = -1.0, "#c9c9c9"  # of the colours of heat, and what lies below them
SLOPES = 200  # lines of single contexts; more would be one grey area


def bars_of_arms(report: Report, alt: str) -> str:
    """One bar per arm with its interval, in the report's metric; the two models alone as lines."""
    metric = report.config["metric"]
    arms = {
        name: arm[metric]
        for name, arm in scored_arms(report).items()
        if arm[metric]["value"] is not None
    }
    with chart_style("arms"):
        figure, axes = new_figure(0.8 + 0.3 * len(arms))
        errors = [reach(entry) for entry in arms.values()]
        axes.barh(
            range(len(arms)),
            [entry["value"] for entry in arms.values()],
            color=[ACCENT if name == report.config["arm"] else MUTED for name in arms],
            xerr=[[low for low, _ in errors], [high for _, high in errors]],
            error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2},
        )
        axes.set_yticks(range(len(arms)), [label_of(name) for name in arms])
        for name, style in (("target", "-"), ("source", "--")):
            if name in arms:
                axes.axvline(arms[name]["value"], color=INK, linewidth=0.8, linestyle=style)
        _chance(report, axes.axvline)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(METRICS[metric])
        return svg_of(figure, alt)


def slopes(report: Report, alt: str) -> str:
    """A line for every context from the source alone over the judged arm to the native target; the
    figures over all contexts, with their intervals, on top.
    """
    metric, arm = report.config["metric"], report.config["arm"]
    names = ["source", arm, "target"]
    rows = list(zip(*(report.contexts["metric"][name] for name in names), strict=True))
    with chart_style("slopes"):
        figure, axes = new_figure(3.2)
        for row in [row for row in rows[:SLOPES] if None not in row]:
            axes.plot(range(3), row, color=MUTED, linewidth=0.6, alpha=0.5)
        whole = [report.arms[name][metric] for name in names]
        errors = [reach(entry) for entry in whole]
        axes.errorbar(
            range(3),
            [entry["value"] for entry in whole],
            yerr=[[low for low, _ in errors], [high for _, high in errors]],
            color=ACCENT,
            linewidth=2,
            marker="o",
            capsize=3,
        )
        _chance(report, axes.axhline)
        axes.set_xticks(range(3), ["source alone", label_of(arm), "target"])
        axes.set_ylabel(METRICS[metric])
        axes.set_xlim(-0.35, 2.35)
        return svg_of(figure, alt)


def by_layer(lines: dict[str, Sequence[float | None]], alt: str) -> str:
    """Cosines by target layer, one line each; they differ in marker and dashes, not in colour."""
    with chart_style("layers"):
        figure, axes = new_figure(2.8)
        looks = ((ACCENT, "o", "-"), (INK, "s", "--"), (INK, "^", ":"))
        lowest = 1.0
        for (name, values), (colour, marker, dashes) in zip(lines.items(), looks, strict=False):
            points = [(i, v) for i, v in enumerate(values) if v is not None]
            lowest = min([lowest, *(v for _, v in points)])
            axes.plot(
                [i for i, _ in points],
                [v for _, v in points],
                color=colour,
                marker=marker,
                linestyle=dashes,
                markersize=4,
                label=name,
            )
        axes.set_xlabel("target layer")
        axes.set_ylabel("cosine")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        room = max(1.0 - lowest, 1e-3)
        axes.set_ylim(lowest - 0.1 * room, 1.0 + 0.1 * room)
        figure.legend(loc="outside upper left", ncols=3, fontsize=9)
        return svg_of(figure, alt)


def heat(
    chart: str, rows: Sequence[Sequence[float | None]], across: str, measure: str, alt: str
) -> str:
    """``measure`` of target layers (up) by what lies ``across``, colours from 0 to 1, or from below
    0 (LEAST at most) where a number is; numbers in the cells of small tables.
    """
    known = [v for row in rows for v in row if v is not None]
    lowest = min(known, default=0.0)
    floor = max(LEAST, math.floor(10 * min(lowest, 0.0)) / 10)
    with chart_style(f"heat-{chart}"):
        height = min(4.6, 1.2 + 0.32 * len(rows))
        figure, axes = new_figure(height)
        numbers = [[float("nan") if v is None else v for v in row] for row in rows]
        steps = round(10 * (1.0 - floor))
        colours = matplotlib.colormaps["viridis"].resampled(steps).with_extremes(under=BELOW)
        mesh = axes.pcolormesh(numbers, cmap=colours)
        mesh.set_clim(floor, 1.0)
        if len(rows) * len(rows[0]) <= 64:
            for y, row in enumerate(rows):
                for x, value in enumerate(row):
                    share = ((value or 0.0) - floor) / (1.0 - floor)
                    colour = "#111111" if share > 0.6 or share < 0.0 else "#ffffff"
                    said = "-" if value is None else fixed(value, 2)
                    axes.text(
                        x + 0.5, y + 0.5, said, ha="center", va="center", color=colour, fontsize=8
                    )
        for axis, count in ((axes.xaxis, len(rows[0])), (axes.yaxis, len(rows))):
            step = -(-count // 16)
            axis.set_major_locator(FixedLocator([i + 0.5 for i in range(0, count, step)]))
            axis.set_major_formatter(FuncFormatter(lambda at, _: str(int(at))))
        axes.set_xlabel(across)
        axes.set_ylabel("target layer")
        extend = "min" if lowest < floor else "neither"
        figure.colorbar(mesh, ax=axes, label=measure, extend=extend)
        return svg_of(figure, alt)


def latency_stack(latency: dict[str, Any], alt: str) -> str:
    """The steps of a hand-over from scratch, stacked, over the native target's time, by length."""
    lengths, seconds = latency["lengths"], latency["seconds"]
    native = [a + b for a, b in zip(*(seconds[name] for name in NATIVE), strict=True)]
    with chart_style("stack"):
        figure, axes = new_figure(1.3 + 0.34 * len(lengths))
        start = [0.0] * len(lengths)
        for stage, colour in zip(STAGES, STAGE_COLOURS, strict=True):
            shares = [s / n for s, n in zip(seconds[stage], native, strict=True)]
            label = stage.replace("_", " ")
            axes.barh(range(len(lengths)), shares, left=start, color=colour, label=label)
            start = [a + b for a, b in zip(start, shares, strict=True)]
        axes.axvline(1.0, color=INK, linewidth=1)
        axes.set_yticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_ylabel("prompt tokens")
        axes.set_xlabel("time, native target = 1")
        axes.tick_params(axis="y", length=0)
        figure.legend(loc="outside upper left", ncols=3, fontsize=9)
        return svg_of(figure, alt)


def break_even_curve(latency: dict[str, Any], alt: str) -> str:
    """The hand-over's time over the native target's, against the prompt's length: medians, and
    from the least to the most of all turns where the report keeps them.
    """
    lengths = latency["lengths"]
    with chart_style("break-even"):
        figure, axes = new_figure(2.8)
        for name, key, colour, style in (
            ("source has read the prompt", "warm", ACCENT, "-"),
            ("source reads it first", "cold", INK, "--"),
        ):
            middle = np.array(latency[key])
            turns = turn_ratios(latency["turns"], key) if "turns" in latency else middle[:, None]
            reached = np.array([middle - np.min(turns, axis=1), np.max(turns, axis=1) - middle])
            axes.errorbar(
                lengths,
                middle,
                yerr=reached,
                color=colour,
                linestyle=style,
                marker="o",
                capsize=3,
                elinewidth=0.8,
                label=name,
            )
        axes.axhline(1.0, color=INK, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{round(at):,}"))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("prompt tokens")
        axes.set_ylabel("time, native target = 1")
        figure.legend(loc="outside upper left", ncols=2, fontsize=9)
        return svg_of(figure, alt)


def shows_chance(report: Report) -> bool:
    """Whether the charts of arms and of contexts have a line where guessing is."""
    return report.config["metric"] == "accuracy" and report.chance is not None


def _chance(report: Report, line: Any) -> None:
    if shows_chance(report):
        line(report.chance, color=INK, linewidth=0.8, linestyle=":")
