"""The report's charts as inline SVG: text stays text, and nothing is loaded from anywhere."""

from __future__ import annotations

import io
import re
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trtllm_kvmap.evaluate.report import Report

INK, MUTED, ACCENT = "#1c2733", "#a9b4c0", "#2f6f9f"
STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def bars_of_arms(report: Report) -> str:
    """One bar per arm with its interval, in the report's metric; the two models alone as lines."""
    metric = report.config["metric"]
    arms = {name: arm[metric] for name, arm in report.arms.items() if "refused" not in arm}
    arms = {name: entry for name, entry in arms.items() if entry["value"] is not None}
    with _style("arms"):
        figure = Figure(figsize=(7.2, 0.8 + 0.32 * len(arms)), layout="constrained")
        axes = figure.add_subplot()
        names, values = list(arms), [entry["value"] for entry in arms.values()]
        errors = [_reach(entry) for entry in arms.values()]
        colours = [ACCENT if name == report.config["arm"] else MUTED for name in names]
        axes.barh(
            names,
            values,
            color=colours,
            xerr=[[low for low, _ in errors], [high for _, high in errors]],
            error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2},
        )
        for name, style in (("target", "-"), ("source", "--")):
            if name in arms:
                axes.axvline(arms[name]["value"], color=INK, linewidth=0.8, linestyle=style)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(
            "accuracy" if metric == "accuracy" else "loss, nats per token (less is better)"
        )
        return _svg(figure, f"{metric} of every arm")


def cosine_by_layer(report: Report) -> str:
    """The attention-output cosine of the report's arm against the native target, by layer."""
    cosines = report.attention_cosine["per_layer"]
    with _style("cosines"):
        figure = Figure(figsize=(7.2, 2.6), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(range(len(cosines)), cosines, color=ACCENT, marker="o", markersize=4)
        axes.set_xlabel("target layer")
        axes.set_ylabel("cosine")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(min(0.0, *cosines), 1.02)
        return _svg(figure, "attention-output cosine by layer")


def _style(chart: str) -> AbstractContextManager[None]:
    """Equal reports give equal bytes, and no two charts share an id."""
    return matplotlib.rc_context({**STYLE, "svg.hashsalt": chart})


def _reach(entry: dict[str, Any]) -> tuple[float, float]:
    if entry["low"] is None or entry["high"] is None:
        return 0.0, 0.0
    return max(entry["value"] - entry["low"], 0.0), max(entry["high"] - entry["value"], 0.0)


def _svg(figure: Figure, title: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    svg = buffer.getvalue()
    box = re.search(r'viewBox="([^"]*)"', svg)
    body = svg[svg.index("<defs>") :]  # html needs neither XML prolog, namespaces nor metadata
    # Two charts on one page would share the ids that nothing in them refers to.
    body = re.sub(r' id="([^"]*)"', lambda found: found[0] if f"#{found[1]}" in body else "", body)
    size = box.group(1) if box else "0 0 500 300"
    return f'<svg viewBox="{size}" role="img" aria-label="{title}">{body}'
