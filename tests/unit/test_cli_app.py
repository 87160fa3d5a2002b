"""What the verbs share: options that say the same everywhere, and the bars of long work."""

from __future__ import annotations

import importlib
import io
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from trtllm_kvmap.cli import app

door = importlib.import_module("trtllm_kvmap.cli.app")  # cli.app is the typer application


def commands(group: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it."""
    inner = getattr(group, "commands", None)
    if inner is None:
        return [(path, group)]
    return [found for name, each in inner.items() for found in commands(each, (*path, name))]


def test_an_option_that_verbs_share_says_the_same_everywhere() -> None:
    said: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for _, command in commands(typer.main.get_command(app)):
        for parameter in command.params:
            if parameter.name in ("json", "allow_unproven") or (
                parameter.name in ("source", "target") and parameter.required
            ):
                said[parameter.name][parameter.help].add(command.name)
    assert set(said) == {"json", "allow_unproven", "source", "target"}
    assert all(len(helps) == 1 for helps in said.values()), said
    assert len(next(iter(said["json"].values()))) > 10


def test_every_verb_asks_for_its_json_before_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = 0
    for path, command in commands(typer.main.get_command(app)):
        if all(parameter.name != "json" for parameter in command.params):
            continue
        found += 1
        arguments = ["--json", str(tmp_path)]
        for parameter in command.params:
            if parameter.required:
                is_option = parameter.param_type_name == "option"
                arguments += [parameter.opts[0], "1"] if is_option else ["1"]
        refused = CliRunner().invoke(app, [*path, *arguments])
        assert refused.exit_code == 2, command.name
        assert "is a folder; give the name of a file" in refused.output, command.name
        assert not list(tmp_path.iterdir()), command.name
    assert found > 10


def test_work_has_a_bar_of_its_own_each(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(door, "complaints", Console(file=shown, force_terminal=True, width=80))
    with door.progress() as show:
        for name, done in (("read", 1), ("fit", 1), ("read", 4)):
            show(name, done, 4)
    with door.counted("guard") as count:
        count(2)
    with door.counted("judge", 9) as count:
        count(9, 9)
    last = [line for line in shown.getvalue().splitlines() if "/" in line]
    for name, counts in (("read", "4/4"), ("fit", "1/4"), ("guard", "2/?"), ("judge", "9/9")):
        assert counts in next(line for line in reversed(last) if name in line)
