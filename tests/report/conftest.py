"""Skips with its reason where the browser is not installed or the machine lacks its libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
VERSION = pytest.StashKey[str]()


@dataclass(frozen=True)
class Opened:
    """What the browser said of one page: ``found`` is the script's value by viewport width,
    ``sheets`` what was printed.
    """

    version: str
    console: list[str]
    asked: list[str]
    found: dict[str, Any]
    sheets: list[dict[str, Any]]


class Browser:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def open(
        self, page: Path, script: str, *, widths: tuple[int, ...], dark: bool = False, pdf: str = ""
    ) -> Opened:
        request = {"page": str(page), "script": script, "widths": widths, "dark": dark, "pdf": pdf}
        done = subprocess.run(
            [sys.executable, str(HERE / "browser.py"), json.dumps(request)],
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        opened = Opened(**json.loads(done.stdout))
        self._config.stash[VERSION] = opened.version
        return opened


@pytest.fixture(scope="session")
def browser(pytestconfig: pytest.Config) -> Browser:
    probe = "import PySide6.QtWebEngineCore, PySide6.QtWebEngineWidgets"
    tried = subprocess.run([sys.executable, "-c", probe], check=False, capture_output=True)
    if tried.returncode:
        reason = tried.stderr.decode().strip().splitlines()[-1]
        pytest.skip(f"no browser here ({reason}); build_scripts/run_tests.py -k report installs it")
    return Browser(pytestconfig)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if VERSION in config.stash:
        where = subprocess.run(
            [sys.executable, "-c", "import PySide6; print(PySide6.__path__[0])"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        terminalreporter.write_line(f"Browser: {config.stash[VERSION]}: {where}")
