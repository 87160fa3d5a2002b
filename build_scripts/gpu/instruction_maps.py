"""Whether the hardware's instructions put every number where the emulator's do.

    python build_scripts/gpu/instruction_maps.py [--json FILE]

The same sources (tests/cpp/emulator_primitives.cu, on a Hopper card emulator_hopper.cu and
emulator_cluster.cu too) are built by nvcc for this card and by g++ for the emulator; both get the
same inputs. Factors are small integers, whose sums are exact in any order, so every output must be
equal bit by bit.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "cpp"), str(ROOT / "build_scripts")]

from emulated_build import shared_object  # noqa: E402
from emulator_library import Library  # noqa: E402

from gpu.card import architecture  # noqa: E402

SOURCE = ROOT / "tests" / "cpp" / "emulator_primitives.cu"
HOPPER_SOURCES = [ROOT / "tests" / "cpp" / f"emulator_{name}.cu" for name in ("hopper", "cluster")]
HOPPER = "90a"
BUILD = ROOT / "build" / "acceptance"
ROUNDS = 16


class Machine(Protocol):
    """Something that runs the kernels on numpy arrays; returns what went wrong, or nothing."""

    def call(self, function: str, *arguments: int | np.ndarray) -> str: ...


class Hardware:
    """The kernels as nvcc built them for ``card``; arrays travel through GPU memory."""

    def __init__(self, card: str | None, sources: list[Path]) -> None:
        BUILD.mkdir(parents=True, exist_ok=True)
        library = BUILD / "libinstruction_maps.so"
        command = ["nvcc", "-std=c++17", "-O2", f"-gencode=arch=compute_{card},code=sm_{card}"]
        command += [f"-I{ROOT / 'cpp'}", "-shared", "-Xcompiler", "-fPIC"]
        command += [*map(str, sources), "-o", str(library)]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library))

    def call(self, function: str, *arguments: int | np.ndarray) -> str:
        entry = getattr(self._library, function)
        entry.restype = ctypes.c_char_p
        moved = {
            id(a): torch.from_numpy(a.view(np.uint8).reshape(-1)).cuda()
            for a in arguments
            if isinstance(a, np.ndarray)
        }
        passed = [
            ctypes.c_void_p(moved[id(a)].data_ptr())
            if isinstance(a, np.ndarray)
            else ctypes.c_int(a)
            for a in arguments
        ]
        torch.cuda.synchronize()
        sentence = entry(*passed)
        torch.cuda.synchronize()
        for a in arguments:
            if isinstance(a, np.ndarray):
                a.view(np.uint8).reshape(-1)[:] = moved[id(a)].cpu().numpy()
        return sentence.decode() if sentence else ""


def halves(values: np.ndarray, bf16: int) -> np.ndarray:
    """Pairs of small integers as uint32, in bf16 or fp16."""
    dtype = torch.bfloat16 if bf16 else torch.float16
    return torch.from_numpy(values).to(dtype).contiguous().view(torch.int32).numpy().view("uint32")


def check_mma(hardware: Machine, emulator: Machine, random: np.random.Generator) -> bool:
    same = True
    for bf16 in (0, 1):
        a = halves(random.integers(-8, 9, (32, 8)).astype(np.float32), bf16)
        b = halves(random.integers(-8, 9, (32, 4)).astype(np.float32), bf16)
        d = random.integers(-64, 65, (32, 4)).astype(np.float32)
        outputs = [d.copy(), d.copy()]
        for machine, out in zip((hardware, emulator), outputs, strict=True):
            require(machine.call("runMma", bf16, a.copy(), b.copy(), out))
        same &= np.array_equal(*outputs)
    return same


def check_ldmatrix(hardware: Machine, emulator: Machine, random: np.random.Generator) -> bool:
    same = True
    for transposed in (0, 1):
        data = random.integers(0, 256, 2048, dtype=np.uint8)
        offsets = (random.permutation(128)[:32] * 16).astype(np.int32)
        outputs = [np.zeros((32, 4), np.uint32) for _ in range(2)]
        for machine, out in zip((hardware, emulator), outputs, strict=True):
            require(machine.call("runLdmatrix", transposed, data.copy(), 2048, offsets, out))
        same &= np.array_equal(*outputs)
    return same


def check_cp_async(hardware: Machine, emulator: Machine, random: np.random.Generator) -> bool:
    words = random.integers(0, 2**32, (96, 4), dtype=np.uint32)
    valid = random.integers(0, 2, 32).astype(np.int32)
    outputs = [np.zeros((96, 4), np.uint32) for _ in range(2)]
    for machine, out in zip((hardware, emulator), outputs, strict=True):
        require(machine.call("runCpAsync", 0, 1, words.copy(), valid, out))
    return np.array_equal(*outputs)


def check_wgmma(hardware: Machine, emulator: Machine, random: np.random.Generator) -> bool:
    """Descriptors, the 128-byte swizzle and accumulators, out of a ring that TMA fills."""
    same = True
    for n in (64, 128):
        a = halves(random.integers(-8, 9, (64, 256)).astype(np.float32), 1)
        b = halves(random.integers(-8, 9, (n, 256)).astype(np.float32), 1)
        outputs = [np.zeros((64, n), np.float32) for _ in range(2)]
        for machine, out in zip((hardware, emulator), outputs, strict=True):
            require(machine.call("runProduct", 0, n, a.copy(), b.copy(), out, 256))
        same &= np.array_equal(*outputs)
    return same


def check_tma(hardware: Machine, emulator: Machine, random: np.random.Generator) -> bool:
    """Boxes in every swizzle, some of them partly outside."""
    same = True
    rows, columns, box_rows = 40, 80, 16
    for swizzle, box_columns in ((0, 24), (1, 16), (2, 32), (3, 64)):
        tensor = random.integers(0, 2**16, (rows, columns)).astype(np.uint16)
        x, y = int(random.integers(-20, columns)), int(random.integers(-8, rows))
        outputs = [np.zeros(box_rows * box_columns * 2, np.uint8) for _ in range(2)]
        box = rows, columns, box_rows, box_columns, swizzle, x, y
        for machine, out in zip((hardware, emulator), outputs, strict=True):
            require(machine.call("runTma", tensor.copy(), *box, 1, 0, out))
        same &= np.array_equal(*outputs)
    return same


def check_multicast(hardware: Machine, emulator: Machine, random: np.random.Generator) -> bool:
    """Ranks in clusters of two and four, and what each block finds of what all of them copied."""
    same = True
    clusters, steps = 3, 5
    for blocks in (2, 4):
        tensor = random.integers(0, 2**16, (steps * blocks * 16, 64)).astype(np.uint16)
        outputs = [np.zeros((clusters * blocks, *tensor.shape), np.uint16) for _ in range(2)]
        ranks = [np.full(clusters * blocks, -1, np.int32) for _ in range(2)]
        for machine, rank, out in zip((hardware, emulator), ranks, outputs, strict=True):
            require(
                machine.call("runMulticast", 0, blocks, clusters, steps, tensor.copy(), rank, out)
            )
        same &= np.array_equal(*outputs) and np.array_equal(*ranks)
    return same


def require(sentence: str) -> None:
    if sentence:
        raise RuntimeError(sentence)


CHECKS = {"mma": check_mma, "ldmatrix": check_ldmatrix, "cp.async": check_cp_async}
HOPPER_CHECKS = {"wgmma": check_wgmma, "tma": check_tma, "multicast": check_multicast}


def compare(hardware: Machine, emulator: Machine, hopper: bool) -> dict[str, bool]:
    """Whether the two agree, for each instruction that the card has."""
    random = np.random.default_rng(7)
    checks = CHECKS | (HOPPER_CHECKS if hopper else {})
    return {
        name: all(check(hardware, emulator, random) for _ in range(ROUNDS))
        for name, check in checks.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    card = architecture()
    hopper = card == HOPPER
    sources = [SOURCE, *HOPPER_SOURCES] if hopper else [SOURCE]
    emulator = Library(shared_object("primitives", sources))
    findings = compare(Hardware(card, sources), emulator, hopper)
    print(findings)
    if not hopper:
        print(f"wgmma, TMA boxes and clusters are Hopper's; this card is {card}")
    if options.json:
        options.json.write_text(json.dumps(findings))
    return 0 if all(findings.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
