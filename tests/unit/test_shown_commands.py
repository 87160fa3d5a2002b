"""Every command that a page shows is there, with the words and options it is shown with: a line of
a code block parses as it stands, a span within a sentence has options that exist.
"""

from __future__ import annotations

import argparse
import ast
import re
import runpy
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from trtllm_kvmap.cli.verbs import app

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "build_scripts"
BESIDE = ("trtllm_kvmap/tiny/README.md", "trtllm_kvmap/artifact/FORMAT.md")
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("plugins/*/*.md")]
    + [ROOT / name for name in BESIDE]
)
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
BENCH = ast.parse((SCRIPTS / "bench.py").read_text())
VERBS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
NAMED = {
    str(path.relative_to(ROOT)): re.findall(r"def test_\w+|\"\w+\"", path.read_text())
    for path in ROOT.glob("tests/**/test_*.py")
}


def lines_of(text: str) -> list[str]:
    """The commands of ``text``'s code blocks, without comments, continued lines joined."""
    blocks = [block for language, block in FENCED.findall(text) if language in ("", "sh")]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines = [re.split(r"\s#", line.replace("[", "").replace("]", ""))[0] for line in lines]
    return [line.strip() for line in lines if re.match(r"(python|trtllm-kvmap|pytest) ", line)]


def spans_of(text: str) -> list[str]:
    """The commands among the code spans of its sentences; ``a | b`` is two."""
    spans = re.findall(r"`([^`]+)`", FENCED.sub("", text))
    parts = [part for span in spans for part in re.sub(r"[\s\[\]]+", " ", span).split(" | ")]
    verbs = "|".join(VERBS)
    called = rf"trtllm-kvmap \w|(python )?\S+\.py \S|({verbs}) --"
    return [part.strip() for part in parts if re.match(called, part)]


def shown(find: Callable[[str], list[str]]) -> list[Any]:
    found = {(page, each) for page, text in TEXTS.items() for each in find(text)}
    return [pytest.param(each, id=f"{page}: {each}") for page, each in sorted(found)]


class Reached(Exception):  # noqa: N818  nothing went wrong
    """A script that runs has come to its arguments; ``args[0]`` is the parser."""


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts end where they would read their arguments."""

    def parse_args(self: argparse.ArgumentParser) -> None:
        raise Reached(self)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.syspath_prepend(str(SCRIPTS))


def parser_of(script: Path) -> argparse.ArgumentParser:
    with pytest.raises(Reached) as reached:
        runpy.run_path(str(script), run_name="__main__")
    parser: argparse.ArgumentParser = reached.value.args[0]
    return parser


def verb_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that ``words`` call, and its arguments."""
    command = VERBS[words[0]]
    while hasattr(command, "commands") and len(words) > 1:
        command, words = command.commands[words[1]], words[1:]
    return command, words[1:]


def script_of(name: str) -> Path:
    (found,) = {p for p in (ROOT / name, SCRIPTS / name) if p.is_file()}
    return found


def require_selected(arguments: list[str]) -> None:
    """What -k names stands in some test's path or name, or is one of its cases."""
    for option, word in pairwise(arguments):
        if option == "-k" and word != "EXPR":
            assert any(
                word in path or any(word in name for name in names) for path, names in NAMED.items()
            ), word


def require_script(words: list[str], *, whole: bool) -> None:
    """The script is there, and takes these words as they stand, or has their options at least."""
    script, arguments = script_of(words[0]), words[1:]
    known = script.read_text()
    if "parse_args" in known:
        parser = parser_of(script)
        known = parser.format_help()
        assert not whole or not parser.parse_known_args(arguments)[1], arguments
    assert set(OPTION.findall(" ".join(arguments))) <= set(OPTION.findall(known)), arguments
    require_selected(arguments)


def require_imports(code: str) -> None:
    """What a ``python -c`` imports is there; it is not imported, because it may want packages that
    are not.
    """
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            spec = find_spec(str(node.module))
            if spec is None or spec.origin is None:
                pytest.fail(f"there is no {node.module}")
            for name in (alias.name for alias in node.names):
                folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
                beside = any((folder / f"{name}.py").is_file() for folder in folders)
                assert beside or f" {name}" in Path(spec.origin).read_text(), name


@pytest.mark.parametrize("line", shown(lines_of))
def test_a_line_parses_as_it_stands(line: str, stopping: None) -> None:
    program, *words = shlex.split(line)
    if program == "trtllm-kvmap":
        command, arguments = verb_of(words)
        if arguments != ["..."]:
            command.make_context(words[0], arguments)
    elif program == "pytest":
        assert (ROOT / words[0]).is_dir()
        require_selected(words)
    elif words[0] == "-m":
        assert find_spec(words[1]), words[1]
    elif words[0] == "-c":
        require_imports(words[1])
    else:
        require_script(words, whole=True)


@pytest.mark.parametrize("span", shown(spans_of))
def test_a_span_names_what_exists(span: str, stopping: None) -> None:
    words = re.sub("^(python|trtllm-kvmap) ", "", span).split()
    if words[0].endswith(".py"):
        require_script(words, whole=False)
    else:
        command, arguments = verb_of(words)
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(OPTION.findall(" ".join(arguments))) <= known


def test_the_benches_that_pages_name_are_those_that_there_are() -> None:
    (assigned,) = (
        n
        for n in BENCH.body
        if isinstance(n, ast.Assign) and "BENCHES" in ast.unparse(n.targets[0])
    )
    benches = ast.literal_eval(assigned.value)
    for name, module in benches.items():
        assert f"def {module}(" in (SCRIPTS / f"{module}.py").read_text(), name
    several = r"bench\.py (\w+(?: \| \w+)*)(?:.*# also (\w+(?:, \w+)*))?"
    named = [" ".join(found) for text in TEXTS.values() for found in re.findall(several, text)]
    assert set(re.findall(r"\w+", " ".join(named))) == set(benches)
    said = re.findall(r"bench\.py (\w+)", ast.get_docstring(BENCH) or "")
    assert sorted(said) == sorted(benches)


@pytest.mark.parametrize("page", TEXTS)
def test_linked_files_exist(page: str) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", TEXTS[page]):
        assert ((ROOT / page).parent / link).exists(), link
