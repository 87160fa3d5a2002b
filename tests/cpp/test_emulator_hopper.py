"""mbarriers, TMA boxes and wgmma against the PTX ISA, and mistakes made with them."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from emulated_build import ROOT, missing, shared_object
from emulator_library import COPIES, ORDERS, Library

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "g++ and headers are here")

SOURCE = ROOT / "tests/cpp/emulator_hopper.cu"
ARCH = "sm_90a"


@pytest.fixture(scope="module")
def library() -> Library:
    ptx = [SOURCE] if shutil.which("nvcc") else []
    return Library(shared_object("emulator_hopper", [SOURCE], ptx=ptx, arch=ARCH))


# ---- TMA -----------------------------------------------------------------------------------------


def box_of(tensor: np.ndarray, x: int, y: int, rows: int, columns: int, swizzle: int) -> np.ndarray:
    """The bytes of a box, by definition: row after row, zeros outside, and each 16-byte chunk moved
    so that bits 4.. of its offset are changed by bits 7.. (as many as the swizzle has).
    """
    box = np.zeros((rows, columns), np.uint16)
    for r in range(rows):
        for c in range(columns):
            if 0 <= y + r < tensor.shape[0] and 0 <= x + c < tensor.shape[1]:
                box[r, c] = tensor[y + r, x + c]
    chunks = box.view(np.uint8).reshape(-1, 16)
    moved = np.zeros_like(chunks)
    for i, chunk in enumerate(chunks):
        offset = i * 16
        moved[(offset ^ (((offset >> 7) & (2**swizzle - 1)) << 4)) // 16] = chunk
    return moved.ravel()


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize(
    ("swizzle", "columns"), [(0, 24), (1, 16), (2, 32), (3, 64)], ids=["none", "32", "64", "128"]
)
@pytest.mark.parametrize(("x", "y"), [(8, 3), (-5, -2), (60, 30)])
def test_a_box_lands_as_the_isa_lays_it(
    library: Library, x: int, y: int, swizzle: int, columns: int, copies: str
) -> None:
    library.configure(copies=copies)
    tensor = np.random.default_rng(2).integers(1, 2**16, (40, 80)).astype(np.uint16)
    out = np.zeros(16 * columns * 2, np.uint8)
    assert library.call("runTma", tensor, 40, 80, 16, columns, swizzle, x, y, 1, 0, out) == ""
    np.testing.assert_array_equal(out, box_of(tensor, x, y, 16, columns, swizzle))


def test_a_box_is_not_there_before_its_barrier_says_so(library: Library) -> None:
    library.configure(copies="at wait")
    tensor = np.ones((40, 80), np.uint16)
    out = np.zeros(16 * 64 * 2, np.uint8)
    assert library.call("runTma", tensor, 40, 80, 16, 64, 3, 0, 0, 0, 0, out) == ""
    assert (out == 0xFF).any()


@pytest.mark.parametrize("extra", [16, -16])
def test_wrong_byte_counts_never_complete(library: Library, extra: int) -> None:
    library.configure()
    tensor = np.ones((40, 80), np.uint16)
    out = np.zeros(16 * 64 * 2, np.uint8)
    sentence = library.call("runTma", tensor, 40, 80, 16, 64, 3, 0, 0, 1, extra, out)
    assert "deadlock" in sentence
    assert "mbarrier at shared address 2048" in sentence


@pytest.mark.parametrize(
    ("columns", "swizzle", "words"), [(9, 0, "multiple of 16 bytes"), (64, 2, "its swizzle")]
)
def test_impossible_boxes_are_refused(
    library: Library, columns: int, swizzle: int, words: str
) -> None:
    out = np.zeros(1, np.uint8)
    tensor = np.ones((40, 80), np.uint16)
    assert words in library.call("runTma", tensor, 40, 80, 16, columns, swizzle, 0, 0, 1, 0, out)


# ---- wgmma ---------------------------------------------------------------------------------------

BUGS = {
    "no wait for the data": 1,
    "stage reused early": 2,
    "accumulators read before the wait": 3,
    "descriptor": 4,
    "parity": 5,
}


def product(library: Library, bug: int, n: int) -> tuple[str, np.ndarray, np.ndarray]:
    generator = torch.Generator().manual_seed(4)
    a = torch.randn(64, 256, generator=generator).bfloat16()
    b = torch.randn(n, 256, generator=generator).bfloat16()
    c = np.full((64, n), np.nan, np.float32)
    # 16-byte aligned copies: what a tensor map needs.
    arrays = [np.ascontiguousarray(t.view(torch.int16).numpy()) for t in (a, b)]
    sentence = library.call("runProduct", bug, n, *arrays, c, 256)
    return sentence, c, (a.double() @ b.double().T).numpy()


def is_right(sentence: str, computed: np.ndarray, expected: np.ndarray) -> bool:
    return sentence == "" and bool(np.allclose(computed, expected, rtol=0, atol=2e-4))


@pytest.mark.parametrize("n", [64, 128])
@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("order", ORDERS)
def test_wgmma_multiplies_swizzled_tiles(library: Library, order: str, copies: str, n: int) -> None:
    library.configure(order=order, copies=copies)
    assert is_right(*product(library, 0, n))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("bug", BUGS)
def test_every_planted_bug_is_found_by_default(library: Library, bug: str, seed: int) -> None:
    library.configure(seed=seed)
    assert not is_right(*product(library, BUGS[bug], 64))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("n", [64, 128])
def test_ptx_gives_the_very_bits_of_the_source(library: Library, n: int) -> None:
    results = []
    for path in ("source", "ptx"):
        library.configure(path=path)
        sentence, computed, expected = product(library, 0, n)
        assert is_right(sentence, computed, expected), sentence
        results.append(computed.tobytes())
    assert results[0] == results[1]
