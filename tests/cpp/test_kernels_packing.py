"""What the host does for the kernels: rounding, packed weights, the choice of a variant."""

from __future__ import annotations

import ctypes as c
from dataclasses import replace

import pytest
import torch
from emulated_cases import NEEDS_EMULATOR
from half_cases import build_rounded, raw, with_dtype
from kernel_cases import LONG_K
from native_kernels import emulated, pack
from native_structs import AUTO, BFLOAT16, FLOAT8, FLOAT16, FLOAT32, NARROW, SMALL_T, WIDE

# half_cases puts the conformance folder on the path.
from cases import TARGET  # isort: skip

pytestmark = NEEDS_EMULATOR


@pytest.fixture(scope="module")
def library() -> c.CDLL:
    return emulated()


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT8])
def test_kernels_host_formats_round_as_torch_does(library: c.CDLL, dtype: int) -> None:
    kind = {FLOAT16: torch.float16, BFLOAT16: torch.bfloat16, FLOAT8: torch.float8_e4m3fn}[dtype]
    bits = torch.randint(-(1 << 31), 1 << 31, (200_000,), dtype=torch.int64).to(torch.int32)
    special = torch.tensor([0.0, -0.0, 448.0, 464.0, 2.0**-9, 2.0**-10, 65519.0, 65520.0, 3e38])
    numbers = torch.cat([bits.view(torch.float32), torch.randn(100_000), special])
    if dtype == FLOAT8:  # saturating, as the contract wants it
        limit = torch.finfo(kind).max
        wanted = torch.where(numbers.isnan(), numbers, numbers.clamp(-limit, limit)).to(kind)
    else:
        wanted = numbers.to(kind)
    stored, again = torch.empty_like(wanted), torch.empty_like(numbers)
    library.kernelRound(
        c.c_void_p(numbers.data_ptr()),
        c.c_int64(numbers.numel()),
        dtype,
        c.c_void_p(stored.data_ptr()),
        c.c_void_p(again.data_ptr()),
    )
    real = ~numbers.isnan()
    assert torch.equal(raw(stored)[real], raw(wanted)[real])
    assert bool(again[~real].isnan().all())
    assert torch.equal(again[real], wanted.float()[real])


@pytest.mark.parametrize("compute_type", [FLOAT16, FLOAT32])
def test_kernels_packed_blocks_hold_every_weight_once(library: c.CDLL, compute_type: int) -> None:
    """docs/kernels.md's layout, read back with its own formula."""
    case = replace(LONG_K, target=replace(TARGET, layers=1, heads=1))
    built = build_rounded(case, torch.float16)
    packed, blob = pack(library, built.kvmap, compute_type)
    group = next(g for g in built.kvmap.groups if g.field == "value")
    assert group.weight is not None
    inputs, columns = group.weight.shape
    kind = torch.float16 if compute_type == FLOAT16 else torch.float32
    weights = blob[packed.weights :].view(kind)
    k_blocks = -(-inputs // 64)
    per_group = k_blocks * 64 * 64
    per_chunk = 16 // weights.element_size()
    k, n = torch.meshgrid(torch.arange(inputs), torch.arange(columns), indexing="ij")
    chunk = (k % 64 // per_chunk) ^ (n % 8)
    place = (k // 64) * 4096 + n * 64 + chunk * per_chunk + k % per_chunk
    every = [weights[i * per_group : (i + 1) * per_group] for i in range(packed.num_groups)]
    assert any(torch.equal(part[place].float(), group.weight) for part in every)


def test_kernels_auto_picks_by_tokens_and_shape(library: c.CDLL) -> None:
    built = build_rounded(with_dtype(LONG_K, "bfloat16"), torch.bfloat16)
    packed, _blob = pack(library, built.kvmap, BFLOAT16)

    def size(tokens: int, variant: int) -> int:
        return int(library.kernelWorkspaceSize(c.byref(packed), tokens, 0, variant))

    assert size(64, AUTO) == size(64, SMALL_T) != size(64, WIDE)
    assert size(65, AUTO) == size(128, AUTO) == size(128, NARROW)
    assert size(129, AUTO) == size(129, WIDE)
    assert size(0, AUTO) == 0
    assert size(1 << 20, AUTO) == size(2048, AUTO), "the workspace of a long span is bounded"
