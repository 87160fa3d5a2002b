"""From the scores of every arm to figures with intervals, all arms judged on the same draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from trtllm_kvmap.evaluate import metrics
from trtllm_kvmap.evaluate.bootstrap import figure
from trtllm_kvmap.evaluate.score import Score, as_rows


class Draws:
    """The sums of one arm in every draw: each attribute of Score as float64 [1 + resamples]."""

    def __init__(self, scores: list[Score], counts: np.ndarray) -> None:
        sums = counts @ as_rows(scores)
        self._sums = {f.name: sums[:, i] for i, f in enumerate(fields(Score))}

    def mean(self, total: str, count: str) -> np.ndarray:
        return metrics.mean(self._sums[total], self._sums[count])

    @property
    def accuracy(self) -> np.ndarray:
        return self.mean("correct", "questions")

    @property
    def nll(self) -> np.ndarray:
        return self.mean("nll", "tokens")


def arm_figures(arm: Draws, source: Draws, target: Draws, metric: str) -> dict[str, Any]:
    """Every figure of one arm as JSON; ``gap_recovered`` is of ``metric``, accuracy or nll."""
    accuracy, nll = arm.accuracy, arm.nll
    chance = arm.mean("chance", "questions")
    values = {
        "accuracy": accuracy,
        "nll": nll,
        "perplexity": np.exp(nll),
        "perplexity_ratio": metrics.perplexity_ratio(nll, target.nll),
        "top1_agreement": arm.mean("agreed", "tokens"),
        "rollout_agreement": arm.mean("rolled", "steps"),
        "retention": metrics.retention(accuracy, target.accuracy),
        "retention_normalised": metrics.retention_normalised(accuracy, target.accuracy, chance),
        "gap_recovered": gap(arm, source, target, metric),
    }
    return {name: figure(value).to_json() for name, value in values.items()}


def gap(arm: Draws, source: Draws, target: Draws, metric: str) -> np.ndarray:
    """The share of the gap between the two models alone that ``arm`` recovers, in every draw."""
    if metric == "accuracy":
        return metrics.gap_recovered(arm.accuracy, source.accuracy, target.accuracy)
    return metrics.gap_recovered(arm.nll, source.nll, target.nll, lower_is_better=True)


def mean_cosines(cosines: Sequence[np.ndarray]) -> dict[str, Any]:
    """{"mean", "worst", "per_layer"} of the cosines [layers] of each item; the mean over items
    comes first. None and empty for an arm that runs the source.
    """
    by_layer: list[float] = np.mean(cosines, axis=0).tolist()
    return {
        "mean": sum(by_layer) / len(by_layer) if by_layer else None,
        "worst": min(by_layer, default=None),
        "per_layer": by_layer,
    }


def chance(scores: Sequence[Score]) -> float | None:
    """The accuracy that guessing is expected to have on these questions; None without any."""
    asked = sum(score.questions for score in scores)
    return sum(score.chance for score in scores) / asked if asked else None


def context_by_context(
    scores: dict[str, list[Score]], lengths: Sequence[int], metric: str
) -> dict[str, Any]:
    """{"tokens": [contexts], "metric": {arm: [contexts]}}: the metric on each context alone, None
    where a context has no such score. Pairs what the arms did on the same text.
    """
    total, count = ("correct", "questions") if metric == "accuracy" else ("nll", "tokens")

    def alone(score: Score) -> float | None:
        counted: int = getattr(score, count)
        return getattr(score, total) / counted if counted else None

    return {
        "tokens": list(lengths),
        "metric": {name: [alone(score) for score in each] for name, each in scores.items()},
    }
