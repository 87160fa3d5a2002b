"""The cases that the kernels have beside the conformance table; and the check of one: map, and
compare the whole target memory.
"""

from __future__ import annotations

import ctypes as c
from dataclasses import replace

import pytest
import torch
from emulated_cases import prepare_built
from half_cases import (
    build,
    build_rounded,
    compare,
    expect,
    raw,
    workspace_error,
)
from native_kernels import call
from native_structs import BFLOAT16, FLOAT16, FLOAT32, NARROW, SMALL_T, WIDE

# half_cases puts the conformance folder on the path.
from cases import BASE, CASES, GEOMETRIES, SCOPES, SECONDS, SOURCE, TARGET, Case  # isort: skip

VARIANTS = {"wide": WIDE, "narrow": NARROW, "small-t": SMALL_T}
TORCH = {FLOAT32: torch.float32, FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}
SHORT = tuple(case for case in CASES if case.num_tokens < 500)
LONG_K = replace(
    BASE,
    id="many-inputs",
    source=replace(SOURCE, layers=6, heads=4),
    target=replace(TARGET, layers=1),
    scope="pooled-all",
)
TWO_TILES = replace(LONG_K, id="two-row-tiles", num_tokens=300, first_slot_offset=3, scope="pooled")
# A slice of two K-blocks.
HEADS_OF_128 = replace(
    BASE,
    id="source-heads-of-128",
    source=replace(SOURCE, head_dim=128, rope=replace(SOURCE.rope, rotary_dim=128)),
)
# Column tiles that a cluster takes in pairs: two of a group, and the last of a group (64 columns)
# with the first of the next; an odd number of row tiles.
TILE_PAIRS = replace(
    BASE,
    id="tile-pairs",
    source=replace(SOURCE, layers=1, heads=2),
    target=replace(TARGET, layers=1, heads=5),
    scope="pooled",
    num_tokens=560,
)
# Column tiles that are whole heads of 128, which the Hopper kernel ends in a shorter way.
TILE_HEADS = replace(
    TILE_PAIRS,
    id="tiles-of-heads",
    target=replace(
        TARGET, layers=1, heads=3, head_dim=128, rope=replace(TARGET.rope, rotary_dim=128)
    ),
    num_tokens=300,
)
TILE_HEADS_INTERLEAVED = replace(
    TILE_HEADS,
    id="tiles-of-interleaved-heads",
    target=replace(TILE_HEADS.target, rope=replace(TILE_HEADS.target.rope, interleaved=True)),
    num_tokens=13,
)
# Pairs 16 channels apart, which different lanes of a warp have read.
_TURNED = next(case for case in SCOPES if case.id == "copy-turned")
COPY_PARTIAL = replace(
    _TURNED,
    id="copy-turned-partial",
    source=replace(_TURNED.source, rope=replace(_TURNED.source.rope, rotary_dim=32)),
    target=replace(_TURNED.target, rope=replace(_TURNED.target.rope, rotary_dim=32)),
)
# Weights kept in fp8-e4m3: a few slices, heads that share them, splits of K, two row tiles, padded
# heads, pairs of neighbours.
FLOAT8_WEIGHTS = (
    *(case for case in SECONDS if case.second == "float8"),
    *(
        replace(case, id=f"float8-weights-{case.id}", second="float8")
        for case in (
            LONG_K,
            TWO_TILES,
            *(case for case in GEOMETRIES if case.id == "head-dim-96-to-32"),
            *(case for case in SCOPES if case.id in ("pooled-with-own-layer-0",)),
            *(case for case in CASES if case.id == "rope-partial-interleaved-scaled-target"),
        )
    ),
)


def by_id(cases: tuple[Case, ...] | list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.id)


def check(
    library: c.CDLL,
    case: Case,
    compute_type: int,
    function: str = "kernelMap",
    **options: object,
) -> torch.Tensor:
    """Map, compare the whole memory, return it raw."""
    half = compute_type != FLOAT32
    built = build_rounded(case, TORCH[compute_type]) if half else build(case)
    before, source = raw(built.target_memory), raw(built.source_memory)
    prepared = prepare_built(
        library,
        built,
        compute_type=compute_type,
        **options,
    )
    call(library, function, prepared)
    assert torch.equal(raw(built.source_memory), source), "the source changed"
    extra = workspace_error(case, built, TORCH[compute_type]) if half else 0.0
    if function == "kernelMapCpu":
        extra = 0.0  # it rounds no inputs
    compare(case, built, before, expect(case, built), extra)
    return raw(built.target_memory)
