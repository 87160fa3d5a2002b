"""Which slices a fit chooses: the greedy search against brute force; slices that add nothing."""

from __future__ import annotations

import numpy as np
import pytest
from fit_rows import OTHER_HEADS, Rows, draw_rows, least_squares, targets_of

from trtllm_kvmap.errors import NumericsError
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.fit.centred import CentredPart
from trtllm_kvmap.fit.ridge import factorise
from trtllm_kvmap.fit.selection import select_blocks
from trtllm_kvmap.spec.slices import Slice


def greedy(rows: Rows, blocks: list[tuple[Slice, ...]], targets, count: int, ridge: float):
    """Forward selection the slow way: least squares on the rows for every possible next block."""
    chosen: list[tuple[Slice, ...]] = []
    for _ in range(count):
        left = [block for block in blocks if block not in chosen]
        objectives = [
            least_squares(rows, sum([*chosen, block], ()), targets, ridge)[2] for block in left
        ]
        chosen.append(left[int(np.argmin(objectives))])
    return sum(chosen, ())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_slice_selection_equals_brute_force(seed: int, ridge: float) -> None:
    rows = draw_rows((3, 2, 4), (3, 2, 6), seed=seed)
    kvmap = fit(rows.moment_set(), FitConfig(scope="slice", n=4, ridge=ridge))
    checked = 0
    for group in kvmap.groups:
        if group.layer == 0:
            continue
        readable = rows.slices("source", group.field)
        readable += tuple(s for s in rows.slices("target", group.field) if s.layer == 0)
        expected = greedy(rows, [(s,) for s in readable], targets_of(group), 4, ridge)
        assert group.slices == expected
        checked += 1
    assert checked == 2 * 2 * 2


@pytest.mark.parametrize("scope", ["head", "pooled"])
def test_layer_selection_equals_brute_force(scope: str) -> None:
    rows = draw_rows((4, 2, 4), (2, 2, 6), seed=3)
    kvmap = fit(rows.moment_set(), FitConfig(scope=scope, k=2, ridge=0.03))
    for group in kvmap.groups:
        heads = (0, 1) if scope == "pooled" else group.heads
        blocks = [
            tuple(Slice("source", group.field, layer, head) for head in heads) for layer in range(4)
        ]
        assert group.slices == greedy(rows, blocks, targets_of(group), 2, 0.03)
        assert group.heads == ((0, 1) if scope == "pooled" else group.heads[:1])


def test_both_fields_are_read_when_they_help() -> None:
    rows = draw_rows(*OTHER_HEADS)
    kvmap = fit(rows.moment_set(joint=True), FitConfig(scope="slice", n=4, fields="both"))
    crossing = [s for g in kvmap.groups for s in g.slices if s.field != g.field]
    assert crossing
    same = fit(rows.moment_set(joint=True), FitConfig(scope="slice", n=4))
    assert same.groups[-1].slices == fit(rows.moment_set(), FitConfig(n=4)).groups[-1].slices
    assert all(s.field == g.field for g in same.groups for s in g.slices)


def test_selection_finds_an_exact_slice_by_itself() -> None:
    rows = draw_rows(*OTHER_HEADS)
    slices = rows.slices("source", "key") + rows.slices("target", "key")[:3]
    moments = rows.part(slices, slices[-1:]).moments
    for sums, name in ((moments.source_sum, "gram"), (moments.target_sum, "cross")):
        getattr(moments, name).addr_(moments.source_sum, sums, alpha=-1 / moments.count)
    moments.gram.diagonal().mul_(1.001)
    widths = [rows.values[s].shape[1] for s in slices]
    assert select_blocks(moments.gram, moments.cross, widths, 1) == [len(slices) - 1]


def test_a_constant_slice_is_passed_over() -> None:
    rows = draw_rows(*OTHER_HEADS)
    constant = Slice("source", "key", 1, 1)
    rows.values[constant] = np.full_like(rows.values[constant], 7.3)
    for config in (FitConfig(scope="pooled", k=3), FitConfig(scope="slice", n=9)):
        kvmap = fit(rows.moment_set(), config)
        assert constant not in [s for g in kvmap.groups for s in g.slices]


def test_duplicate_slices_are_passed_over_without_a_ridge() -> None:
    rows = draw_rows((3, 1, 4), (2, 1, 4))
    for field in ("key", "value"):
        first = rows.values[Slice("source", field, 0, 0)]
        rows.values[Slice("source", field, 1, 0)] = first[:, ::-1] * 2
    config = FitConfig(scope="slice", n=2, ridge=0.0, own_slices=False)
    for group in fit(rows.moment_set(), config).groups:
        assert {s.layer for s in group.slices} in ({0, 2}, {1, 2})
    with pytest.raises(NumericsError, match="Raise the ridge"):
        fit(rows.moment_set(), FitConfig(scope="pooled", k=3, ridge=0.0))


@pytest.mark.parametrize("seed", range(6))
def test_a_dependent_slice_is_found_however_its_pivots_round(seed: int) -> None:
    """Without a ridge the factor of dependent columns exists half the time, made of rounding."""
    rows, rng = draw_rows((3, 1, 4), (1, 1, 4), seed=seed), np.random.default_rng(seed)
    first, second, third = rows.slices("source", "key")
    rows.values[second][:, 3] = rows.values[first] @ rng.normal(size=4)
    part = rows.part((first, second, third), rows.slices("target", "key"))
    centred = CentredPart(part, rows.source, rows.target)
    with pytest.raises(NumericsError, match="singular: 2 slices with 8 columns, 400 tokens"):
        factorise(centred, (first, second), 0.0, part.targets)
    chosen = select_blocks(
        centred.gram(part.slices), centred.cross(part.slices, part.targets), [4, 4, 4], 3
    )
    assert sorted(chosen) in ([0, 2], [1, 2])
