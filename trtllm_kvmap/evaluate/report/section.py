"""What a section of a report is made of, before anything sets it: words, tables of text, charts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_kvmap.evaluate.report.report import fixed


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


COMMAND = re.compile(r"`(trtllm-kvmap [^`]*)`")  # set as code; all other text is literal
BAND = 20  # columns of a matrix that a printed sheet holds


def bands(
    caption: str, down: str, across: str, rows: Sequence[Sequence[float | None]]
) -> tuple[Grid, ...]:
    """A matrix of numbers as tables that are no wider than a sheet of paper."""
    count = max(map(len, rows), default=0)
    grids = []
    for first in range(0, count, BAND):
        columns = range(first, min(first + BAND, count))
        which = (
            f"{across}s {columns[0]} to {columns[-1]}" if len(columns) > 1 else f"{across} {first}"
        )
        header = (down, *map(str, columns))
        cells = tuple(
            (str(number), *("-" if v is None else fixed(v, 2) for v in row[first : first + BAND]))
            for number, row in enumerate(rows)
        )
        grids.append(Grid(f"{caption}, by {down} (down) and {which} (across)", header, cells))
    return tuple(grids)


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture of what a grid of the same section holds: ``alt`` says it in words, ``draw()`` is
    the SVG.
    """

    caption: str
    draw: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Section:
    """``text`` may hold commands between backticks, see COMMAND."""

    title: str
    text: str
    charts: tuple[Chart, ...] = ()
    grids: tuple[Grid, ...] = ()


def drawn(caption: str, draw: Callable[[Any, str], str], content: Any) -> Chart:
    """A chart whose caption is also read out in its place; the numbers stand in the grid."""
    return Chart(caption, lambda: draw(content, caption))
