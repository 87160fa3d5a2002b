"""How much one source layer explains, against least squares on the rows themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fit_rows import Rows, draw_rows, least_squares, make_spec

from trtllm_kvmap.fit.layer_r2 import layer_r2, layer_r2_flops
from trtllm_kvmap.spec.slices import FIELDS, Slice

RIDGE = 1e-2


@pytest.fixture(scope="module")
def rows() -> Rows:
    return draw_rows((3, 2, 4), (2, 2, 6))


def expected(rows: Rows, field: str, target: int, source: int) -> float:
    read = tuple(Slice("source", field, source, head) for head in range(2))
    targets = tuple(Slice("target", field, target, head) for head in range(2))
    weight, bias, _ = least_squares(rows, read, targets, RIDGE)
    y = rows.stack(targets)
    left = y - rows.stack(read) @ weight - bias
    return float(1 - (left**2).sum() / ((y - y.mean(0)) ** 2).sum())


@pytest.mark.parametrize("joint", [False, True])
def test_every_cell_is_a_ridge_of_one_layer(rows: Rows, joint: bool) -> None:
    found = layer_r2(rows.moment_set(joint=joint), RIDGE)
    for field in FIELDS:
        wanted = [[expected(rows, field, t, s) for s in range(3)] for t in range(2)]
        assert found[field] == [pytest.approx(row, abs=6e-5) for row in wanted]  # four digits
    assert np.ptp(found["key"]) > 0.01


def test_bands_of_target_layers_are_put_together(rows: Rows) -> None:
    bands = [rows.moment_set(layers=range(i, i + 1)) for i in range(2)]
    assert layer_r2(bands, RIDGE) == layer_r2(rows.moment_set(), RIDGE)


def test_the_work_is_a_factor_and_two_solves_a_layer() -> None:
    source, target = make_spec("small", 3, 2, 4), make_spec("large", 5, 2, 6)
    factor, solve = 8**3 / 3, 8**2 * (5 * 2 * 6)
    assert layer_r2_flops(source, target) == pytest.approx(2 * 3 * (factor + 2 * solve))


def test_what_the_moments_do_not_hold_together_is_none(rows: Rows) -> None:
    moments = rows.moment_set()
    kept = []
    for part in moments.parts:
        field = part.targets[0].field
        slices = tuple(s for s in rows.slices("source", field) if s.layer != 1)
        kept.append(rows.part(slices, part.targets))
    found = layer_r2(replace(moments, parts=tuple(kept)), RIDGE)
    assert [row[1] for row in found["key"]] == [None, None]
    assert None not in [row[0] for row in found["key"]]
