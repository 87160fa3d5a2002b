"""The scripts that a fresh machine starts with: what they say before anything is installed."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_kvmap.cli.demo import demo

SCRIPTS = Path(__file__).resolve().parents[2] / "build_scripts"


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script of a fresh checkout, by a Python that has no packages."""
    shutil.copytree(SCRIPTS, folder / SCRIPTS.name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-S", f"{SCRIPTS.name}/{arguments[0]}", *arguments[1:]]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize("script", ["quickstart.py", "run_tests.py", "bench.py"])
def test_help_comes_before_any_environment(script: str, tmp_path: Path) -> None:
    ran = started(tmp_path, script, "--help")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert f"python build_scripts/{script}" in ran.stdout
    assert [path.name for path in tmp_path.iterdir()] == [SCRIPTS.name]


def test_quickstart_knows_the_flags_of_demo(tmp_path: Path) -> None:
    ran = started(tmp_path, "quickstart.py", "--help")
    flags = {f"--{name.replace('_', '-')}" for name in inspect.signature(demo).parameters}
    assert set(re.findall(r"--[a-z-]+", ran.stdout)) == flags | {"--help"}


def test_a_bench_whose_figures_cannot_be_written_does_not_begin(tmp_path: Path) -> None:
    """A folder, a file in no folder and in a file, and one that the system does not let be."""
    (tmp_path / "file").touch()
    for path, why in (
        (".", "Is a directory"),
        ("none/x.json", "No such file or directory"),
        ("file/x.json", "Not a directory"),
        ("/proc/x.json", "No such file or directory"),  # where not even root may write
    ):
        ran = started(tmp_path, "bench.py", "fit", "--json", path)
        shutil.rmtree(tmp_path / SCRIPTS.name)
        assert ran.returncode == 2
        assert f"--json {path} cannot be written ({why}). Give another path." in ran.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_asking_whether_a_bench_can_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("figures of before")
    unwritable = importlib.import_module("bench").unwritable
    assert [unwritable(path) for path in (old, new)] == ["", ""]
    assert [path.read_text() for path in tmp_path.iterdir()] == ["figures of before"]


def test_a_mistake_costs_no_installation(tmp_path: Path) -> None:
    ran = started(tmp_path, "quickstart.py", "--outt", "x")
    assert ran.returncode == 2
    assert "--outt" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == [SCRIPTS.name]
