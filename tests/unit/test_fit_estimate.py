"""Fit estimates against the maps that come out, and against each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fit_rows import draw_rows, make_spec

from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.fit.estimate import EIGEN, FitEstimate, estimate_fit

SOURCE, TARGET = make_spec("small", 24, 2, 64), make_spec("large", 28, 2, 128)


def estimate(config: FitConfig, available: int = 10**12) -> FitEstimate:
    return estimate_fit(SOURCE, TARGET, config, flops_per_second=5e10, available=available)


@pytest.mark.parametrize(
    "config",
    [
        FitConfig(scope="copy"),
        FitConfig(scope="head", k=2),
        FitConfig(scope="pooled", k=3),
        FitConfig(scope="slice", n=3, own_slices=False),
        FitConfig(scope="slice", n=3, own_slices=False, fields="both"),
        FitConfig(scope="head", k=2, fields="both"),
        FitConfig(scope="pooled", k=3, dtype="bfloat16"),
        FitConfig(scope="pooled", k=2, rank=5, cut="plain"),
        FitConfig(scope="head", k=2, rank=3),
        FitConfig(scope="head", k=2, rank=4),  # no cut at all
    ],
)
def test_the_map_is_as_large_as_estimated(config: FitConfig) -> None:
    rows = draw_rows((3, 2, 4), (4, 2, 4))
    cost = estimate_fit(rows.source, rows.target, config, flops_per_second=1e9, available=10**9)
    moments = rows.moment_set(joint=config.fields == "both")
    weights = [g.weight for g in fit(moments, config).groups if g.weight is not None]
    for group in fit(moments, config).groups:
        if group.second is not None:
            weights += [group.second.down, group.second.offset, group.second.up]
    assert cost.map_bytes == sum(w.numel() * w.element_size() for w in weights)
    large = [t for p in moments.parts for t in (p.moments.gram, p.moments.cross)]
    assert cost.memory_bytes >= cost.map_bytes + sum(t.numel() * t.element_size() for t in large)


def test_time_follows_the_work() -> None:
    ordered = [
        FitConfig(scope="copy"),
        FitConfig(scope="head", k=4),
        FitConfig(scope="slice", n=4),
        FitConfig(scope="slice", n=12),
        FitConfig(scope="pooled", k=12),
    ]
    seconds = [estimate(config).seconds for config in ordered]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == len(seconds)
    # All layers need no search, so they are cheaper than half of them.
    assert estimate(FitConfig(scope="pooled", k=24)).seconds < seconds[-1]


@pytest.mark.parametrize("cut", ["plain", "data", "output"])
def test_every_decomposition_of_a_cut_is_counted(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cut adds is at least all that is decomposed, and not twice that at a width at which
    nothing else counts.
    """
    rows = draw_rows((2, 2, 32), (2, 2, 32))
    moments, eigh, widths = rows.moment_set(), torch.linalg.eigh, []
    if cut == "output":
        cost = torch.eye(32, dtype=torch.float64)
        parts = [replace(p, cost=cost.repeat(len(p.targets), 1, 1)) for p in moments.parts]
        moments = replace(moments, parts=tuple(parts))
    monkeypatch.setattr(torch.linalg, "eigh", lambda a: widths.append(len(a)) or eigh(a))
    config = FitConfig(scope="pooled", k=1, rank=7, cut=cut)
    fit(moments, config)
    costs = [
        estimate_fit(rows.source, rows.target, each, flops_per_second=1.0, available=10**9)
        for each in (config, replace(config, rank=0))
    ]
    added = costs[0].seconds - costs[1].seconds
    decomposed = EIGEN * sum(width**3 for width in widths)
    assert decomposed < added < 2 * decomposed
    assert costs[0].memory_bytes - costs[0].map_bytes > costs[1].memory_bytes - costs[1].map_bytes


def test_too_little_memory_is_said() -> None:
    cost = estimate(FitConfig(), available=10**8)
    assert "more memory than the 100 MB at hand" in cost.sentences()[-1]
    assert len(estimate(FitConfig()).sentences()) == 1
