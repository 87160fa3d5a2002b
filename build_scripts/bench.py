"""Every figure of speed, from one command each.

    python build_scripts/bench.py handoff --json F    hand-over against prefill; map against matmul
    python build_scripts/bench.py fit --json F        seconds per scope once moments exist

Sets up an environment of its own, because what we compare ourselves with is installed there too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

from environment import MAIN, Environment

BENCHES = {"fit": "bench_fit", "handoff": "bench_handoff"}
ENVIRONMENT = Environment(".venv-bench", (*MAIN, "aither-kvcache==2.4.1"))
INSIDE = "TRTLLM_KVMAP_BENCH"  # set in the child that runs inside the environment


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("bench", choices=sorted(BENCHES))
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        command = [str(ENVIRONMENT.ensure()), __file__, *sys.argv[1:]]
        return subprocess.run(command, check=False, env={**os.environ, INSIDE: "1"}).returncode
    name = BENCHES[options.bench]
    figures = getattr(importlib.import_module(name), name)()
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
