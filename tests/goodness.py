"""A chi-square test of goodness of fit (Pearson 1900), for samplers with a fixed seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def require_distribution(
    counts: Sequence[int], expected: Sequence[float], significance: float = 1e-3
) -> None:
    """Fail unless ``counts`` may have been drawn from the probabilities ``expected``.

    Outcomes of probability zero must not occur; outcomes expected fewer than five times are taken
    together.
    """
    drawn = torch.tensor(counts, dtype=torch.float64)
    wanted = torch.tensor(expected, dtype=torch.float64) * drawn.sum()
    assert not bool((drawn[wanted == 0] > 0).any()), "drew what has no probability"
    rare = wanted < 5
    drawn, wanted = (torch.cat([part[~rare], part[rare].sum()[None]]) for part in (drawn, wanted))
    drawn, wanted = drawn[wanted > 0], wanted[wanted > 0]
    statistic = ((drawn - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor(len(drawn) - 1, dtype=torch.float64)
    assert freedom > 0, "too few draws to say anything"
    chance = float(torch.special.gammaincc(freedom / 2, statistic / 2))
    assert chance > significance, f"chi-square {float(statistic):.1f}, p = {chance:.2g}"
