"""What every chart of the report is drawn with: inline SVG whose text stays text and whose colours
are the page's.
"""

from __future__ import annotations

import html
import io
import re
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# What the page replaces by its own variables, so that charts are read on light and dark alike.
INK, MUTED, ACCENT = "#1c2733", "#8a97a4", "#2f6f9f"
VARIABLES = {INK: "var(--ink)", MUTED: "var(--faint)", ACCENT: "var(--accent)"}
WIDTH = 5.0  # inches: as wide as a phone, so that text keeps its size there
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
    "legend.frameon": False,
}


def new_figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def chart_style(chart: str) -> AbstractContextManager[None]:
    """Equal reports give equal bytes, and no two charts share an id."""
    return matplotlib.rc_context({**STYLE, "svg.hashsalt": chart})


def label_of(text: str) -> str:
    """A label that matplotlib does not read as mathematics, and that leaves the axes some room."""
    return (text if len(text) <= 28 else f"{text[:27]}…").replace("$", r"\$")


def reach(entry: dict[str, Any]) -> tuple[float, float]:
    if entry["low"] is None or entry["high"] is None:
        return 0.0, 0.0
    return max(entry["value"] - entry["low"], 0.0), max(entry["high"] - entry["value"], 0.0)


def svg_of(figure: Figure, alt: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    svg = buffer.getvalue()
    box = re.search(r'viewBox="([^"]*)"', svg)
    body = svg[svg.index("<defs>") :]  # html needs neither XML prolog, namespaces nor metadata
    # Two charts on one page would share the ids that nothing in them refers to.
    body = re.sub(r' id="([^"]*)"', lambda found: found[0] if f"#{found[1]}" in body else "", body)
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, variable)
    size = box.group(1) if box else "0 0 360 216"
    return f'<svg viewBox="{size}" role="img" aria-label="{html.escape(alt)}">{body}'
