"""`trtllm-kvmap report`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtllm_kvmap.artifact.whole import write_text
from trtllm_kvmap.cli.app import JsonOption, console, verb, write_json
from trtllm_kvmap.evaluate.page import html as page
from trtllm_kvmap.evaluate.report import Report, table


@verb
def report(
    report: Annotated[Path, typer.Argument(help="a report.json that evaluate wrote")],
    html: Annotated[Path | None, typer.Option(help="write the page here")] = None,
    json: JsonOption = None,
) -> None:
    """Show a report again: the table of arms, and the page if asked."""
    loaded = Report.load(report)
    console.print(table(loaded))
    write_json(json, loaded.to_json())
    if html is not None:
        write_text(html, page(loaded))
        console.print(f"Wrote {html}", highlight=False)
