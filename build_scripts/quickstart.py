"""On a fresh machine: make an environment, install, and let a conversation change models.

    python build_scripts/quickstart.py

Writes ./kvmap-demo/<source>-to-<target>/ for both tiny pairs and ends with the table of arms.
"""

from __future__ import annotations

import subprocess
import sys

from environment import MAIN, ROOT, Environment


def main() -> int:
    python = Environment(".venv", MAIN, extras="[test]").ensure()
    command = [str(python), "-m", "trtllm_kvmap.cli", "demo", *sys.argv[1:]]
    return subprocess.run(command, check=False, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
