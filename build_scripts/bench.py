"""Every figure of speed, from one command each.

    python build_scripts/bench.py handoff --json F    hand-over against prefill; map against matmul
    python build_scripts/bench.py exchange --json F   blocks between two processes against memcpy
    python build_scripts/bench.py fit --json F        seconds per scope once moments exist
    python build_scripts/bench.py repair --json F     what each choice of repair gives and costs
    python build_scripts/bench.py guard --json F      what a guard takes back, and what it misses
    python build_scripts/bench.py calibration --json F  quality by number of sequences; a refit from
                                                      traffic, and what counting costs answers
    python build_scripts/bench.py fits --json F       gap recovered by every way of fitting
    python build_scripts/bench.py triton --json F     through Triton against in process; pipeline
                                                      against target alone; routed requests
    python build_scripts/bench.py speculate --json F  drafts after a hand-over, against none
    python build_scripts/bench.py switch --json F     a switch from hot standby and otherwise
    python build_scripts/bench.py upgrade --json F    answering at once, reading for real later

Sets up an environment of its own, because what we compare ourselves with is installed there too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import triton_server
from environment import MAIN, Environment

BENCHES = {
    "calibration": "bench_calibration",
    "exchange": "bench_exchange",
    "fit": "bench_fit",
    "fits": "bench_fits",
    "guard": "bench_guard",
    "handoff": "bench_handoff",
    "repair": "bench_repair",
    "speculate": "bench_speculate",
    "switch": "bench_switch",
    "triton": "bench_triton",
    "upgrade": "bench_upgrade",
}
BESIDE = ("aither-kvcache==2.4.1", "nixl-cu13==1.5.1", "xxhash==4.1.0")
ENVIRONMENT = Environment(".venv-bench", BESIDE, over=MAIN)
ENVIRONMENTS = {"triton": triton_server.ENVIRONMENT}  # where not that one
INSIDE = "TRTLLM_KVMAP_BENCH"  # set in the child that runs inside the environment


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("bench", choices=sorted(BENCHES))
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.json and (reason := unwritable(options.json)):
        parser.error(f"--json {options.json} cannot be written ({reason}). Give another path.")
    environment = ENVIRONMENTS.get(options.bench, ENVIRONMENT)
    if INSIDE not in os.environ:
        command = [str(environment.ensure()), __file__, *sys.argv[1:]]
        return subprocess.run(command, check=False, env={**os.environ, INSIDE: "1"}).returncode
    name = BENCHES[options.bench]
    figures = getattr(importlib.import_module(name), name)()
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


def unwritable(path: Path) -> str:
    """Why no file can be written to ``path``, or "": asked before hours of work, and nothing is
    left there by asking.
    """
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        return str(error.strerror)
    return ""


if __name__ == "__main__":
    sys.exit(main())
