"""`trtllm-kvmap demo`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from trtllm_kvmap.cli.app import console, progress, say, verb, write_json
from trtllm_kvmap.cli.flags import JsonOption
from trtllm_kvmap.demo import PairDemo, run_demo
from trtllm_kvmap.evaluate.report.report import table


@verb
def demo(
    out: Annotated[Path, typer.Option(help="folder to write to")] = Path("kvmap-demo"),
    json: JsonOption = None,
) -> None:
    """The whole way on tiny models that come along: calibrate, fit, hand over, evaluate."""
    with progress() as show:
        pairs = run_demo(out, show)
    for pair in pairs:
        console.print()
        console.print(examples(pair))
        console.print()
        console.print(table(pair.report))
    console.print()
    for pair in pairs:
        for file in pair.files:
            say(f"Wrote {file}")
    write_json(json, {pair.report.config["target"]: pair.report.to_json() for pair in pairs})


def examples(pair: PairDemo) -> Table:
    """What the source, the target and the mapped target answered to the same questions."""
    names = pair.report.config
    shown = Table(title=f"{names['source']} reads, {names['target']} answers", title_justify="left")
    for heading in ("question", "right", names["source"], names["target"], "mapped"):
        shown.add_column(heading)
    for told in pair.told:
        answers = (told.source, told.target, told.mapped)
        marked = (Text(a, style="" if a == told.right else "dim") for a in answers)
        shown.add_row(told.question, told.right, *marked)
    return shown
