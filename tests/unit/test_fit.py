"""Every scope against least squares on the rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fit_rows import EQUAL, OTHER_HEADS, OTHER_WIDTH, Rows, draw_rows, least_squares, targets_of

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.fit import SCOPES, FitConfig, fit
from trtllm_kvmap.spec.slices import Slice, nearest_depth

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


@pytest.mark.parametrize("value", [0.0, 4.1])
def test_a_target_head_that_never_varies_needs_no_weights(value: float) -> None:
    rows = draw_rows(*OTHER_WIDTH)
    still = Slice("target", "value", 2, 1)
    rows.values[still] = np.full_like(rows.values[still], value)
    kvmap = fit(rows.moment_set(), FitConfig(scope="head", k=2, dtype="float16"))
    (group,) = [g for g in kvmap.groups if still in targets_of(g)]
    assert not group.weight.any()  # rounding is all there is, and float16 has no such numbers
    np.testing.assert_allclose(group.bias, value, rtol=1e-6)
