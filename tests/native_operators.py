"""The torch operators for tests: built here for the CPU alone, whatever build/native holds, so that
a C++ compiler is all that is needed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trtllm_kvmap.mapper.native import NAME

ROOT = Path(__file__).resolve().parents[1]
# A folder for each environment: operators are linked to one torch.
OUTPUT = ROOT / "build" / "test-native" / Path(sys.prefix).name


def load_operators() -> Path:
    """Build them where they are not up to date, and load them into torch; skips without g++."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ on PATH to build the torch operators with")
    command = [sys.executable, str(ROOT / "build_scripts" / "build_native.py"), "--no-cuda"]
    command += ["--no-plugin", "--python", sys.executable, "--output", str(OUTPUT), "--jobs", "2"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    path = OUTPUT / NAME
    torch.ops.load_library(str(path))
    print(f"torch {torch.__version__} with {path}")
    return path
