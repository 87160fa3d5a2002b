"""On a fresh machine: make an environment, install, and let a conversation change models.

    python build_scripts/quickstart.py

Writes ./kvmap-demo/<source>-to-<target>/ for both tiny pairs and ends with the table of arms.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from environment import MAIN


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,  # what is given is handed on as it stands
    )
    parser.add_argument("--out", metavar="FOLDER", help="folder to write to (default: kvmap-demo)")
    parser.add_argument("--json", metavar="FILE", help="also write both reports here, as JSON")
    parser.parse_args()  # the flags of `trtllm-kvmap demo`, so that a mistake costs no installation
    python = MAIN.ensure()
    command = [str(python), "-m", "trtllm_kvmap.cli", "demo", *sys.argv[1:]]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
