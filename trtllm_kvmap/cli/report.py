"""`trtllm-kvmap report`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtllm_kvmap.artifact.whole import write_text
from trtllm_kvmap.cli.app import console, require_all_writable, say, verb, write_json
from trtllm_kvmap.cli.flags import JsonOption
from trtllm_kvmap.errors import FormatError
from trtllm_kvmap.evaluate.diagnosis.diagnosis import Diagnosis
from trtllm_kvmap.evaluate.report.markdown import markdown as document
from trtllm_kvmap.evaluate.report.page import html as page
from trtllm_kvmap.evaluate.report.report import Report, table

HtmlOption = Annotated[Path | None, typer.Option(help="write the report here as one HTML page")]
MarkdownOption = Annotated[Path | None, typer.Option(help="write the report here as Markdown")]


@verb
def report(
    report: Annotated[Path, typer.Argument(help="what evaluate --json wrote")],
    html: HtmlOption = None,
    markdown: MarkdownOption = None,
    json: JsonOption = None,
    diagnosis: Annotated[
        Path | None,
        typer.Option(help="what diagnose --json wrote of the same map, to be shown as well"),
    ] = None,
) -> None:
    """Show a report again: the table of arms, and the page or the Markdown if asked."""
    loaded = Report.load(report)
    if diagnosis is not None:
        loaded = loaded.with_diagnosis(Diagnosis.load(diagnosis))
    require_all_writable(html, markdown)
    try:
        shown = table(loaded)
        written = render_report(loaded, html, markdown)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        files = report if diagnosis is None else f"{report} or {diagnosis}"
        raise FormatError(
            f"{files} has the entries of a report but not their shapes ({error!r}). Write it "
            f"again with `trtllm-kvmap evaluate`."
        ) from error
    console.print(shown)
    write_json(json, loaded.to_json())
    write_report(written)


def render_report(report: Report, html: Path | None, markdown: Path | None) -> dict[Path, str]:
    """The page and the Markdown by path, each where one is given; nothing is written yet."""
    renderers = ((html, page), (markdown, document))
    return {path: render(report) for path, render in renderers if path is not None}


def write_report(written: dict[Path, str]) -> None:
    for path, text in written.items():
        write_text(path, text)
        say(f"Wrote {path}")
