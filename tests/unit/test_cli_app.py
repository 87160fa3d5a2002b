"""What the verbs share: options that say the same everywhere, and the bars of long work."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from trtllm_kvmap.cli import app as door
from trtllm_kvmap.cli.plan import plan
from trtllm_kvmap.cli.verbs import ORDER, app
from trtllm_kvmap.cli.wording import flags_of, in_flags
from trtllm_kvmap.errors import FormatError, InputError


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


def test_every_parameter_of_every_verb_is_explained() -> None:
    found = 0
    for path, command in commands(typer.main.get_command(app)):
        for parameter in command.params:
            found += 1
            assert parameter.help, (path, parameter.name)
    assert found > 100


def test_verbs_are_listed_as_one_meets_them() -> None:
    listed = [path[0] for path, _ in commands(typer.main.get_command(app))]
    assert listed[:5] == ["doctor", "demo", "calibrate", "fit", "evaluate"]
    assert set(ORDER) == {name for name in listed if name != "registry"}


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
                given = str(len(arguments))  # another one each, as they may name files
                arguments += [parameter.opts[0], given] if is_option else [given]
        refused = CliRunner().invoke(app, [*path, *arguments])
        assert refused.exit_code == 2, command.name
        assert "is a folder; give the name of a file" in refused.output, command.name
        assert not list(tmp_path.iterdir()), command.name
    assert found > 10


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("k must be at least 1, got 0.", "--k must be at least 1, got 0."),
        (
            "max_tokens must leave two tokens after skip_first = 4; got -1.",
            "--max-tokens must leave two tokens after --skip-first = 4; got -1.",
        ),
        (
            "Give others (another skip or k). Another k is (another tokens thing).",
            "Give others (another --skip or --k). Another k is (another tokens thing).",
        ),
        (
            "skip, k and skip_first must not be negative.",
            "--skip, --k and --skip-first must not be negative.",
        ),
        ("Plan with a smaller skip_first.", "Plan with a smaller --skip-first."),
        (
            "Calibrate jointly, or fit with fields=same.",
            "Calibrate jointly, or fit with --fields same.",
        ),
        ("k must be at most 3: 4 layers.", "--k must be at most 3: 4 layers."),
        (
            "fields=both needs more; use fields=same.",
            "--fields both needs more; use --fields same.",
        ),
        ("Load it with allow_unproven=True.", "Load it with --allow-unproven."),
        ("json must be a file.", "json must be a file."),  # no option of this command
        ("The tokens must match; skip nothing.", "The tokens must match; skip nothing."),
        ("There is no /a/max_tokens.", "There is no /a/max_tokens."),
        (
            "There is no max_tokens/x or skip_first.txt.",
            "There is no max_tokens/x or skip_first.txt.",
        ),
        (
            "The entry 'max_tokens' or `skip_first` is odd.",
            "The entry 'max_tokens' or `skip_first` is odd.",
        ),
        (
            "mean_max_tokens and max_tokens_held are others.",
            "mean_max_tokens and max_tokens_held are others.",
        ),
    ],
)
def test_parameters_of_the_library_become_the_flags_that_were_given(
    message: str, said: str
) -> None:
    names = ("k", "skip", "skip_first", "max_tokens", "allow_unproven", "fields", "tokens")
    flags = {name: f"--{name.replace('_', '-')}" for name in names}
    assert in_flags(message, flags) == said
    assert in_flags(message, {}) == message


def test_a_flag_of_another_name_than_its_parameter_is_known() -> None:
    flags = flags_of(plan)
    told = {name: flags[name] for name in ("num_tokens", "reply_tokens", "mirrored", "json")}
    assert told == {
        "num_tokens": "--tokens",
        "reply_tokens": "--reply-tokens",
        "mirrored": "--mirrored",
        "json": "--json",
    }
    assert "kvmap" not in flags, "an argument"


def test_what_is_wrong_with_a_file_is_told_in_its_own_names(tmp_path: Path) -> None:
    group = typer.Typer()

    @group.callback()
    def callback() -> None:
        pass

    def read(repair_window: Annotated[int, typer.Option()] = 1) -> None:
        raise (InputError if repair_window else FormatError)("It needs repair_window.")

    door.register(group, read)
    for value, said in ((1, "needs --repair-window"), (0, "needs repair_window")):
        refused = CliRunner().invoke(group, ["read", "--repair-window", str(value)])
        assert said in refused.output


def test_no_verb_complains_of_a_parameter_by_its_name_in_python(tmp_path: Path) -> None:
    """Every option that is a number, at -1; the rest of the command is a folder."""
    found = 0
    for path, command in commands(typer.main.get_command(app)):
        required = []
        for parameter in command.params:
            if parameter.required:
                is_option = parameter.param_type_name == "option"
                given = str(tmp_path / "new" if parameter.name in door.WRITTEN else tmp_path)
                required += [parameter.opts[0], given] if is_option else [given]
        for parameter in command.params:
            default = parameter.default
            first = default[0] if isinstance(default, list | tuple) and default else default
            if type(first) not in (int, float):
                continue
            refused = CliRunner().invoke(app, [*path, *required, parameter.opts[0], "-1"])
            assert isinstance(refused.exception, SystemExit), refused.output
            if "must" in refused.output:
                found += 1
                assert refused.exit_code == 2
                assert parameter.opts[0] in refused.output, (command.name, refused.output)
            names = re.findall(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", refused.output)
            assert not {p.name for p in command.params} & set(names), refused.output
    assert found > 20


def test_an_interrupted_verb_says_what_became_of_its_files() -> None:
    def stop(path: Path) -> None:
        raise KeyboardInterrupt

    group = typer.Typer()
    group.callback()(lambda: None)
    door.register(group, stop)
    stopped = CliRunner().invoke(group, ["stop", "x"])
    assert (stopped.exit_code, stopped.stdout) == (130, "")
    assert stopped.stderr == (
        "trtllm-kvmap: interrupted. What was written is whole; every other file is as it was.\n"
    )


@pytest.mark.parametrize("after", ["time.sleep(60)", "pass"])
def test_an_interrupt_while_modules_are_imported_is_one_line(after: str, tmp_path: Path) -> None:
    """A torch that is interrupted as it is imported, and one that swallows the exception."""
    (tmp_path / "torch.py").write_text(
        f"import os, signal, time\n"
        f"try:\n    os.kill(os.getpid(), signal.SIGINT)\n    {after}\n"
        f"except BaseException:\n    pass\n"
        f"raise SystemExit('it went on')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "trtllm_kvmap.cli", "--help"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (ran.returncode, ran.stdout) == (130, "")
    assert ran.stderr == (
        "trtllm-kvmap: interrupted. Nothing was begun; every file is as it was.\n"
    )


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


def test_no_word_that_is_printed_is_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names as they are: bold, a tag that closes nothing, an emoji's code; a path is one line."""
    for name in ("q [bold] x.json", "o[/b].json", "a:smile:b.json"):
        path = tmp_path / ("long " * 20) / name.replace("/", "_")
        door.write_json(path, {})
        door.console.print(f"Wrote {name}")
        door.complaints.print(f"no {name}")
        told = capsys.readouterr()
        assert told.out == f"Wrote {path}\nWrote {name}\n"
        assert told.err == f"no {name}\n"
    with door.progress() as show:
        show("[bold]q", 1, 2)
    assert "[bold]q" in capsys.readouterr().err


def test_a_value_no_option_takes_is_told_without_a_word_of_the_parser(tmp_path: Path) -> None:
    given = ["generate", "m", "--source", "a", "--target", "b", "--backend", "gpu"]
    said = CliRunner().invoke(app, given)
    assert said.exit_code == 2
    assert "Invalid value for '--backend': 'gpu' is not one of" in said.output


def test_a_help_text_breaks_where_the_terminal_ends() -> None:
    wide = {"COLUMNS": "300", "TERMINAL_WIDTH": "300"}
    for path, command in commands(typer.main.get_command(app)):
        shown = CliRunner().invoke(app, [*path, "--help"], env=wide).output
        for paragraph in command.help.split("\n\n"):
            assert "\n" not in paragraph, path
        first = command.help.split("\n\n")[-1]
        assert first in " ".join(shown.split()), path


def test_an_error_before_any_bar_begins_with_no_empty_line(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["recipe", "none", "--out", str(tmp_path / "out")])
    assert said.exit_code == 2
    assert said.stderr.startswith("trtllm-kvmap: There is no recipe")


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "none"],
        ["recipe", "ridge-k", "--config", "none"],
        ["generate", "m", "--source", "a", "--target", "b", "--prompt-file", "none"],
        ["triton", "--out", "o", "--kvmap", "m", "--source", "a", "--target", "b"],
    ],
)
def test_a_file_that_is_not_there_is_told_in_words(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    speeds = ["--speeds", "none"] if arguments[0] == "triton" else []
    said = CliRunner().invoke(app, [*arguments, *speeds])
    assert said.exit_code == 2
    assert "none cannot be read" in said.stderr or "read from none" in said.stderr
    assert "(No such file or directory)" in said.stderr
