"""A guard that decides by one figure, and the models it stands between."""

from __future__ import annotations

from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.models import LoadedModel

Models = tuple[LoadedModel, LoadedModel]


def guard_of(limit: float, weights: int = 11) -> Guard:
    """Decides by the loss gap alone."""
    return Guard((1.0,) + (0.0,) * (weights - 1), 0.0, limit, {})
