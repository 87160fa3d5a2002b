"""A matrix product that is right, and ten mistakes in it that the emulator must find."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from emulated_build import ROOT, missing, program, shared_object
from emulator_library import COPIES, ORDERS, Library

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "g++ and headers are here")

SOURCE = ROOT / "tests/cpp/emulator_gemm.cu"
MAIN = ROOT / "tests/cpp/emulator_gemm_main.cpp"
M, N, K = 100, 72, 128
POISON = np.float32(-12345.0)

SHARED_ROWS, PAST_SHARED = 9, 10
BUGS = {
    "no barrier after the wait": 1,
    "wait count": 2,
    "load before the barrier": 3,
    "read before the wait": 4,
    "fragment registers": 5,
    "swizzle": 6,
    "no drain": 7,
    "epilogue row": 8,
    "past shared memory": PAST_SHARED,
}
DATA_RACES = {"no barrier after the wait": 1, "load before the barrier": 3}


@pytest.fixture(scope="module")
def library() -> Library:
    ptx = [SOURCE] if shutil.which("nvcc") else []
    return Library(shared_object("emulator_gemm", [SOURCE], ptx=ptx))


def product(library: Library, bug: int) -> tuple[str, np.ndarray, np.ndarray]:
    """The sentence, C as computed, and C in float64."""
    generator = torch.Generator().manual_seed(11)
    a = torch.randn(M, K, generator=generator).bfloat16()
    b = torch.randn(K, N, generator=generator).bfloat16()
    c = np.full((M + 8, N), POISON)  # rows beyond the end must stay
    arrays = [t.view(torch.int16).numpy() for t in (a, b)]
    sentence = library.call("runGemm", bug, *arrays, c, M, N, K)
    return sentence, c, (a.double() @ b.double()).numpy()


def is_right(sentence: str, computed: np.ndarray, expected: np.ndarray) -> bool:
    close = np.allclose(computed[:M], expected, rtol=0, atol=1e-4)  # NaN is never close
    return sentence == "" and close and bool((computed[M:] == POISON).all())


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("order", ORDERS)
def test_the_right_kernel_is_right_in_every_order(
    library: Library, order: str, copies: str
) -> None:
    library.configure(order=order, copies=copies, seed=3)
    assert is_right(*product(library, 0))


def test_equal_seeds_give_equal_bits_whatever_the_host_threads(library: Library) -> None:
    results = []
    for host_threads in (1, 2):
        library.configure(seed=5, host_threads=host_threads)
        results.append(product(library, BUGS["no barrier after the wait"])[1])
    assert results[0].tobytes() == results[1].tobytes()


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("bug", BUGS)
def test_every_planted_bug_is_found_by_default(library: Library, bug: str, seed: int) -> None:
    library.configure(seed=seed)
    assert not is_right(*product(library, BUGS[bug]))


def test_a_kind_order_hides_races(library: Library) -> None:
    """Why the defaults are what they are: in order, with early copies, this one looks right."""
    library.configure(order="in order", copies="at issue")
    assert is_right(*product(library, BUGS["wait count"]))
    library.configure(order="in order", copies="at wait")
    assert not is_right(*product(library, BUGS["wait count"]))


def test_instructions_are_counted_by_warp(library: Library) -> None:
    library.configure()
    before = library.statistics()
    product(library, 0)
    counted = {name: count - before[name] for name, count in library.statistics().items()}
    blocks, warps, steps, depth_steps = 4, 4, K // 32, 2
    assert counted["mma"] == blocks * warps * steps * depth_steps * 8
    assert counted["ldmatrix"] == blocks * warps * steps * depth_steps * 5
    assert counted["ldmatrix bank conflicts"] == 0
    assert counted["async copies"] == blocks * steps * (64 * 4 + 32 * 8)
    assert counted["barriers"] == blocks * steps


# ---- the PTX that nvcc emitted -------------------------------------------------------------------

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")


@needs_nvcc
@pytest.mark.parametrize("seed", [1, 2])
def test_ptx_gives_the_very_bits_of_the_source(library: Library, seed: int) -> None:
    results = []
    for path in ("source", "ptx"):
        library.configure(path=path, seed=seed)
        sentence, computed, expected = product(library, 0)
        assert is_right(sentence, computed, expected)
        results.append(computed.tobytes())
    assert results[0] == results[1]


@needs_nvcc
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_in_the_ptx_too(library: Library, bug: str) -> None:
    library.configure(path="ptx")
    assert not is_right(*product(library, BUGS[bug]))


# ---- sanitizers ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def under_tsan() -> Path:
    return program("emulator_gemm", [SOURCE, MAIN], "thread")


def run(executable: Path, bug: int) -> subprocess.CompletedProcess[str]:
    # Without randomised addresses: TSan wants its memory layout.
    command = ["setarch", "-R", str(executable), str(bug), "1"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_tsan_is_quiet_on_the_right_kernel(under_tsan: Path) -> None:
    done = run(under_tsan, 0)
    assert done.returncode == 0, done.stderr
    assert "ran" in done.stdout


@pytest.mark.parametrize("bug", DATA_RACES)
def test_tsan_names_a_race_between_threads(under_tsan: Path, bug: str) -> None:
    done = run(under_tsan, DATA_RACES[bug])
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
    assert done.returncode != 0


def test_tsan_names_a_race_between_blocks(under_tsan: Path) -> None:
    assert "WARNING: ThreadSanitizer: data race" in run(under_tsan, SHARED_ROWS).stderr


def test_asan_and_ubsan_are_quiet_on_the_right_kernel() -> None:
    done = run(program("emulator_gemm", [SOURCE, MAIN], "address,undefined"), 0)
    assert done.returncode == 0, done.stderr


def test_asan_names_a_store_past_shared_memory() -> None:
    done = run(program("emulator_gemm", [SOURCE, MAIN], "address,undefined"), PAST_SHARED)
    assert "AddressSanitizer: use-after-poison" in done.stderr
