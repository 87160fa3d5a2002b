"""Makes a virtual environment ready for one lane, from package registries alone.

A stamp inside the environment records what was asked for, so that a second run costs nothing and a
changed requirement installs again.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ((3, 10), (3, 12))
# Newer releases may work; these are the ones the tests ran with.
MAIN = (
    "torch==2.13.0",
    "transformers==5.24.0",
    "numpy==2.4.6; python_version >= '3.11'",  # later numpy has no wheels for Python 3.10
    "numpy==2.2.6; python_version < '3.11'",
)


@dataclass(frozen=True)
class Environment:
    """A folder under the repository root and the requirements it holds, besides this package."""

    folder: str
    requirements: tuple[str, ...]
    extras: str = ""
    # Packages that only carry data: installed without what they ask for, because nothing of them
    # is run.
    data: tuple[str, ...] = ()
    # Requirement files that name every package of this environment beside ``requirements``: pip
    # resolves nothing, and installs this package without what it asks for.
    frozen: tuple[str, ...] = ()

    @property
    def python(self) -> Path:
        return ROOT / self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def ensure(self) -> Path:
        """Create or complete the environment; returns its python. Exits with a sentence when pip
        fails.
        """
        require_python()
        stamp, wanted = ROOT / self.folder / "ready", self._digest()
        if stamp.is_file() and stamp.read_text() == wanted:
            return self.python
        started = time.monotonic()
        wants = ", ".join((*self.requirements, *self.data, *self.frozen))
        print(f"Setting up {self.folder} ({wants}) ...", flush=True)
        if not self.python.is_file():
            venv.create(ROOT / self.folder, with_pip=True)
        # Together, so that the pins hold for what the package itself asks for.
        package = ("--editable", f"{ROOT}{self.extras}")
        if self.frozen:
            self._pip("install", "--quiet", *self.requirements)
            for file in self.frozen:
                self._pip("install", "--quiet", "--no-deps", "--requirement", file)
            self._pip("install", "--quiet", "--no-deps", *package)
        else:
            self._pip("install", "--quiet", *self.requirements, *package)
        if self.data:
            self._pip("install", "--quiet", "--no-deps", *self.data)
        stamp.write_text(wanted)
        print(f"{self.folder} is ready after {time.monotonic() - started:.0f} s.", flush=True)
        return self.python

    def _pip(self, *arguments: str) -> None:
        command = [str(self.python), "-m", "pip", *arguments]
        result = subprocess.run(command, check=False, cwd=ROOT)
        if result.returncode:
            sys.exit(
                f"pip could not install into {self.folder}; the command was: {' '.join(command)}"
            )

    def _digest(self) -> str:
        sha = hashlib.sha256((ROOT / "pyproject.toml").read_bytes())
        sha.update(repr((self.requirements, self.extras, self.data, sys.version_info[:3])).encode())
        for file in self.frozen:
            sha.update((ROOT / file).read_bytes())
        return sha.hexdigest()


def require_python() -> None:
    low, high = SUPPORTED
    if not low <= sys.version_info[:2] <= high:
        sys.exit(
            f"Python {sys.version_info[0]}.{sys.version_info[1]} runs this script; Python "
            f"{low[0]}.{low[1]} to {high[0]}.{high[1]} is needed. Run it with one of those, for "
            f"instance python3.11."
        )
