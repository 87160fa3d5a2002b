"""Paired bootstrap over items (Efron 1979): whole items are drawn again, so that the questions of
one document stay together and every arm is judged on the same draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

TAIL = 2.5  # percent left out at each end of an interval: 95 % lies inside


@dataclass(frozen=True, slots=True)
class Figure:
    """A value with its 95 % interval. None means that these items cannot tell: no such score was
    taken, or the gap a ratio divides by is not there (value), or not in all draws (low and high).
    """

    value: float | None
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, float | None]:
        return {"value": self.value, "low": self.low, "high": self.high}

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Figure:
        return Figure(entry["value"], entry["low"], entry["high"])


def draw(num_items: int, resamples: int, seed: int) -> np.ndarray:
    """int64 [1 + resamples, num_items]: how often each item counts in each draw. Row 0 is the
    sample itself, once each.
    """
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(num_items, np.full(num_items, 1 / num_items), size=resamples)
    return np.concatenate([np.ones((1, num_items), dtype=np.int64), counts])


def figure(values: np.ndarray) -> Figure:
    """The figure of one statistic, float [1 + resamples], row 0 on the sample itself; NaN where it
    is undefined.
    """
    value = float(values[0])
    if not np.isfinite(value):
        return Figure(None, None, None)
    defined = values[1:][np.isfinite(values[1:])]
    if 100 * (len(values) - 1 - len(defined)) > TAIL * (len(values) - 1) or not len(defined):
        return Figure(value, None, None)
    low, high = np.percentile(defined, [TAIL, 100 - TAIL])
    return Figure(value, float(low), float(high))
