"""What a recipe found: judged maps, tables, and one sentence; on the terminal and as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.whole import write_text
from trtllm_kvmap.errors import UnprovenError
from trtllm_kvmap.evaluate.report.page import html
from trtllm_kvmap.evaluate.report.report import Report, evidence, table, written

Row = dict[str, Any]  # text, numbers, or figures: {"value", "low", "high"}


@dataclass(frozen=True, slots=True)
class Judged:
    """A map and the report it earned."""

    kvmap: KvMap
    report: Report

    def summary(self) -> Row:
        """The two models alone, the map between them, and what of the gap it recovers."""
        config, arms = self.report.config, self.report.arms
        metric = config["metric"]
        named = {"native target": "target", "native source": "source", "mapped": config["arm"]}
        row = {name: arms[arm][metric] for name, arm in named.items()}
        return {"metric": metric, **row, "gap recovered": self.report.gap_recovered}


@dataclass(frozen=True, slots=True)
class Outcome:
    """``judged`` by name, the first one the recipe's own; ``tables`` by title, in order;
    ``left_out`` sentences about what could not be done; ``sentence`` the last line.
    """

    judged: dict[str, Judged]
    tables: dict[str, list[Row]]
    sentence: str
    left_out: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "summary": {name: each.summary() for name, each in self.judged.items()},
            "tables": self.tables,
            "left_out": self.left_out,
            "sentence": self.sentence,
        }

    def save(self, out: Path, head: Mapping[str, Any]) -> list[Path]:
        """recipe.json (``head`` first), and for each judged map its file, report.json and
        report.html.
        """
        files = []
        for name, each in self.judged.items():
            folder = out / name
            files += [folder / f"{name}.kvmap.safetensors"]
            try:
                proven = each.kvmap.with_evidence(evidence(each.report))
            except UnprovenError as reason:  # too few items to judge a control: the map is kept
                self.left_out.append(f"{name} carries no evidence. {reason}")
                proven = each.kvmap
            proven.save(files[-1])
            files += [folder / "report.json", folder / "report.html"]
            each.report.save(files[-2])
            write_text(files[-1], html(each.report))
        files.append(out / "recipe.json")
        content = {**head, **self.to_json()}
        write_text(files[-1], json.dumps(content, indent=2, allow_nan=False) + "\n")
        return files

    def show(self, console: Console) -> None:
        for each in self.judged.values():
            console.print(table(each.report))
            console.print()
        named = [{"map": name, **each.summary()} for name, each in self.judged.items()]
        for title, rows in {**self.tables, "summary": named}.items():
            console.print(_table(title, rows))
            console.print()
        for sentence in self.left_out:
            console.print(f"Left out: {sentence}", markup=False, highlight=False)


def _table(title: str, rows: list[Row]) -> Table:
    shown = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for number, heading in enumerate(rows[0] if rows else ()):
        shown.add_column(Text(heading.replace(" ", "\n")), justify="right" if number else "left")
    for row in rows:
        shown.add_row(*(Text(_cell(value)) for value in row.values()))
    return shown


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return written(value, interval=True)
    if isinstance(value, float):
        return f"{value:.3g}"
    return "-" if value is None else str(value)
