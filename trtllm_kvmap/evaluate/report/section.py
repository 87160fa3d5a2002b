"""What a section of a report is made of, before anything sets it: words, tables of text, charts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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


def drawn(caption: str, draw: Callable[[Any, str], str], content: Any) -> Chart:
    """A chart whose caption is also read out in its place; the numbers stand in the grid."""
    return Chart(caption, lambda: draw(content, caption))
