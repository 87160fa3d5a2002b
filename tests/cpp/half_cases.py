"""The conformance cases as tensor cores see them: weights and pools in half precision, and what the
one extra rounding, of un-rotated inputs in the workspace, may add.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "conformance"))

from case_build import Built, build, views_of
from cases import Case, Side
from expected import ABSOLUTE, Expected, _content, expect


def with_dtype(case: Case, dtype: str) -> Case:
    """The case with caches of ``dtype`` in place of float32 ones."""

    def side(given: Side) -> Side:
        return replace(given, dtype=dtype) if given.dtype == "float32" else given

    return replace(case, source=side(case.source), target=side(case.target))


def with_heads_of_64(case: Case) -> Case:
    """The case with source heads of 64 channels where they have 32, as much of them rotated."""
    given = case.source
    if given.head_dim != 32 or given.rope.kind == "longrope":
        return case
    rope = replace(given.rope, rotary_dim=2 * given.rope.rotary_dim)
    return replace(case, source=replace(given, head_dim=64, rope=rope))


def build_rounded(case: Case, dtype: torch.dtype) -> Built:
    """The case's tensors, with a map whose weights ``dtype`` holds exactly."""
    built = build(case)
    groups = tuple(
        g
        if g.weight is None or g.weight_scale is not None
        else replace(g, weight=g.weight.to(dtype).float())
        for g in built.kvmap.groups
    )
    return replace(built, kvmap=replace(built.kvmap, groups=groups))


def workspace_error(case: Case, built: Built, dtype: torch.dtype) -> torch.Tensor:
    """What rounding each input once to ``dtype`` may add to each element of the flat target memory,
    in its own unit: sum_i eps/2 |x_i| |W_i|, and for a key that of both channels of its pair.
    """
    errors = torch.zeros(built.target_memory.numel(), dtype=torch.float64)
    views = views_of(case.target, case, errors)
    span, dim, rope = built.span, case.target.head_dim, built.kvmap.target.rope
    kept = (span.source_slots >= 0) & (span.target_slots >= 0)
    for group in built.kvmap.groups:
        matrix = group.matrix()
        if matrix is None:
            continue
        x = torch.cat([_content(s, built, kept, True) for s in group.slices], dim=1)
        error = x.abs() @ matrix.double().abs() * (torch.finfo(dtype).eps / 2)
        field = 0 if group.field == "key" else 1
        scale = (built.target.key_scale, built.target.value_scale)[field]
        for number, head in enumerate(group.heads):
            y = error[:, number * dim : (number + 1) * dim].clone()
            if group.field == "key":
                half = rope.rotary_dim // 2
                a = torch.arange(half) * (2 if rope.interleaved else 1)
                b = a + (1 if rope.interleaved else half)
                y[:, a] = y[:, b] = rope.attention_factor * (y[:, a] + y[:, b])
            for token, slot in enumerate(span.target_slots[kept].tolist()):
                block, offset = divmod(slot, views[field][group.layer].shape[2])
                views[field][group.layer][block, head, offset] = y[token] / scale
    return errors


def compare(
    case: Case,
    built: Built,
    before: torch.Tensor,
    expected: Expected,
    extra: torch.Tensor | float = 0.0,
) -> None:
    """The whole target memory against what must be in it; ``before`` is raw(...) of then."""
    after = raw(built.target_memory)
    assert torch.equal(after[~expected.written], before[~expected.written]), "another slot changed"
    found = built.target_memory.double()[expected.written]
    wanted = expected.values[expected.written]
    if case.verbatim:
        assert torch.equal(found, wanted.to(built.target.dtype).double())
        return
    allowed = ABSOLUTE[case.target.dtype] + wanted.abs() * torch.finfo(built.target.dtype).eps
    if isinstance(extra, torch.Tensor):
        # A result pushed across a power of two is rounded more coarsely: eps of the result itself.
        allowed = allowed + extra[expected.written] * (1 + torch.finfo(built.target.dtype).eps)
    within = (found - wanted).abs() <= allowed
    assert bool(within.all()), (
        f"{int((~within).sum())} of {within.numel()} are off, the first {found[~within][0]} "
        f"for {wanted[~within][0]}"
    )


def raw(memory: torch.Tensor) -> torch.Tensor:
    """uint8 [elements, bytes per element]."""
    return memory.view(torch.uint8).view(memory.numel(), -1).clone()


__all__ = [
    "build",
    "build_rounded",
    "compare",
    "expect",
    "raw",
    "with_dtype",
    "with_heads_of_64",
    "workspace_error",
]
