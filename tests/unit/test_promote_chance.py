"""How often a map that is no better passes a trial, and that FEWEST keeps it rare."""

from __future__ import annotations

from math import gamma, pi, sqrt

import numpy as np
import pytest

from trtllm_kvmap.evaluate.bootstrap import draw, figure
from trtllm_kvmap.evaluate.promote import FEWEST


def by_chance(count: int) -> float:
    """The upper tail of Student's t with count - 1 degrees of freedom, from its density, above
    where an interval of 95 % that takes the spread for sqrt((n - 1) / n) of itself ends at zero.
    """
    free = count - 1
    ts = np.linspace(0, 1.96 * sqrt(free / count), 20_001)
    scale = gamma((free + 1) / 2) / (sqrt(free * pi) * gamma(free / 2))
    density = scale * (1 + ts**2 / free) ** (-(free + 1) / 2)
    return 0.5 - float(((density[1:] + density[:-1]) / 2 * np.diff(ts)).sum())


def test_each_half_has_the_fewest_prompts_that_pass_by_chance_in_a_twentieth_of_trials() -> None:
    assert by_chance(FEWEST // 2) <= 0.05 < by_chance(FEWEST // 2 - 1)


@pytest.mark.parametrize(("count", "within"), [(4, 0.03), (FEWEST // 2, 0.012)])
def test_the_bootstrap_passes_about_as_often(count: int, within: float) -> None:
    rng, counts = np.random.default_rng(count), draw(count, 400, 0)
    trials = rng.normal(size=(3000, count)) @ counts.T / count
    passed = sum((figure(trial).low or 0.0) > 0 for trial in trials) / len(trials)
    assert passed == pytest.approx(by_chance(count), abs=within)
