"""Which figure of a candidate predicts the gap it recovers (run it through bench.py fits)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from fit_pair import Bench


def predictors(bench: Bench) -> dict[str, float]:
    """Spearman's rank correlation with gap recovered, over all candidates compared."""
    gaps = [row["gap_recovered"] for row in bench.candidates]
    found = {"candidates": float(len(gaps))}
    for name, sign in (("r2_key", 1), ("r2_value", 1), ("attention_cosine", 1), ("nll", -1)):
        found[name] = _spearman([sign * row[name] for row in bench.candidates], gaps)
    return found


def _spearman(one: Sequence[float], other: Sequence[float]) -> float:
    ranks = [np.argsort(np.argsort(each)) for each in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])
