"""Every scope against least squares on the rows, the greedy search against brute force, and every
refusal.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fit_rows import Rows, draw_rows, least_squares, targets_of

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.errors import InputError, MismatchError, NumericsError
from trtllm_kvmap.fit import SCOPES, FitConfig, fit
from trtllm_kvmap.fit.centred import CentredPart
from trtllm_kvmap.fit.ridge import factorise
from trtllm_kvmap.fit.selection import select_blocks
from trtllm_kvmap.spec.slices import Slice, nearest_depth

EQUAL = ((3, 2, 4), (4, 2, 4))
OTHER_WIDTH = ((3, 2, 4), (4, 2, 6))
OTHER_HEADS = ((3, 2, 4), (2, 3, 6))
SOLVED = [
    pytest.param(OTHER_WIDTH, FitConfig(scope="head", k=2, ridge=0.02), id="head"),
    pytest.param(OTHER_WIDTH, FitConfig(scope="pooled", k=2, ridge=0.02), id="pooled"),
    pytest.param(OTHER_HEADS, FitConfig(scope="pooled", k=3, ridge=0.02), id="pooled-all"),
    pytest.param(OTHER_HEADS, FitConfig(scope="slice", n=3, ridge=0.02), id="slice"),
    pytest.param(
        OTHER_HEADS, FitConfig(scope="slice", n=3, ridge=0.02, own_slices=False), id="slice-source"
    ),
    pytest.param(
        OTHER_HEADS, FitConfig(scope="slice", n=4, ridge=0.02, fields="both"), id="slice-both"
    ),
]


def predict(rows: Rows, group: HeadGroup) -> np.ndarray:
    x = rows.stack(group.slices)
    if group.weight is None or group.bias is None:
        return x
    return x @ group.weight.double().numpy() + group.bias.double().numpy()


@pytest.mark.parametrize(("shapes", "config"), SOLVED)
def test_every_group_is_the_least_squares_answer_on_the_rows(shapes, config: FitConfig) -> None:
    rows = draw_rows(*shapes)
    kvmap = fit(rows.moment_set(joint=config.fields == "both"), config)
    learned = [group for group in kvmap.groups if group.weight is not None]
    assert len(learned) >= kvmap.target.num_layers - 1
    for group in learned:
        weight, bias, _ = least_squares(rows, group.slices, targets_of(group), config.ridge)
        assert torch.is_tensor(group.weight)
        assert torch.is_tensor(group.bias)
        assert (group.weight.dtype, group.bias.dtype) == (torch.float32, torch.float32)
        np.testing.assert_allclose(group.weight, weight, rtol=1e-5, atol=1e-6 * abs(weight).max())
        np.testing.assert_allclose(group.bias, bias, rtol=1e-5, atol=1e-5 * abs(bias).max())


@pytest.mark.parametrize("scope", SCOPES)
def test_recorded_r2_is_the_r2_of_the_rows(scope: str) -> None:
    rows = draw_rows(*EQUAL)
    kvmap = fit(rows.moment_set(), FitConfig(scope=scope, k=2, n=3, ridge=0.05))
    per_head: dict[tuple[str, int], list[float]] = {}
    for group in kvmap.groups:
        truth = rows.stack(targets_of(group))
        error = ((truth - predict(rows, group)) ** 2).sum(0).reshape(len(group.heads), -1).sum(1)
        spread = ((truth - truth.mean(0)) ** 2).sum(0).reshape(len(group.heads), -1).sum(1)
        per_head.setdefault((group.field, group.layer), []).extend(1 - error / spread)
    for field in ("key", "value"):
        layers = [per_head[field, layer] for layer in range(kvmap.target.num_layers)]
        recorded = kvmap.fitted["r2"][field]
        assert recorded["mean"] == pytest.approx(np.mean(layers), abs=1e-6)
        assert recorded["worst"] == pytest.approx(np.min(layers), abs=1e-6)
        assert recorded["per_layer"] == pytest.approx(np.mean(layers, axis=1), abs=1e-6)


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


@pytest.mark.parametrize("scope", ["head", "pooled", "slice"])
def test_an_exactly_linear_map_is_recovered(scope: str) -> None:
    rows = draw_rows((3, 2, 4), (3, 2, 6), noise=1.0)
    rng = np.random.default_rng(5)
    for t in [s for s in rows.values if s.origin == "target"]:
        near = nearest_depth(t.layer, 3, 3)
        slices = (Slice("source", t.field, near, t.head),)
        rows.values[t] = rows.stack(slices) @ rng.normal(size=(4, 6)) + rng.normal(size=6)
    kvmap = fit(rows.moment_set(), FitConfig(scope=scope, k=1, n=1, ridge=1e-9, own_slices=False))
    for group in kvmap.groups:
        truth = rows.stack(targets_of(group))
        np.testing.assert_allclose(predict(rows, group), truth, atol=1e-5 * abs(truth).max())
    assert kvmap.fitted["r2"]["key"]["worst"] == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("scope", ["head", "pooled", "slice"])
def test_noise_explains_nothing(scope: str) -> None:
    rows = draw_rows((2, 1, 4), (2, 1, 4), tokens=20_000)
    rng = np.random.default_rng(7)
    rows.values = {s: rng.normal(size=x.shape) + 5 for s, x in rows.values.items()}
    r2 = fit(rows.moment_set(), FitConfig(scope=scope, k=2, n=2, own_slices=False)).fitted["r2"]
    for field in ("key", "value"):
        # Chance alone explains columns / tokens = 8 / 20,000.
        assert 0 < r2[field]["worst"] <= r2[field]["mean"] < 0.002


@pytest.mark.parametrize("scope", ["head", "pooled", "slice"])
def test_the_units_of_a_slice_do_not_matter(scope: str) -> None:
    rows = draw_rows((3, 2, 4), (2, 2, 6))
    config = FitConfig(scope=scope, k=2, n=3, ridge=0.3, own_slices=False)
    small = Slice("source", "value", 1, 0)
    before = fit(rows.moment_set(), config)
    rows.values[small] = rows.values[small] / 4096
    after = fit(rows.moment_set(), config)
    assert [g.slices for g in after.groups] == [g.slices for g in before.groups]
    assert after.fitted["r2"]["value"]["per_layer"] == pytest.approx(
        before.fitted["r2"]["value"]["per_layer"], abs=1e-9
    )


def test_layer_0_of_the_target_is_its_own_slice() -> None:
    rows = draw_rows(*OTHER_HEADS)
    kvmap = fit(rows.moment_set(), FitConfig(scope="slice", n=2, ridge=0.1))
    for group in kvmap.groups:
        if group.layer == 0:
            assert group.weight is None
            assert group.slices == targets_of(group)
            assert group.heads == (0, 1, 2)
    assert kvmap.fitted["r2"]["key"]["per_layer"][0] == pytest.approx(1.0, abs=1e-12)
    assert kvmap.reads_token_ids
    assert kvmap.token_table is not None


def test_selection_finds_an_exact_slice_by_itself() -> None:
    rows = draw_rows(*OTHER_HEADS)
    slices = rows.slices("source", "key") + rows.slices("target", "key")[:3]
    moments = rows.part(slices, slices[-1:]).moments
    for sums, name in ((moments.source_sum, "gram"), (moments.target_sum, "cross")):
        getattr(moments, name).addr_(moments.source_sum, sums, alpha=-1 / moments.count)
    moments.gram.diagonal().mul_(1.001)
    widths = [rows.values[s].shape[1] for s in slices]
    assert select_blocks(moments.gram, moments.cross, widths, 1) == [len(slices) - 1]


def test_a_map_without_own_slices_carries_no_token_table_but_the_sinks() -> None:
    moments = draw_rows(*EQUAL).moment_set()
    kvmap = fit(moments, FitConfig(scope="head", k=1))
    assert kvmap.token_table is None
    assert kvmap.sinks == moments.sinks


def test_copy_reads_the_nearest_depth_unchanged() -> None:
    kvmap = fit(draw_rows(*EQUAL).moment_set(), FitConfig(scope="copy"))
    assert kvmap.num_parameters == 0
    layers = {0: 0, 1: 1, 2: 1, 3: 2}  # middles of 4 layers over 3: 0.375, 1.125, 1.875, 2.625
    for group in kvmap.groups:
        expected = [Slice("source", group.field, layers[group.layer], head) for head in (0, 1)]
        assert list(group.slices) == expected


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    for name in "ab":
        fit(draw_rows(*OTHER_HEADS).moment_set(), FitConfig(n=3)).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    loaded = KvMap.load(tmp_path / "a", allow_unproven=True)
    assert loaded.fitted["config"] == {
        "scope": "slice",
        "k": 4,
        "n": 3,
        "ridge": 1e-3,
        "fields": "same",
        "own_slices": True,
        "rank": 0,
        "cut": "data",
        "dtype": "float32",
    }
    assert loaded.fitted["moments"] == [{"documents": 1, "tokens": 400}]


@pytest.mark.parametrize("scope", SCOPES)
def test_layer_bands_fit_to_the_same_map(scope: str, tmp_path: Path) -> None:
    rows, config = draw_rows(*EQUAL), FitConfig(scope=scope, k=2, n=3)
    whole = fit(rows.moment_set(), config)
    bands = (rows.moment_set(layers=band) for band in (range(2, 4), range(2)))
    joined = replace(fit(bands, config), fitted=whole.fitted)
    whole.save(tmp_path / "whole")
    joined.save(tmp_path / "joined")
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "joined").read_bytes()


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


@pytest.mark.parametrize("value", [0.0, 4.1])
def test_a_target_head_that_never_varies_needs_no_weights(value: float) -> None:
    rows = draw_rows(*OTHER_WIDTH)
    still = Slice("target", "value", 2, 1)
    rows.values[still] = np.full_like(rows.values[still], value)
    kvmap = fit(rows.moment_set(), FitConfig(scope="head", k=2, dtype="float16"))
    (group,) = [g for g in kvmap.groups if still in targets_of(g)]
    assert not group.weight.any()  # rounding is all there is, and float16 has no such numbers
    np.testing.assert_allclose(group.bias, value, rtol=1e-6)


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
