"""The report as one html file that loads nothing: to read, to print, to attach."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from trtllm_kvmap.evaluate.report.cards import opening, summary
from trtllm_kvmap.evaluate.report.report import Report
from trtllm_kvmap.evaluate.report.section import COMMAND, Grid
from trtllm_kvmap.evaluate.report.sections import sections

TEMPLATE = "report.html.j2"
MARKED = {"pass": "passed", "passed": "passed", "fail": "failed"}


def html(report: Report) -> str:
    """The whole page as a string. Equal reports give equal pages; every text in it is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["cell"] = _cell_class
    environment.filters["breakable"] = _breakable
    environment.filters["commands"] = _with_commands
    return environment.get_template(TEMPLATE).render(
        config=report.config,
        opening=opening(report),
        summary=summary(report),
        sections=sections(report),
        svg=lambda chart: Markup(chart.draw()),  # our own SVG: charts escape what they are given
    )


def _with_commands(text: str) -> Markup:
    """``text``, escaped, its commands set as code."""
    return Markup(COMMAND.sub(r"<code>\1</code>", str(escape(text))))


def _breakable(text: str) -> Markup:
    """``text``, escaped, with places where a narrow screen may break it: before words that follow
    an underscore.
    """
    return Markup(re.sub(r"_(?=[a-z])", "_<wbr>", escape(text)))


def _cell_class(text: str, grid: Grid, row: tuple[str, ...], column: int) -> str:
    """The classes of one cell: words or a number, and the colour of a verdict."""
    spans = column == len(row) - 1 < len(grid.header) - 1
    words = "text" if spans or column in grid.texts else ""
    long = "long" if spans or len(text) > 24 else ""
    return " ".join(filter(None, (words, long, MARKED.get(text, ""))))
