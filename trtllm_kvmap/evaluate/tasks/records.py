"""Published task files, record by record, with a complaint that names the file, the line and the
field.

A `.json` file is a list of objects, an object with the list under ``data``, or JSON lines (which
`datasets` writes under that name); a `.csv` file has no header (as MMLU was published) and its
columns are named by the reader; any other file is JSON lines.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.tasks.text import read_text


@dataclass(frozen=True, slots=True)
class Record:
    """One object of a task's file. ``where`` names its place, ``number`` counts records from 0."""

    where: str
    number: int
    fields: Mapping[str, Any]

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def text(self, name: str) -> str:
        """A field that must be text and not blank."""
        value = self._get(name)
        if not isinstance(value, str) or not value.strip():
            self.refuse(name, f"must be text, got {value!r}")
        return value

    def texts(self, name: str) -> list[str]:
        """A field that must be a list of texts."""
        values = self._get(name)
        if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
            self.refuse(name, f"must be a list of texts, got {values!r}")
        return values

    def objects(self, name: str) -> list[Record]:
        """A field that must be a list of objects."""
        values = self._get(name)
        if not isinstance(values, list) or not all(isinstance(v, dict) for v in values):
            self.refuse(name, f"must be a list of objects, got {str(values)[:60]!r}")
        return [Record(f"{self.where}, {name}[{i}]", i, v) for i, v in enumerate(values)]

    def object(self, name: str) -> Record:
        """A field that must be an object."""
        value = self._get(name)
        if not isinstance(value, dict):
            self.refuse(name, f"must be an object, got {value!r}")
        return Record(f"{self.where}, {name}", 0, value)

    def label(self, name: str, known: Sequence[str]) -> int:
        """The index of a field's value among ``known``; a number may stand for its text."""
        value = self._get(name)
        if str(value) not in known:
            self.refuse(name, f"must be one of {', '.join(known)}, got {value!r}")
        return list(known).index(str(value))

    def _get(self, name: str) -> Any:
        if name not in self.fields:
            self.refuse(name, f"is missing; there are {', '.join(sorted(self.fields)) or 'none'}")
        return self.fields[name]

    def refuse(self, name: str, complaint: str) -> NoReturn:
        raise InputError(f"{self.where}: the field `{name}` {complaint}.")


def read_records(task: str, data: str, columns: Sequence[str] = ()) -> Iterator[Record]:
    """The records of ``data`` in order; ``columns`` name those of a `.csv` file."""
    text = read_text(task, data)
    suffix = Path(data).suffix
    if suffix == ".csv":
        yield from _csv(data, text, columns)
        return
    if suffix == ".json":
        entries = _document(data, text)
        if entries is not None:
            yield from _list(data, entries)
            return
    number = 0
    for line_number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _record(f"{data}, line {line_number}", number, _parsed(data, line, line_number))
            number += 1


def _csv(data: str, text: str, columns: Sequence[str]) -> Iterator[Record]:
    if not columns:
        raise InputError(f"{data} is a .csv file; this task is published as JSON.")
    for number, row in enumerate(_rows(data, text)):
        where = f"{data}, row {number + 1}"
        if len(row) != len(columns):
            raise InputError(
                f"{where} has {len(row)} columns; {len(columns)} are needed: {', '.join(columns)}."
            )
        yield Record(where, number, dict(zip(columns, row, strict=True)))


def _rows(data: str, text: str) -> Iterator[list[str]]:
    rows = csv.reader(io.StringIO(text))
    try:
        yield from rows
    except csv.Error as error:
        raise InputError(f"{data}, line {rows.line_num} is not CSV ({error}).") from error


def _document(data: str, text: str) -> Any:
    """What the whole of ``text`` says; None when its first line already is a document."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            return None
        raise InputError(f"{data} is not JSON ({error}).") from error


def _list(data: str, entries: Any) -> Iterator[Record]:
    if isinstance(entries, dict):
        entries = entries.get("data", [entries])  # one record is a file of one line
    if not isinstance(entries, list):
        raise InputError(f"{data} must hold a list of objects, or an object with one under `data`.")
    for number, entry in enumerate(entries):
        yield _record(f"{data}, item {number + 1}", number, entry)


def _parsed(data: str, line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{data}, line {number} is not JSON ({error}).") from error


def _record(where: str, number: int, entry: Any) -> Record:
    if not isinstance(entry, dict):
        raise InputError(f"{where} must be a JSON object, got {str(entry)[:40]!r}.")
    return Record(where, number, entry)
