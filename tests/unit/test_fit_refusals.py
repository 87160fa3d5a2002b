"""Every way to ask a fit for the impossible."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fit_rows import EQUAL, OTHER_HEADS, OTHER_WIDTH, draw_rows

from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.errors import InputError, MismatchError, NumericsError
from trtllm_kvmap.fit import FitConfig, fit


def with_first_part(moments: MomentSet, **changes: object) -> MomentSet:
    part = moments.parts[0]
    part = replace(part, moments=replace(part.moments, **changes))
    return replace(moments, parts=(part, *moments.parts[1:]))


def test_damaged_moments_are_refused() -> None:
    moments = draw_rows(*EQUAL).moment_set()
    for value in (float("nan"), float("inf"), float("-inf")):
        cross = moments.parts[0].moments.cross.clone()
        cross[3, 2] = value
        with pytest.raises(NumericsError, match=r"keys of target layers 0 to 3.*NaN"):
            fit(with_first_part(moments, cross=cross), FitConfig(n=2))
    with pytest.raises(NumericsError, match="no tokens"):
        fit(with_first_part(moments, count=0), FitConfig(n=2))


def test_weights_that_overflow_their_type_are_refused() -> None:
    rows = draw_rows(*EQUAL)
    rows.values = {s: x * (1e6 if s.origin == "target" else 1.0) for s, x in rows.values.items()}
    config = FitConfig(scope="head", k=1, dtype="float16")
    with pytest.raises(NumericsError, match="do not fit into float16"):
        fit(rows.moment_set(), config)
    stored = fit(rows.moment_set(), replace(config, dtype="bfloat16")).groups[0]
    assert stored.weight is not None
    assert stored.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("options", [{}, {"scope": "pooled", "k": 2}, {"scope": "head", "k": 1}])
def test_a_map_that_would_read_nothing_is_refused(options: dict, dtype: str) -> None:
    moments = draw_rows(*OTHER_WIDTH).moment_set()
    with pytest.raises(NumericsError, match=r"weights for .* are zero: with a ridge of 1e\+300"):
        fit(moments, FitConfig(**options, dtype=dtype, ridge=1e300))
    with pytest.raises(NumericsError, match="would read nothing"):
        fit(moments, FitConfig(**options, rank=2, ridge=1e300))


@pytest.mark.parametrize(
    ("shapes", "config", "reason"),
    [
        (OTHER_HEADS, FitConfig(scope="copy"), "copy needs equal.*slice"),
        (OTHER_WIDTH, FitConfig(scope="copy"), "copy needs equal.*slice"),
        (OTHER_HEADS, FitConfig(scope="head"), "head needs equally many.*slice"),
        (EQUAL, FitConfig(fields="both"), "calibrate with joint"),
    ],
)
def test_a_pair_that_a_scope_does_not_fit_is_refused(shapes, config, reason: str) -> None:
    with pytest.raises(MismatchError, match=reason):
        fit(draw_rows(*shapes).moment_set(), config)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scope": "best"}, "copy, head, pooled, slice"),
        ({"scope": "slice", "n": 9}, "n must be at most 8: 9 slices"),
        ({"scope": "pooled", "k": 4}, "k must be at most 3: 4 layers"),
        ({"k": 0}, "k must be at least 1"),
        ({"n": -1}, "n must be at least 1"),
        ({"ridge": -0.1}, "ridge must be"),
        ({"ridge": float("nan")}, "ridge must be"),
        ({"fields": "all"}, "fields must be one of same, both"),
        ({"dtype": "int8"}, "dtype must be one of float32"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options, reason: str) -> None:
    moments = draw_rows(*EQUAL).moment_set()
    with pytest.raises(InputError, match=reason):
        fit(moments, FitConfig(**options))


def test_shards_must_belong_together_and_cover_the_target() -> None:
    rows = draw_rows(*EQUAL)
    band = rows.moment_set(layers=range(2))
    with pytest.raises(MismatchError, match="do not cover target layers 2, 3"):
        fit(band, FitConfig(n=2))
    with pytest.raises(InputError, match="No moments"):
        fit([], FitConfig(n=2))
    stranger = replace(band, source_fingerprint=band.target_fingerprint)
    with pytest.raises(MismatchError, match="different models"):
        fit([band, stranger], FitConfig(n=2))


def test_two_files_of_the_same_columns_are_told_apart_from_shards() -> None:
    rows = draw_rows(*EQUAL)
    shards = [rows.moment_set(layers=band) for band in (range(3), range(2, 4))]
    with pytest.raises(MismatchError, match=r"same columns \(keys and values of target layer 2,"):
        fit(shards, FitConfig(n=2))
    whole = replace(rows.moment_set(), record={"documents": 1, "tokens": 1, "text": []})
    with pytest.raises(MismatchError, match="Give one of the two, or add them up"):
        fit([whole, whole], FitConfig(n=2))
    once, twice = (fit(moments, FitConfig(n=2)) for moments in (whole, whole + whole))
    for a, b in zip(once.groups, twice.groups, strict=True):  # as the message has it
        if a.weight is not None:
            torch.testing.assert_close(a.weight, b.weight)


def test_moments_sharded_by_head_serve_head_and_slice_but_not_pooled() -> None:
    rows = draw_rows(*EQUAL)
    parts = []
    for field in ("key", "value"):
        for head in (0, 1):
            mine = [s for s in rows.values if (s.field, s.head) == (field, head)]
            targets = tuple(s for s in mine if s.origin == "target")
            slices = tuple(s for s in mine if s.origin == "source") + targets[:1]
            parts.append(rows.part(slices, targets))
    moments = replace(rows.moment_set(), parts=tuple(parts))
    config = FitConfig(scope="head", k=2)
    whole, sharded = fit(rows.moment_set(), config), fit(moments, config)
    for a, b in zip(whole.groups, sharded.groups, strict=True):
        assert (a.field, a.layer, a.heads, a.slices) == (b.field, b.layer, b.heads, b.slices)
        assert torch.equal(a.weight, b.weight)
    sliced = fit(moments, FitConfig(n=2))
    assert all({s.head for s in g.slices} == set(g.heads) for g in sliced.groups)
    with pytest.raises(MismatchError, match="sharded by head"):
        fit(moments, FitConfig(scope="pooled", k=2))
