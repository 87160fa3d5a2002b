"""The kernels themselves under the sanitizers, on the emulator, and mistakes that must be named."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from emulated_cases import NEEDS_EMULATOR
from native_build import ROOT, build_sanitized

pytestmark = NEEDS_EMULATOR

KERNELS = ("wide", "narrow", "small-t", "hopper", "odd-strides", "plain", "float8-weights")
# TSan's price is by thread: one kernel of each way to hand data on (cp.async rings, split K, TMA).
HANDING_ON = ("wide", "small-t", "hopper")


def run(program: Path, *kernels: str) -> subprocess.CompletedProcess[str]:
    # Without randomised addresses: TSan wants its memory layout.
    command = ["setarch", "-R", str(program), "1", *kernels]
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def ran_all(done: subprocess.CompletedProcess[str], kernels: tuple[str, ...]) -> bool:
    return done.returncode == 0 and done.stdout.split() == [w for k in kernels for w in (k, "ran")]


def with_mistake(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of cpp/ in which ``old``, which stands once in a file of the kernels, is ``new``."""
    cpp = folder / "cpp"
    shutil.copytree(ROOT / "cpp", cpp)
    path = cpp / "kernels" / file
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return cpp


def test_kernels_asan_and_ubsan_are_quiet() -> None:
    done = run(build_sanitized("address,undefined"), *KERNELS)
    assert ran_all(done, KERNELS), done.stdout + done.stderr[:4000]


def test_kernels_tsan_is_quiet() -> None:
    done = run(build_sanitized("thread"), *HANDING_ON)
    assert ran_all(done, HANDING_ON), done.stdout + done.stderr[:4000]


def test_kernels_asan_names_a_read_past_the_span(tmp_path: Path) -> None:
    cpp = with_mistake(
        tmp_path, "resolveTokens.cuh", "if (index < args.numTokens)", "if (index <= args.numTokens)"
    )
    done = run(build_sanitized("address,undefined", cpp), "wide")
    assert "heap-buffer-overflow" in done.stderr
    assert "resolveTokens" in done.stderr


def test_kernels_tsan_names_a_barrier_that_is_missing(tmp_path: Path) -> None:
    cpp = with_mistake(
        tmp_path,
        "groupedGemm.cuh",
        "    __syncthreads();\n    scatterTile<Shape",
        "    scatterTile<Shape",
    )
    done = run(build_sanitized("thread", cpp), "wide")
    assert "ThreadSanitizer: data race" in done.stderr
    assert "scatterPieces" in done.stderr
