"""`trtllm-kvmap doctor`"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from trtllm_kvmap import doctor as examination
from trtllm_kvmap.cli.app import console, verb, write_json
from trtllm_kvmap.cli.flags import JsonOption
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.models import describe_model


@verb
def doctor(
    source: Annotated[str | None, typer.Option(help="source model, to ask about a pair")] = None,
    target: Annotated[str | None, typer.Option(help="target model, to ask about a pair")] = None,
    json: JsonOption = None,
) -> None:
    """Say what can run here and, given two models, whether they can be mapped and how."""
    if (source is None) != (target is None):
        raise InputError("A pair needs both --source and --target; one of them is missing.")
    sections = {"machine": examination.examine_machine()}
    if source is not None and target is not None:
        pair = describe_model(source), describe_model(target)
        sections["pair"] = examination.examine_pair(*pair)
    for title, findings in sections.items():
        table = Table(title=title, show_header=False, title_justify="left")
        for finding in findings:
            table.add_row("yes" if finding.usable else "no", finding.name, finding.detail)
        console.print(table)
    write_json(json, {name: examination.to_json(found) for name, found in sections.items()})
