"""How a token is chosen from logits: the best one, or one drawn at a temperature."""

from __future__ import annotations

import math

import torch

from trtllm_kvmap.errors import InputError


def require_temperature(temperature: float) -> None:
    """Raise InputError unless ``temperature`` is 0 (greedy) or a positive number."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InputError(
            f"temperature must be 0 (always the best token) or a positive number, got {temperature}"
            f". Use 1.0 for the model's own distribution."
        )


def distribution(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """softmax(logits / temperature), float32, the shape of ``logits`` [..., vocab_size]."""
    return (logits.float() / temperature).softmax(-1)


def draw(probabilities: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """One token id per row of ``probabilities`` [num_rows, vocab_size], int64 [num_rows]."""
    return probabilities.multinomial(1, generator=generator)[:, 0]


def choose(
    logits: torch.Tensor, temperature: float, generator: torch.Generator | None
) -> torch.Tensor:
    """One token id per row of ``logits`` [num_rows, vocab_size]: the best at temperature 0."""
    if temperature == 0:
        return logits.argmax(-1)
    return draw(distribution(logits, temperature), generator)
