"""The acceptance run for machines with a GPU, as far as a machine without one can try it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "build_scripts"
sys.path[:0] = [str(SCRIPTS), str(ROOT / "tests" / "cpp")]

import gpu_acceptance  # noqa: E402
from emulated_build import missing, shared_object  # noqa: E402
from emulator_library import Library  # noqa: E402
from gpu.instruction_maps import HOPPER_SOURCES, SOURCE, compare  # noqa: E402
from gpu.workloads import WORKLOADS  # noqa: E402
from gpu_acceptance import Stage, run, stages  # noqa: E402

NINE_MINUTES = 9 * 60


def script(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / name), *options]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_acceptance_ends_in_time_and_says_what_it_will_do() -> None:
    assert sum(stage.seconds for stage in stages()) <= NINE_MINUTES
    done = script("gpu_acceptance.py", "--dry-run")
    assert done.returncode == 0, done.stderr
    for stage in stages():
        assert stage.name in done.stdout
    assert "not measured" in done.stdout
    assert script("gpu_acceptance.py").returncode == 2


def test_acceptance_says_what_it_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plugin's stage comes and goes with the headers of TensorRT; nothing else does."""
    headers = tmp_path / "NvInferRuntime.h"
    headers.touch()
    monkeypatch.setenv("TENSORRT_INCLUDE_DIR", str(tmp_path))
    assert not any(stage.lacks for stage in stages())
    monkeypatch.delenv("TENSORRT_INCLUDE_DIR")
    monkeypatch.setattr(gpu_acceptance, "ROOT", tmp_path)
    lacking = [stage for stage in stages() if stage.lacks]
    assert [stage.name for stage in lacking] == ["plugin"]
    assert run(lacking[0], tmp_path) == {"status": "skipped", "why": lacking[0].lacks}
    gpu_acceptance.print_plan()
    said = capsys.readouterr().out
    assert f"skipped here: {lacking[0].lacks}" in said


def test_acceptance_predicts_from_the_shapes() -> None:
    pooled = next(w for w in WORKLOADS if w.name == "pooled-8")
    assert pooled.parameters == 64 * 2 * 8192 * 1024  # 8 layers of 8 heads of 128, 8 heads of 128
    assert pooled.flops(32768) == 2 * 32768 * pooled.parameters
    numbers = 32768 * 2 * 8 * 128 * (40 + 64)
    assert pooled.bytes_moved(32768) == 2 * (pooled.parameters + numbers)


def test_acceptance_times_the_hopper_kernel_where_it_applies() -> None:
    timed = {w.name: w.tokens_for("hopper") for w in WORKLOADS}
    assert timed["pooled-8"] == timed["slice-12"] == (8192, 32768)
    assert timed["copy"] == ()
    assert all(w.tokens_for("auto") == w.tokens for w in WORKLOADS)


def test_acceptance_times_what_it_has_validated(native_operators: Path, tmp_path: Path) -> None:
    out = tmp_path / "timing.json"
    options = (
        "--library",
        str(native_operators.parent),
        "--device",
        "cpu",
        "--tiny",
        "--json",
        str(out),
    )
    done = script("gpu/timing.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["maps"]
    assert {row["map"].split("-")[0] for row in rows} == {"pooled", "head", "slice", "copy"}
    assert {row["variant"] for row in rows} == {"auto"}  # no Hopper card here
    assert all(row["correct"] and row["median_ms"] > 0 and row["eager_ms"] > 0 for row in rows)


def test_acceptance_runs_the_conformance_table(native_operators: Path, tmp_path: Path) -> None:
    out = tmp_path / "conformance.json"
    options = (
        "--library",
        str(native_operators.parent),
        "--device",
        "cpu",
        "--few",
        "--json",
        str(out),
    )
    done = script("gpu/conformance.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads(out.read_text())
    assert findings["runs"] > 20
    assert findings["failures"] == []


INSTRUCTIONS = {
    "runMma": "mma",
    "runLdmatrix": "ldmatrix",
    "runCpAsync": "cp.async",
    "runProduct": "wgmma",
    "runTma": "tma",
    "runMulticast": "multicast",
}


@pytest.mark.parametrize("wrong", ["", *INSTRUCTIONS])
def test_acceptance_compares_every_instruction(wrong: str) -> None:
    """With the emulator in the hardware's place, and with one output of it changed."""
    if missing():
        pytest.skip(missing())

    class Changed(Library):
        def call(self, function: str, *arguments: int | np.ndarray) -> str:
            sentence = super().call(function, *arguments)
            if function == wrong:
                output = [a for a in arguments if isinstance(a, np.ndarray)][-1]
                output.ravel()[61] += 1
            return sentence

    emulator = shared_object("primitives", [SOURCE, *HOPPER_SOURCES])
    findings = compare(Changed(emulator), Library(emulator), hopper=True)
    assert set(findings) == set(INSTRUCTIONS.values())
    assert [name for name, same in findings.items() if not same] == (
        [INSTRUCTIONS[wrong]] if wrong else []
    )


def test_acceptance_stage_reports_how_it_ended(tmp_path: Path) -> None:
    python = sys.executable
    write = "import sys, pathlib; pathlib.Path(sys.argv[2]).write_text('[1]')"
    passed = run(Stage("a", (python, "-c", write), 20, python), tmp_path)
    assert (passed["status"], passed["findings"]) == ("passed", [1])
    assert run(Stage("b", (python, "-c", "exit(3)"), 20, python), tmp_path)["exit"] == 3
    slow = run(Stage("c", (python, "-c", "import time; time.sleep(9)"), 1, python), tmp_path)
    assert (slow["status"], slow["exit"]) == ("failed", "ran past 1 s")
    skipped = run(Stage("d", (python,), 20, "no-such-program"), tmp_path)
    assert skipped == {"status": "skipped", "why": "no-such-program is not on PATH"}
