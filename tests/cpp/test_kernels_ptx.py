"""The same launches twice on the emulator: the source as g++ compiles it, and the PTX that nvcc
emits for it. Not a bit may differ.
"""

from __future__ import annotations

import ctypes as c
import shutil

import pytest
import torch
from emulated_cases import prepare_built
from half_cases import build_rounded, raw, with_dtype, with_heads_of_64
from kernel_cases import (
    FLOAT8_WEIGHTS,
    HEADS_OF_128,
    LONG_K,
    TILE_HEADS,
    TILE_HEADS_INTERLEAVED,
    TILE_PAIRS,
    TORCH,
    TWO_TILES,
    VARIANTS,
)
from native_build import build_library, cuda_include, kernel_sources, translated_kernels
from native_kernels import call, load
from native_structs import BFLOAT16, FLOAT16, FLOAT32, HOPPER

from cases import CASES, Case  # isort: skip

NAMES = (
    "slice-with-own-layer-0",
    "rope-partial-interleaved-scaled-source",
    "rope-yarn-target",
    "head-dim-96-to-32",
    "float8_e4m3fn-to-float8_e4m3fn",
    "odd-to-odd",
    "copies-and-slices",
    "copy-turned",
    "copy-float8",
)
SOURCE_PATH, PTX_PATH = 0, 1

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None
    or shutil.which("nvcc") is None
    or not (cuda_include() / "cuda_bf16.h").exists(),
    reason="needs g++, nvcc and the CUDA headers",
)


@pytest.fixture(scope="module")
def library() -> c.CDLL:
    sources = [*kernel_sources(), *translated_kernels()]
    return load(
        build_library("kernels-ptx", sources, flags=("-DTRTLLM_KVMAP_EMULATE", "-march=native"))
    )


def both(library: c.CDLL, case: Case, compute_type: int, variant: int) -> list[torch.Tensor]:
    """The raw target memory after each path."""
    results = []
    for path in (SOURCE_PATH, PTX_PATH):
        built = build_rounded(case, TORCH[compute_type])
        library.kernelOptions(0, 0, path, c.c_uint64(1))
        prepared = prepare_built(
            library,
            built,
            compute_type=compute_type,
            variant=variant,
        )
        call(library, "kernelMap", prepared)
        results.append(raw(built.target_memory))
    return results


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_ptx_is_bit_equal(library: c.CDLL, variant: str, name: str) -> None:
    case = with_dtype(next(case for case in CASES if case.id == name), "bfloat16")
    source, ptx = both(library, case, BFLOAT16, VARIANTS[variant])
    assert torch.equal(source, ptx)


@pytest.mark.parametrize("compute_type", [FLOAT32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("case", [LONG_K, TWO_TILES], ids=lambda case: case.id)
def test_kernels_ptx_is_bit_equal_over_many_blocks(
    library: c.CDLL, case: Case, compute_type: int
) -> None:
    source, ptx = both(library, with_dtype(case, "float16"), compute_type, 0)
    assert torch.equal(source, ptx)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", FLOAT8_WEIGHTS, ids=lambda case: case.id)
def test_kernels_ptx_of_float8_weights_is_bit_equal(
    library: c.CDLL, case: Case, dtype: str
) -> None:
    compute_type = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}[dtype]
    for variant in (0,) if dtype == "float32" else VARIANTS.values():
        source, ptx = both(library, with_dtype(case, dtype), compute_type, variant)
        assert torch.equal(source, ptx)


HOPPER_CASES = (
    *(case for case in CASES if case.id in NAMES and case.source.head_dim in (32, 64)),
    HEADS_OF_128,
    LONG_K,
    TWO_TILES,
    TILE_PAIRS,
    TILE_HEADS,
    TILE_HEADS_INTERLEAVED,
)


@pytest.mark.parametrize("case", HOPPER_CASES, ids=lambda case: case.id)
def test_kernels_hopper_ptx_is_bit_equal(library: c.CDLL, case: Case) -> None:
    """mbarriers, TMA boxes and wgmma as nvcc emits them for sm_90a."""
    case = with_dtype(with_heads_of_64(case), "bfloat16")
    source, ptx = both(library, case, BFLOAT16, HOPPER)
    assert torch.equal(source, ptx)
