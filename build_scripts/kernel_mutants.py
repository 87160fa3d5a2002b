"""Break the kernels on purpose, one line at a time, and see the emulated tests notice.

    python build_scripts/kernel_mutants.py [--json F] [--only WORD]

Prints, and with --json writes, {"mutants": n, "caught": n, "missed": [...]}. Ends with 1 when one
was missed. A mutant is caught when a check of tests/cpp/kernel_cases.py fails, the emulator reports
an error, or the process that ran it dies. Nothing outside a temporary folder is changed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from kernel_mutant_list import CLUSTER, HOPPER, MUTANTS, ROWS, Mutant

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cpp")]

CPU_SECONDS = 120


def run_checks(library_path: Path, hopper_first: bool = False) -> str:
    """The first check that a library fails, or an empty string. ``hopper_first``: a change in the
    Hopper kernel alone shows in its own checks, so they come before the others.
    """
    import ctypes as c

    import kernel_cases as k
    import native_structs as n
    from cases import CASES
    from half_cases import with_dtype, with_heads_of_64
    from native_kernels import RefusedError, load

    named = {
        case.id: case
        for case in (
            *CASES,
            *k.FLOAT8_WEIGHTS,
            k.LONG_K,
            k.TWO_TILES,
            k.TILE_PAIRS,
            k.TILE_HEADS,
            k.HEADS_OF_128,
            k.COPY_PARTIAL,
        )
    }
    half: list[tuple[str, dict[str, int]]] = [
        ("slice-with-own-layer-0", {"variant": n.WIDE}),
        ("many-inputs", {"variant": n.WIDE}),
        ("many-inputs", {"variant": n.SMALL_T}),
        ("pooled-with-own-layer-0", {"variant": n.SMALL_T}),
        ("two-row-tiles", {"variant": n.WIDE, "chunk_tokens": 256}),
        ("two-row-tiles", {"variant": n.NARROW}),
        ("rope-partial-source", {"variant": n.WIDE}),
        ("rope-partial-target", {"variant": n.NARROW}),
        ("rope-yarn-source", {"variant": n.WIDE}),
        ("rope-interleaved-target", {"variant": n.WIDE}),
        ("skip-in-both", {"variant": n.WIDE}),
        ("blocks-64-to-1", {"variant": n.WIDE}),
        ("float8_e4m3fn-to-float8_e4m3fn", {"variant": n.WIDE}),
        ("odd-to-odd", {"variant": n.WIDE}),
        ("copies-and-slices", {"variant": n.NARROW}),
        ("copy-turned", {}),
        ("copy-turned-partial", {}),
        ("copy-float8", {}),
        ("copy-float8-rescaled", {}),
        ("copies-of-other-fields", {}),
        ("float8-weights-many-inputs", {"variant": n.SMALL_T}),
        ("float8-weights-two-row-tiles", {"variant": n.WIDE}),
        ("float8-weights-pooled-with-own-layer-0", {"variant": n.NARROW}),
        ("slice-with-own-layer-0", {"variant": n.HOPPER}),
        ("many-inputs", {"variant": n.HOPPER}),
        ("two-row-tiles", {"variant": n.HOPPER}),
        ("source-heads-of-128", {"variant": n.HOPPER}),
        ("pooled-with-own-layer-0", {"variant": n.HOPPER}),
        ("tile-pairs", {"variant": n.HOPPER}),
        ("tiles-of-heads", {"variant": n.HOPPER}),
    ]
    half.sort(key=lambda check: hopper_first and check[1].get("variant") != n.HOPPER)
    library = load(library_path)
    for seed in (1, 2):
        library.kernelOptions(0, 0, 0, c.c_uint64(seed))
        for name, options in half:
            case = with_dtype(named[name], "bfloat16")
            if options.get("variant") == n.HOPPER:
                case = with_heads_of_64(case)
            try:
                k.check(library, case, n.BFLOAT16, **options)
            except (AssertionError, RefusedError) as error:
                return f"{name} {options}: {str(error).splitlines()[0][:120]}"
        if seed == 1:
            try:
                k.check(library, named["slice-with-own-layer-0"], n.FLOAT32)
                k.check(library, named["float8-weights"], n.FLOAT32)
                case = with_dtype(named["float8-weights"], "float16")
                k.check(library, case, n.FLOAT16, variant=n.SMALL_T)
            except (AssertionError, RefusedError) as error:
                return f"float32 or float16: {str(error).splitlines()[0][:120]}"
    return ""


def _child(path: Path, hopper_first: bool, queue: multiprocessing.SimpleQueue[str]) -> None:
    # Processor time, not time on the clock: a busy machine is no endless loop.
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    queue.put(run_checks(path, hopper_first))


def try_mutant(mutant: Mutant | None, folder: Path) -> str:
    """How the mutant was caught; empty when it was not. None: the sources as they are."""
    import native_build

    cpp = folder / "cpp"
    if cpp.exists():
        shutil.rmtree(cpp)
    shutil.copytree(ROOT / "cpp", cpp)
    if mutant:
        path = cpp / "kernels" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(
                f"{mutant.file} holds {text.count(mutant.old)} times, not once: {mutant.old!r}"
            )
        path.write_text(text.replace(mutant.old, mutant.new))
    library = native_build.build_library(
        "mutant",
        native_build.kernel_sources(cpp),
        cpp,
        ("-DTRTLLM_KVMAP_EMULATE",),
        folder / "objects",
    )
    queue: multiprocessing.SimpleQueue[str] = multiprocessing.SimpleQueue()
    hopper_first = mutant is not None and mutant.file in (HOPPER, CLUSTER, ROWS)
    process = multiprocessing.Process(target=_child, args=(library, hopper_first, queue))
    process.start()
    process.join()
    if process.exitcode == -signal.SIGXCPU or process.exitcode == -signal.SIGKILL:
        return f"it had not ended after {CPU_SECONDS} seconds"
    if process.exitcode:
        return f"the process died with {process.exitcode}"
    return queue.get()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    parser.add_argument("--only", default="", help="only mutants whose file or reason has this")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only in m.file or options.only in m.why]
    missed: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fault = try_mutant(None, folder)
        if fault:
            raise SystemExit(f"The sources as they are fail: {fault}")
        for number, mutant in enumerate(chosen, 1):
            caught = try_mutant(mutant, folder)
            verdict = caught or "MISSED"
            print(
                f"{number:3}/{len(chosen)} {mutant.file}: {mutant.why}\n        {verdict}",
                flush=True,
            )
            if not caught:
                missed.append({"file": mutant.file, "new": mutant.new, "why": mutant.why})
    result = {"mutants": len(chosen), "caught": len(chosen) - len(missed), "missed": missed}
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
