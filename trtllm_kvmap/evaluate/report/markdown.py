"""The report as Markdown: the same sections as the page, with tables where it has charts."""

from __future__ import annotations

import re

from trtllm_kvmap.evaluate.report.cards import opening, summary
from trtllm_kvmap.evaluate.report.report import Report
from trtllm_kvmap.evaluate.report.section import COMMAND, Grid
from trtllm_kvmap.evaluate.report.sections import sections

# Brackets are marks only before these two, an underscore only at the edge of a word.
MARKS = re.compile(r"[\\`*<>#|~&!]|(?<=\])[(:]|(?<![^\W_])_|_(?![^\W_])")


def markdown(report: Report) -> str:
    """The whole document. No text of the report is read as markup: names may come from anywhere."""
    config = report.config
    lines = [f"# {_plain(config['source'])} to {_plain(config['target'])}", "", ""]
    lines[-1] = _plain(opening(report))
    cards = tuple((c.label, f"{c.value} {c.interval}", c.note) for c in summary(report))
    lines += ["", *_table(Grid("", ("figure", "value", ""), cards, texts=frozenset({0, 2})))]
    for section in sections(report):
        lines += ["", f"## {_plain(section.title)}", "", _paragraph(section.text)]
        for grid in section.grids:
            lines += ["", f"{_plain(grid.caption)}:", "", *_table(grid)]
    return "\n".join(lines) + "\n"


def _table(grid: Grid) -> list[str]:
    width = len(grid.header)
    rules = [":--" if column in grid.texts else "--:" for column in range(width)]
    lines = [_row(grid.header), "|" + "|".join(rules) + "|"]
    for number, row in enumerate(grid.rows):
        cells = [_plain(cell) for cell in row]
        if number in grid.chosen:
            cells = [f"**{cell}**" if cell else "" for cell in cells]
        lines.append("| " + " | ".join([*cells, *[""] * (width - len(cells))]) + " |")
    return lines


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _paragraph(text: str) -> str:
    """``text`` on one line: its commands as code, all else taken literally."""
    parts = COMMAND.split(" ".join(text.split()))
    return "".join(f"`{part}`" if i % 2 else _literal(part) for i, part in enumerate(parts))


def _plain(text: object) -> str:
    """``text`` on one line, every mark of Markdown or html taken literally."""
    return _literal(" ".join(str(text).split()))


def _literal(line: str) -> str:
    return MARKS.sub(r"\\\g<0>", line).replace("://", ":\\//")
