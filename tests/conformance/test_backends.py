"""Every backend against every case; the whole memory of the target is compared."""

from __future__ import annotations

import pytest
import torch
from case_build import Built, build
from cases import CASES, SECONDS, Case
from expected import ABSOLUTE, expect

from trtllm_kvmap.errors import UnavailableError
from trtllm_kvmap.mapper.backends import map_kv


def raw(memory: torch.Tensor) -> torch.Tensor:
    """uint8 [elements, bytes per element]."""
    return memory.view(torch.uint8).view(memory.numel(), -1).clone()


def run(backend: str, built: Built) -> torch.Tensor:
    map_kv(built.kvmap, built.source, built.target, built.span, backend)
    return raw(built.target_memory)


@pytest.mark.parametrize("case", [*CASES, *SECONDS], ids=lambda case: case.id)
def test_whole_pool(backend: str, case: Case) -> None:
    built = build(case)
    if backend == "cuda" and case.second.startswith("silu"):
        with pytest.raises(UnavailableError, match="use one of these"):
            run(backend, built)
        return
    before_source, before = raw(built.source_memory), raw(built.target_memory)
    after = run(backend, built)
    expected = expect(case, built)

    assert torch.equal(after[~expected.written], before[~expected.written]), "another slot changed"
    assert torch.equal(raw(built.source_memory), before_source), "the source changed"
    found = built.target_memory.double()[expected.written]
    wanted = expected.values[expected.written]
    if case.verbatim:
        assert torch.equal(found, wanted.to(built.target.dtype).double())
    else:
        error = (found - wanted).abs()
        rounding = torch.finfo(built.target.dtype).eps / 2  # once, to the nearest
        within = error <= ABSOLUTE[case.target.dtype] + wanted.abs() * rounding
        assert bool(within.all()), f"off by {error[~within][0]} at {wanted[~within][0]}"
    assert torch.equal(run(backend, build(case)), after), "a second run gave other bytes"


def test_the_table_names_every_case_once() -> None:
    assert len({case.id for case in (*CASES, *SECONDS)}) == len(CASES) + len(SECONDS)
