"""`trtllm-kvmap report`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtllm_kvmap.artifact.whole import write_text
from trtllm_kvmap.cli.app import console, require_all_writable, verb, write_json
from trtllm_kvmap.cli.flags import JsonOption
from trtllm_kvmap.errors import FormatError
from trtllm_kvmap.evaluate.markdown import markdown as document
from trtllm_kvmap.evaluate.page import html as page
from trtllm_kvmap.evaluate.report import Report, table

HtmlOption = Annotated[Path | None, typer.Option(help="write the report here as one page")]
MarkdownOption = Annotated[Path | None, typer.Option(help="write the report here as Markdown")]


@verb
def report(
    report: Annotated[Path, typer.Argument(help="a report.json that evaluate wrote")],
    html: HtmlOption = None,
    markdown: MarkdownOption = None,
    json: JsonOption = None,
) -> None:
    """Show a report again: the table of arms, and the page or the Markdown if asked."""
    loaded = Report.load(report)
    require_all_writable(html, markdown, json)
    try:
        shown = table(loaded)
        document(loaded)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{report} has the entries of a report but not their shapes ({error!r}). Write it "
            f"again with `trtllm-kvmap evaluate`."
        ) from error
    console.print(shown)
    write_json(json, loaded.to_json())
    write_report(loaded, html, markdown)


def write_report(report: Report, html: Path | None, markdown: Path | None) -> None:
    """The page and the Markdown, each where a path is given."""
    for path, render in ((html, page), (markdown, document)):
        if path is not None:
            write_text(path, render(report))
            console.print(f"Wrote {path}", highlight=False)
