"""Each emulated instruction against the PTX ISA's definition of it, written here as index formulas
from the ISA's tables, not shared with the emulator.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulated_build import ROOT, missing, shared_object
from emulator_library import COPIES, ORDERS, Library

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "g++ and headers are here")

SOURCE = ROOT / "tests/cpp/emulator_primitives.cu"
LANES = np.arange(32)
POISON = 0xFFFFFFFF


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(shared_object("emulator_primitives", [SOURCE]))


@pytest.fixture(autouse=True)
def default_options(library: Library) -> None:
    library.configure()


# ---- mma -----------------------------------------------------------------------------------------


def a_index(lane: int, i: int) -> tuple[int, int]:
    """Row and column in A of element i (0..7) of a lane's A fragment of m16n8k16."""
    row = lane // 4 if i in (0, 1, 4, 5) else lane // 4 + 8
    column = (lane % 4) * 2 + (i & 1) + (8 if i >= 4 else 0)
    return row, column


def b_index(lane: int, i: int) -> tuple[int, int]:
    """Row (k) and column (n) in B of element i (0..3)."""
    return (lane % 4) * 2 + (i & 1) + (8 if i >= 2 else 0), lane // 4


def d_index(lane: int, i: int) -> tuple[int, int]:
    """Row and column in C and D of element i (0..3)."""
    return lane // 4 + (8 if i >= 2 else 0), (lane % 4) * 2 + (i & 1)


def bits(values: np.ndarray, bf16: bool) -> np.ndarray:
    dtype = torch.bfloat16 if bf16 else torch.float16
    return torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16)


def numbers(values: np.ndarray, bf16: bool) -> np.ndarray:
    dtype = torch.bfloat16 if bf16 else torch.float16
    return torch.from_numpy(values).to(dtype).double().numpy()


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp16"])
def test_mma_multiplies_the_fragments_of_the_isa(library: Library, bf16: bool) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((16, 16)), rng.standard_normal((16, 8))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    a_bits, b_bits = bits(a, bf16), bits(b, bf16)
    left = np.array([[a_bits[a_index(lane, i)] for i in range(8)] for lane in LANES])
    right = np.array([[b_bits[b_index(lane, i)] for i in range(4)] for lane in LANES])
    d = np.array([[c[d_index(lane, i)] for i in range(4)] for lane in LANES], np.float32)
    assert library.call("runMma", bf16, left.view(np.uint32), right.view(np.uint32), d) == ""
    result = np.full((16, 8), np.nan)
    for lane in LANES:
        for i in range(4):
            result[d_index(lane, i)] = d[lane, i]
    expected = numbers(a, bf16) @ numbers(b, bf16) + c
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp16"])
def test_mma_reads_every_element_once(library: Library, bf16: bool) -> None:
    """Integers that float32 adds exactly: no tolerance, no element can stand for another."""
    a = np.arange(256, dtype=np.float64).reshape(16, 16) % 17 - 8
    b = np.arange(128, dtype=np.float64).reshape(16, 8) % 13 - 6
    a_bits, b_bits = bits(a, bf16), bits(b, bf16)
    left = np.array([[a_bits[a_index(lane, i)] for i in range(8)] for lane in LANES])
    right = np.array([[b_bits[b_index(lane, i)] for i in range(4)] for lane in LANES])
    d = np.full((32, 4), 0.5, np.float32)
    assert library.call("runMma", bf16, left.view(np.uint32), right.view(np.uint32), d) == ""
    expected = a @ b + 0.5
    for lane in LANES:
        for i in range(4):
            assert d[lane, i] == expected[d_index(lane, i)]


# ---- ldmatrix ------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_ldmatrix_distributes_the_matrices_of_the_isa(library: Library, transposed: bool) -> None:
    rng = np.random.default_rng(5)
    rows = rng.permutation(64)[:32]  # row r of matrix m begins where lane 8 m + r points
    shared = rng.integers(0, 2**16, (64, 8)).astype(np.uint16)
    words = np.zeros((32, 4), np.uint32)
    offsets = (rows * 16).astype(np.int32)
    assert library.call("runLdmatrix", transposed, shared, shared.nbytes, offsets, words) == ""
    halves = words.view(np.uint16).reshape(32, 4, 2)
    for lane in LANES:
        for m in range(4):
            for half in range(2):
                row, column = lane // 4, (lane % 4) * 2 + half
                if transposed:
                    row, column = column, row
                assert halves[lane, m, half] == shared[rows[8 * m + row], column]


# ---- cp.async ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pending", [0, 1, 2, 3])
@pytest.mark.parametrize("copies", COPIES)
def test_cp_async_arrives_by_groups(library: Library, copies: str, pending: int) -> None:
    library.configure(copies=copies)
    rng = np.random.default_rng(7)
    given = rng.integers(0, 2**32, (3, 32, 4), dtype=np.uint32)
    valid = (LANES % 3 != 0).astype(np.int32)
    out = np.zeros_like(given)
    assert library.call("runCpAsync", pending, True, given, valid, out) == ""
    expected = np.where(valid[None, :, None], given, 0)
    if copies != "at issue":
        # Shared memory starts as poison: a copy that has not come shows NaN either way.
        expected[3 - pending :] = POISON
    np.testing.assert_array_equal(out, expected)


def test_cp_async_in_flight_at_the_end_is_an_error(library: Library) -> None:
    given, valid = np.zeros((3, 32, 4), np.uint32), np.ones(32, np.int32)
    sentence = library.call("runCpAsync", 1, False, given, valid, np.zeros_like(given))
    assert "1 cp.async in flight" in sentence
    assert "wait_group" in sentence


# ---- warps and blocks ----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [32, 16, 8, 2])
@pytest.mark.parametrize("operand", [0, 1, 3, 5, 17])
def test_shuffles_take_from_the_lane_of_the_isa(library: Library, operand: int, width: int) -> None:
    given = np.random.default_rng(1).integers(-(2**31), 2**31, 32).astype(np.int32)
    out = np.zeros((5, 32), np.int32)
    assert library.call("runShuffle", operand, width, given, out) == ""
    for lane in LANES:
        # The ISA: segment mask ~(width - 1), clamp at the segment's last lane (first, for up).
        segment = lane & ~(width - 1)
        last = segment | (width - 1)
        index = segment | (operand & (width - 1))
        up, down, xor = lane - operand, lane + operand, lane ^ operand
        assert out[0, lane] == given[index]
        assert out[1, lane] == given[up if up >= segment else lane]
        assert out[2, lane] == given[down if down <= last else lane]
        assert out[3, lane] == given[xor if xor <= last else lane]
        assert out[4, lane] == np.uint32(sum(1 << i for i in LANES if given[i] & 1)).view(np.int32)


@pytest.mark.parametrize("host_threads", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_of_three_dimensions(library: Library, order: str, host_threads: int) -> None:
    library.configure(order=order, host_threads=host_threads)
    sums, out = np.zeros(2, np.int32), np.full((12, 64), -1, np.int32)
    assert library.call("runBlocks", 2, 3, 2, 64, sums, out) == ""
    np.testing.assert_array_equal(out, np.broadcast_to(np.arange(64)[::-1], (12, 64)))
    assert sums.tolist() == [12 * 63 * 32, 12 * 64 - 1]


# ---- what must be refused ------------------------------------------------------------------------

MISTAKES = {
    1: ["divergence", "__syncwarp", "shfl.sync"],
    2: ["deadlock", "threads 0-31 at barrier 0", "threads 32-63 ended"],
    3: ["0x7fffffff", "whole warps"],
    4: ["ldmatrix", "out of range", "1024 bytes"],
    5: ["cp.async", "shared address 8 is not aligned to 16"],
    6: ["ld.global.v4", "not aligned to 16"],
    7: ["written", "past its end"],
    8: ["barrier 1"],  # two counts: a contradiction, or a thread that nobody joins
    9: ["not into the block's shared memory"],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_end_in_a_sentence(library: Library, mistake: int, order: str) -> None:
    library.configure(order=order)
    sentence = library.call("runMistake", mistake, np.zeros(64, np.float32))
    for words in MISTAKES[mistake]:
        assert words in sentence
    assert library.call("runMistake", 0, np.zeros(64, np.float32)) == ""


def test_unwritten_shared_memory_is_nan(library: Library) -> None:
    data = np.zeros(64, np.float32)
    assert library.call("runMistake", 10, data) == ""
    assert np.isnan(data).all()


@pytest.mark.parametrize(
    ("grid", "threads", "shared", "words"),
    [
        (1, 48, 0, "whole warps"),
        (1, 2048, 0, "at most 1024"),
        (0, 32, 0, "at least 1"),
        (1, 32, 300 << 10, "at most 232448"),
    ],
)
def test_launches_of_impossible_shape_are_refused(
    library: Library, grid: int, threads: int, shared: int, words: str
) -> None:
    assert words in library.call("runShape", grid, threads, shared)
