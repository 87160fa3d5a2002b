"""The report as one html file that loads nothing: to read, to print, to attach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from trtllm_kvmap.evaluate import charts
from trtllm_kvmap.evaluate.report import Report, shown_columns, written

TEMPLATE = "report.html.j2"


def html(report: Report) -> str:
    """The whole page as a string. Equal reports give equal pages."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["figure"] = lambda entry: written(entry, interval=True)
    environment.filters["number"] = _number
    return environment.get_template(TEMPLATE).render(
        report=report,
        columns=shown_columns(report),
        candidates=report.kvmap["fitted"].get("candidates", []),
        arms_chart=charts.bars_of_arms(report),
        cosine_chart=charts.cosine_by_layer(report) if report.attention_cosine["per_layer"] else "",
    )


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None else str(value)
