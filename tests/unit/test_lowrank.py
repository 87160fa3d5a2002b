"""Low-rank cuts against the error they are said to lose least of; float8 storage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fit_rows import draw_rows, targets_of

from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.fit.grid import FitGrid
from trtllm_kvmap.fit.lowrank import EVERY_DIRECTION, geometric_mean

ROWS = draw_rows((3, 2, 4), (3, 2, 6))
POOLED = FitConfig(scope="pooled", k=2, ridge=0.02)


def weighed_moments() -> tuple[MomentSet, dict[str, np.ndarray]]:
    """The rows' moments with a random cost of errors for each head, one part a field."""
    rng = np.random.default_rng(5)
    metrics, parts = {}, []
    for part in ROWS.moment_set().parts:
        root = rng.normal(size=(len(part.targets), 6, 6)) * 10.0 ** rng.uniform(-2, 1, size=6)
        metric = root @ root.transpose(0, 2, 1)
        metrics |= dict(zip(part.targets, metric, strict=True))
        parts.append(replace(part, cost=torch.from_numpy(metric)))
    return replace(ROWS.moment_set(), parts=tuple(parts)), metrics


def cost(group, metrics, weight: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """What replacing ``exact`` by ``weight`` costs: by the data, from the rows and the ridge's
    penalty; the squared change of the weight; and by the output, where inputs count by the
    geometric mean of the two and errors by the metric, half and half with themselves.
    """
    x, targets = ROWS.stack(group.slices), targets_of(group)
    x = x - x.mean(0)
    penalty = np.concatenate(
        [
            np.full(v.shape[1], 0.02 * np.mean(((v - v.mean(0)) ** 2).sum(0)))
            for v in (ROWS.values[s] for s in group.slices)
        ]
    )
    rows = np.concatenate([x, np.diag(np.sqrt(penalty))])
    here = np.stack([metrics[t] for t in targets])
    here /= np.diagonal(here, axis1=1, axis2=2).mean()
    metric = np.zeros((6 * len(targets), 6 * len(targets)))
    for number, block in enumerate(here):
        metric[6 * number : 6 * number + 6, 6 * number : 6 * number + 6] = block
    metric += EVERY_DIRECTION * np.eye(len(metric))
    inputs = mean_of(exact.T @ exact, exact.T @ rows.T @ rows @ exact)
    left = np.eye(len(metric)) - np.linalg.pinv(exact) @ weight  # of the outputs
    return {
        "output": float(np.trace(left.T @ inputs @ left @ metric)),
        "data": float(((rows @ (weight - exact)) ** 2).sum()),
        "plain": float(((weight - exact) ** 2).sum()),
    }


def mean_of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A (A^-1 B)^1/2, the geometric mean written the other way."""
    values, vectors = np.linalg.eig(np.linalg.solve(a, b))
    return np.real(a @ (vectors * np.sqrt(values)) @ np.linalg.inv(vectors))


def test_the_geometric_mean_is_the_one_that_solves_its_equation() -> None:
    rng = np.random.default_rng(6)
    a, b = (torch.from_numpy(x @ x.T) for x in rng.normal(size=(2, 5, 5)))
    mean = geometric_mean(a, b)  # the one positive definite X with X A^-1 X = B
    torch.testing.assert_close(mean @ torch.linalg.solve(a, mean), b)
    torch.testing.assert_close(geometric_mean(b, a), mean)
    flat = torch.zeros(5, 5, dtype=torch.float64)
    assert bool(torch.isfinite(geometric_mean(flat, flat)).all())


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_each_cut_loses_least_of_what_it_is_named_after(rank: int) -> None:
    moments, metrics = weighed_moments()
    full = fit(moments, POOLED)
    cut = {
        by: fit(moments, replace(POOLED, rank=rank, cut=by)) for by in ("output", "data", "plain")
    }
    for number, group in enumerate(full.groups):
        exact = group.weight.double().numpy()
        losses = {}
        for by, kvmap in cut.items():
            other = kvmap.groups[number]
            assert other.weight is None
            assert other.second.down.shape[1] == rank
            weight = (other.second.down.double() @ other.second.up.double()).numpy()
            losses[by] = cost(other, metrics, weight, exact)
            mean = ROWS.stack(other.slices).mean(0) @ weight
            bias = ROWS.stack(targets_of(other)).mean(0) - mean
            np.testing.assert_allclose(other.bias, bias, rtol=1e-4, atol=1e-4 * abs(bias).max())
        for by in cut:
            least = min(losses, key=lambda name: losses[name][by])
            assert losses[by][by] <= losses[least][by] * (1 + 1e-4)
        # Eckart and Young: what is lost is the tail of the singular values.
        tail = np.linalg.svd(exact, compute_uv=False)[rank:]
        assert losses["plain"]["plain"] == pytest.approx(float((tail**2).sum()), rel=1e-3)


def test_recorded_r2_is_that_of_the_cut_map() -> None:
    kvmap = fit(ROWS.moment_set(), replace(POOLED, rank=3))
    found = {"key": [], "value": []}
    for group in kvmap.groups:
        truth = ROWS.stack(targets_of(group))
        weight, bias = (t.double().numpy() for t in group.linear())
        error = (truth - ROWS.stack(group.slices) @ weight - bias) ** 2
        spread = (truth - truth.mean(0)) ** 2
        for head in range(len(group.heads)):
            part = slice(6 * head, 6 * head + 6)
            found[group.field].append(1 - error[:, part].sum() / spread[:, part].sum())
    for field, r2 in found.items():
        assert kvmap.fitted["r2"][field]["mean"] == pytest.approx(np.mean(r2), abs=1e-5)


def test_a_rank_that_is_full_changes_nothing() -> None:
    full, same = (fit(ROWS.moment_set(), replace(POOLED, rank=rank)) for rank in (0, 12))
    for one, other in zip(full.groups, same.groups, strict=True):
        assert torch.equal(one.weight, other.weight)
        assert other.second is None


def test_a_rank_beyond_the_matrix_is_refused() -> None:
    moments = ROWS.moment_set()  # pooled over 2 layers: 16 columns to 12
    with pytest.raises(InputError, match=r"rank must be at most 12, got 13: .* 16 x 12"):
        fit(moments, replace(POOLED, rank=13))


def test_output_needs_a_cost() -> None:
    with pytest.raises(MismatchError, match="calibrate with weighting sensitivity or attention"):
        fit(ROWS.moment_set(), replace(POOLED, rank=2, cut="output"))


def test_float8_weights_are_within_their_rounding_and_a_quarter_of_the_size() -> None:
    exact = fit(ROWS.moment_set(), POOLED)
    stored = fit(ROWS.moment_set(), replace(POOLED, dtype="float8_e4m3fn"))
    for one, other in zip(exact.groups, stored.groups, strict=True):
        assert other.weight.dtype == torch.float8_e4m3fn
        wanted = one.weight.double()
        # Three bits of mantissa: half a step is 1/16 of a number; below 2^-6 of a column's scale
        # steps are 2^-9 of it.
        step = wanted.abs() / 16 + other.weight_scale.double() * 2.0**-10
        assert bool(((other.matrix().double() - wanted).abs() <= step * (1 + 1e-6)).all())
        assert float(other.weight.float().abs().amax()) == 448.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": -1}, "rank must not be negative"),
        ({"cut": "query"}, "cut must be one of output, data, plain"),
        ({"rank": 2, "dtype": "float16"}, "stored in float32"),
    ],
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        FitConfig(**options)


def test_a_grid_compares_every_cut_of_every_rank_and_full_matrices_once() -> None:
    grid = FitGrid(scope=("copy", "pooled"), k=(3,), rank=(0, 2, 4), cut=("plain", "output"))
    found = [(c.scope, c.rank, c.cut) for c in grid.candidates()]
    low = [("pooled", rank, cut) for rank in (2, 4) for cut in ("plain", "output")]
    assert found == [("copy", 0, "plain"), ("pooled", 0, "plain"), *low]


def test_a_grid_names_a_bad_cut() -> None:
    with pytest.raises(InputError, match="cut must be one of output, data, plain; got 'query'"):
        FitGrid(rank=(2,), cut=("query",)).candidates()
