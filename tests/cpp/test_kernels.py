"""The kernels on the emulator, and the scalar CPU version: every conformance case on every variant,
the whole target memory compared.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from emulated_cases import NEEDS_EMULATOR, prepare_built
from half_cases import (
    build,
    build_rounded,
    compare,
    expect,
    raw,
    with_dtype,
    with_heads_of_64,
    workspace_error,
)
from kernel_cases import (
    COPY_PARTIAL,
    FLOAT8_WEIGHTS,
    HEADS_OF_128,
    LONG_K,
    SHORT,
    TILE_HEADS,
    TILE_HEADS_INTERLEAVED,
    TILE_PAIRS,
    TWO_TILES,
    VARIANTS,
    by_id,
    check,
)
from native_kernels import POISON, aligned, call, emulated, pack, prepare
from native_structs import BFLOAT16, FLOAT16, FLOAT32, HOPPER, SMALL_T, WIDE

# half_cases puts the conformance folder on the path.
from cases import CASES, DTYPES, GEOMETRIES, SCOPES, TARGET, Case  # isort: skip

pytestmark = NEEDS_EMULATOR


@pytest.fixture(scope="module")
def library() -> c.CDLL:
    return emulated()


@pytest.fixture(autouse=True)
def options(library: c.CDLL) -> Iterator[None]:
    """Random order, poisoned copies, the source path: for every test anew."""
    library.kernelOptions(0, 0, 0, c.c_uint64(1))
    yield
    library.kernelOptions(0, 0, 0, c.c_uint64(1))


@by_id(CASES)
def test_kernels_scalar_cpu_version(library: c.CDLL, case: Case) -> None:
    check(library, case, FLOAT32, "kernelMapCpu")


@by_id([*SCOPES, *DTYPES])
def test_kernels_scalar_cpu_version_reads_half_weights(library: c.CDLL, case: Case) -> None:
    check(library, case, BFLOAT16, "kernelMapCpu")


@by_id(CASES)
def test_kernels_float32(library: c.CDLL, case: Case) -> None:
    check(library, case, FLOAT32)


@by_id(SHORT)
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_bfloat16(library: c.CDLL, variant: str, case: Case) -> None:
    check(library, with_dtype(case, "bfloat16"), BFLOAT16, variant=VARIANTS[variant])


HEADS_OF_64 = (
    HEADS_OF_128,
    *(
        case
        for case in map(
            with_heads_of_64,
            (*SHORT, LONG_K, TWO_TILES, TILE_PAIRS, TILE_HEADS, TILE_HEADS_INTERLEAVED),
        )
        if case.source.head_dim == 64
    ),
)


@by_id(HEADS_OF_64)
def test_kernels_hopper(library: c.CDLL, case: Case) -> None:
    check(library, with_dtype(case, "bfloat16"), BFLOAT16, variant=HOPPER)


def test_kernels_hopper_last_column_tile_has_no_pair(library: c.CDLL) -> None:
    case = with_dtype(with_heads_of_64(TILE_PAIRS), "bfloat16")
    built = build_rounded(case, torch.bfloat16)
    key, value = sorted(built.kvmap.groups, key=lambda group: group.field)
    assert value.weight is not None
    assert value.bias is not None
    parts = []
    for first, end in ((0, 1), (1, 2), (2, 5)):
        columns = slice(first * case.target.head_dim, end * case.target.head_dim)
        weight, bias = value.weight[:, columns].contiguous(), value.bias[columns]
        parts.append(replace(value, heads=value.heads[first:end], weight=weight, bias=bias))
    built = replace(built, kvmap=replace(built.kvmap, groups=(key, *parts)))
    assert pack(library, built.kvmap, BFLOAT16)[0].num_wide_tiles == 3 + 1 + 1 + 2
    before = raw(built.target_memory)
    prepared = prepare_built(library, built, compute_type=BFLOAT16, variant=HOPPER)
    call(library, "kernelMap", prepared)
    compare(case, built, before, expect(case, built), workspace_error(case, built, torch.bfloat16))


@by_id([*GEOMETRIES, *SCOPES])
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_float16(library: c.CDLL, variant: str, case: Case) -> None:
    check(library, with_dtype(case, "float16"), FLOAT16, variant=VARIANTS[variant])


@by_id(DTYPES)
@pytest.mark.parametrize("compute_type", [FLOAT16, BFLOAT16], ids=["float16", "bfloat16"])
def test_kernels_between_cache_dtypes(library: c.CDLL, compute_type: int, case: Case) -> None:
    check(library, case, compute_type)


@by_id([LONG_K, TWO_TILES, HEADS_OF_128, COPY_PARTIAL])
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_ring_and_splits(library: c.CDLL, variant: str, case: Case) -> None:
    check(library, with_dtype(case, "bfloat16"), BFLOAT16, variant=VARIANTS[variant])


@by_id(FLOAT8_WEIGHTS)
def test_kernels_float8_weights_in_float32(library: c.CDLL, case: Case) -> None:
    check(library, case, FLOAT32, "kernelMapCpu")
    check(library, case, FLOAT32)


@by_id(FLOAT8_WEIGHTS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_float8_weights(library: c.CDLL, dtype: str, variant: str, case: Case) -> None:
    compute_type = FLOAT16 if dtype == "float16" else BFLOAT16
    check(library, with_dtype(case, dtype), compute_type, variant=VARIANTS[variant])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_widen_every_float8_number(library: c.CDLL, dtype: str) -> None:
    """All 254 codes that are numbers, subnormal ones and both zeros, as the weights of a token that
    is one in one channel and nothing elsewhere: they must arrive as they are.
    """
    compute_type = FLOAT16 if dtype == "float16" else BFLOAT16
    case = replace(LONG_K, id="every-code", num_tokens=1, target=replace(TARGET, layers=1, heads=1))
    built = build(replace(with_dtype(case, dtype), second="float8"))
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes[(codes & 127) != 127].view(torch.float8_e4m3fn)
    groups = []
    for group in built.kvmap.groups:
        assert group.weight is not None
        inputs, columns = group.weight.shape
        repeated = numbers.repeat(-(-inputs * columns // len(numbers)))[: inputs * columns]
        weight = repeated.view(inputs, columns)
        groups.append(
            replace(
                group,
                weight=weight,
                bias=torch.zeros(columns),
                weight_scale=torch.ones(columns),
            )
        )
    kvmap = replace(built.kvmap, groups=tuple(groups))
    value = next(g for g in kvmap.groups if g.field == "value")
    assert value.weight is not None
    slot = int(built.span.source_slots[0])
    for view in (*built.source.keys, *built.source.values):
        view[slot // view.shape[2], :, slot % view.shape[2]] = 0
    for row in range(0, value.weight.shape[0], 37):
        s, channel = value.slices[row // 32], row % 32
        view = built.source.values[s.layer]
        view[slot // view.shape[2], s.head, slot % view.shape[2], channel] = 1
        call(
            library,
            "kernelMap",
            prepare(
                library,
                kvmap,
                built.source,
                built.target,
                built.span,
                compute_type=compute_type,
                variant=SMALL_T,
            ),
        )
        view[slot // view.shape[2], s.head, slot % view.shape[2], channel] = 0
        out = built.target.values[0]
        where = int(built.span.target_slots[0])
        found = out[where // out.shape[2], 0, where % out.shape[2]]
        assert torch.equal(found.float(), value.weight[row].float())


@pytest.mark.parametrize(
    ("variant", "case"),
    [
        *((v, case) for v in (*VARIANTS.values(), HOPPER) for case in (LONG_K, TWO_TILES)),
        *((HOPPER, case) for case in (TILE_PAIRS, TILE_HEADS)),
    ],
    ids=lambda given: given.id if isinstance(given, Case) else None,
)
def test_kernels_give_the_same_bytes_in_any_order(
    library: c.CDLL, variant: int, case: Case
) -> None:
    """Threads in any order, copies at any moment: a race would show as another byte."""
    case = with_dtype(with_heads_of_64(case), "bfloat16")
    results = []
    for order, copies, seed in ((0, 0, 1), (0, 0, 2), (1, 1, 1), (2, 2, 1), (2, 0, 3)):
        library.kernelOptions(order, copies, 0, c.c_uint64(seed))
        results.append(check(library, case, BFLOAT16, variant=variant))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("compute_type", [FLOAT32, BFLOAT16])
def test_kernels_chunks_change_no_byte(library: c.CDLL, compute_type: int) -> None:
    case = with_dtype(TWO_TILES, "bfloat16")
    whole = check(library, case, compute_type, variant=WIDE)
    assert torch.equal(check(library, case, compute_type, variant=WIDE, chunk_tokens=256), whole)


def test_kernels_take_int32_indices(library: c.CDLL) -> None:
    case = with_dtype(next(c for c in SCOPES if c.id == "slice-with-own-layer-0"), "bfloat16")
    check(library, case, BFLOAT16, index_type=torch.int32)
    check(library, case, BFLOAT16, "kernelMapCpu", index_type=torch.int32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_workspace_is_exact(library: c.CDLL, variant: str) -> None:
    """Nothing beyond workspaceSize is touched, and nothing in it is read before it is written."""
    case = with_dtype(LONG_K, "bfloat16")
    built = build_rounded(case, torch.bfloat16)
    before = raw(built.target_memory)
    prepared = prepare_built(
        library,
        built,
        compute_type=BFLOAT16,
        variant=VARIANTS[variant],
    )
    size = prepared.params.workspace_bytes
    larger = aligned(size + 4096)
    prepared.params.workspace = larger.data_ptr()
    call(library, "kernelMap", prepared)
    assert bool((larger[size:] == POISON).all())
    assert bool((larger[size - 4096 : size] != POISON).any())
    compare(case, built, before, expect(case, built), workspace_error(case, built, torch.bfloat16))


@pytest.mark.parametrize(
    ("index", "value"),
    [
        ("source_slots", 1 << 40),
        ("source_slots", -2),
        ("target_slots", 10_000),
        ("target_slots", -(1 << 62)),
        ("positions", 1 << 31),
        ("positions", -1),
        ("token_ids", 19),
        ("token_ids", -1),
    ],
)
@pytest.mark.parametrize("function", ["kernelMap", "kernelMapCpu"])
def test_kernels_skip_an_index_out_of_range(
    library: c.CDLL, function: str, index: str, value: int
) -> None:
    """The host cannot look into device arrays; a stray index must touch nothing."""
    case = with_dtype(next(c for c in SCOPES if c.id == "slice-with-own-layer-0"), "bfloat16")
    built = build_rounded(case, torch.bfloat16)
    before = raw(built.target_memory)
    prepared = prepare(
        library, built.kvmap, built.source, built.target, built.span, compute_type=BFLOAT16
    )
    strayed = getattr(built.span, index).clone()
    strayed[3] = value
    setattr(prepared.params.span, index, strayed.data_ptr())
    call(library, function, prepared)
    skipped = built.span.source_slots.clone()
    skipped[3] = -1
    built = replace(built, span=replace(built.span, source_slots=skipped))
    compare(case, built, before, expect(case, built), workspace_error(case, built, torch.bfloat16))
