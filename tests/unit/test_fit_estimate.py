"""Fit estimates against the maps that come out, and against each other."""

from __future__ import annotations

import pytest
from fit_rows import draw_rows, make_spec

from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.fit.estimate import FitEstimate, estimate_fit

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
    ],
)
def test_the_map_is_as_large_as_estimated(config: FitConfig) -> None:
    rows = draw_rows((3, 2, 4), (4, 2, 4))
    cost = estimate_fit(rows.source, rows.target, config, flops_per_second=1e9, available=10**9)
    moments = rows.moment_set(joint=config.fields == "both")
    weights = [g.weight for g in fit(moments, config).groups if g.weight is not None]
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


def test_too_little_memory_is_said() -> None:
    cost = estimate(FitConfig(), available=10**8)
    assert "more memory than the 100 MB at hand" in cost.sentences()[-1]
    assert len(estimate(FitConfig()).sentences()) == 1
