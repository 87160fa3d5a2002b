"""The formulas of the report, as pure functions of numbers or of equal-shaped arrays.

A ratio whose denominator is not positive in its own sense (no gap between the models, a target at
chance) is NaN: there is nothing to retain or recover.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

Number = float | np.ndarray


def mean(total: Number, count: Number) -> np.ndarray:
    """total / count; NaN where nothing was counted."""
    return _quotient(total, count)


def perplexity_ratio(nll: Number, target_nll: Number) -> np.ndarray:
    """exp(nll - target_nll), nats per token: 1 is the native target, more is worse."""
    return np.asarray(np.exp(np.subtract(nll, target_nll)))


def retention(accuracy: Number, target: Number) -> np.ndarray:
    """accuracy / target: flatters, because guessing already retains something."""
    return _quotient(accuracy, target)


def retention_normalised(accuracy: Number, target: Number, chance: Number) -> np.ndarray:
    """(accuracy - chance) / (target - chance): 0 is guessing, 1 the native target."""
    return _quotient(np.subtract(accuracy, chance), np.subtract(target, chance))


def gap_recovered(
    mapped: Number, source: Number, target: Number, *, lower_is_better: bool = False
) -> np.ndarray:
    """(mapped - source) / (target - source): 0 is the source alone, 1 the native target. The same
    formula for a loss (``lower_is_better``).
    """
    sign = -1.0 if lower_is_better else 1.0
    return _quotient(sign * np.subtract(mapped, source), sign * np.subtract(target, source))


def best_choice(log_probs: Sequence[Sequence[float]], lengths: Sequence[int] | None = None) -> int:
    """The index of the likeliest choice, given the log-probability (nats) of each of its tokens.

    ``lengths`` divides the sums by the choices' lengths (tokens or characters, as the task has it),
    so that a long ending is not punished for its length.
    """
    scores = [
        sum(tokens) / n
        for tokens, n in zip(log_probs, lengths or [1] * len(log_probs), strict=True)
    ]
    return int(np.argmax(scores))


def leading_agreement(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens agree before the first difference."""
    pairs = list(zip(tokens, others, strict=True))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float64 cosine over the last axis; 0 where one of the two is zero."""
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)


def _quotient(numerator: Number, denominator: Number) -> np.ndarray:
    n, d = np.broadcast_arrays(
        np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    )
    return np.asarray(np.divide(n, d, out=np.full(d.shape, np.nan), where=d > 0))
