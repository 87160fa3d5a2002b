"""On a machine with a GPU, nvcc and torch, without a network: build, check, time, write one JSON.

    python build_scripts/gpu_acceptance.py --out DIR     everything; DIR/acceptance.json
    python build_scripts/gpu_acceptance.py --dry-run     the plan and predictions, on any machine

The stages: build the native part for this card; compare the emulator's instruction maps with the
hardware; run the conformance table on every kernel variant, and a map in a CUDA graph; run part of
it under compute-sanitizer where that is installed; build the TensorRT plugin where the headers are
at hand, and enqueue it; validate and time the maps of a real pair against the same maths in eager
torch and against the copy and matmul rates measured on this card. Each stage is a process with a
time limit; together they end within nine minutes. The exit status is 0 when every check held.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.workloads import predictions
from tensorrt_headers import tensorrt_headers

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "build_scripts"
BUILD = ROOT / "build" / "acceptance"


@dataclass(frozen=True)
class Stage:
    """``command`` writes its findings to the JSON file it is given last. ``needs`` is a program
    without which the stage is skipped, ``lacks`` a sentence on what else is not here.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    needs: str = "nvcc"
    lacks: str = ""

    @property
    def skipped(self) -> str:
        """Why it cannot run here, or nothing."""
        return self.lacks or ("" if shutil.which(self.needs) else f"{self.needs} is not on PATH")


def stages() -> list[Stage]:
    python = sys.executable
    build = (python, str(SCRIPTS / "build_native.py"), "--offline", "--python", python)
    plugin = (python, str(SCRIPTS / "gpu" / "plugin.py"), "--library", str(BUILD))
    headers = tensorrt_headers(ROOT / "build", offline=True)
    lacks = "" if headers else "the headers of TensorRT are not here; set TENSORRT_INCLUDE_DIR"
    build += ("--no-plugin", "--architectures", "native", "--output", str(BUILD))
    conformance = (python, str(SCRIPTS / "gpu" / "conformance.py"), "--library", str(BUILD))
    return [
        Stage("build", build, 120, "cmake"),
        Stage("instruction_maps", (python, str(SCRIPTS / "gpu" / "instruction_maps.py")), 50),
        Stage("conformance", conformance, 80),
        Stage(
            "sanitizer",
            ("compute-sanitizer", "--error-exitcode", "9", *conformance, "--few"),
            50,
            "compute-sanitizer",
        ),
        Stage("plugin", plugin, 60, lacks=lacks),
        Stage("timing", (python, str(SCRIPTS / "gpu" / "timing.py"), "--library", str(BUILD)), 180),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for acceptance.json and the logs")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and run nothing")
    options = parser.parse_args()
    if options.dry_run:
        print_plan()
        return 0
    if options.out is None:
        parser.error("--out DIR is needed, or --dry-run")
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    report: dict[str, Any] = {"machine": machine(), "predictions": predictions(), "stages": {}}
    for stage in stages():
        report["stages"][stage.name] = run(stage, options.out)
        report["seconds"] = round(time.monotonic() - started, 1)
        # Written after every stage: what is known survives a machine that is taken away.
        (options.out / "acceptance.json").write_text(json.dumps(report, indent=1) + "\n")
    failed = [name for name, stage in report["stages"].items() if stage["status"] == "failed"]
    print(json.dumps(report["stages"].get("timing", {}).get("findings", {}), indent=1))
    print(f"Failed: {', '.join(failed)}." if failed else "GPU acceptance passed.")
    return 1 if failed else 0


def run(stage: Stage, out: Path) -> dict[str, Any]:
    """``status`` is passed, failed or skipped; the log lies beside the JSON."""
    if stage.skipped:
        print(f"== {stage.name}: skipped, {stage.skipped}", flush=True)
        return {"status": "skipped", "why": stage.skipped}
    print(f"== {stage.name} (at most {stage.seconds} s)", flush=True)
    findings = out / f"{stage.name}.json"
    findings.unlink(missing_ok=True)
    command = [*stage.command]
    if stage.name != "build":
        command += ["--json", str(findings)]
    started = time.monotonic()
    with (out / f"{stage.name}.log").open("w") as log:
        try:
            status: int | str = subprocess.run(
                command,
                check=False,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=stage.seconds,
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"ran past {stage.seconds} s"
    result: dict[str, Any] = {
        "status": "passed" if status == 0 else "failed",
        "exit": status,
        "seconds": round(time.monotonic() - started, 1),
    }
    if findings.is_file():
        result["findings"] = json.loads(findings.read_text())
    print(f"   {result['status']} after {result['seconds']} s", flush=True)
    return result


def machine() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm"]
    query += ["--format=csv,noheader"]
    described: dict[str, Any] = {"cpus": os.cpu_count(), "python": sys.version.split()[0]}
    for name, command in (("gpu", query), ("nvcc", ["nvcc", "--version"])):
        if shutil.which(command[0]):
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            described[name] = done.stdout.strip().splitlines()[-1:]
    return described


def print_plan() -> None:
    total = 0
    for stage in stages():
        total += stage.seconds
        print(f"{stage.name:18} at most {stage.seconds:3} s  {' '.join(stage.command)}")
        if stage.skipped:
            print(f"{'':18} skipped here: {stage.skipped}")
    print(f"{'all together':18} at most {total:3} s")
    print("\nPredictions, from datasheet rates (989 TFLOP/s bf16, 3.35 TB/s), not measured:")
    for row in predictions():
        print(
            f"  {row['map']:15} {row['tokens']:6} tokens  {row['tflop']:8.2f} TFLOP  "
            f"{row['gigabytes']:6.2f} GB  at least {row['floor_ms']:7.2f} ms"
        )


if __name__ == "__main__":
    sys.exit(main())
