"""A guard that decides by one figure, and the pair of models it stands between."""

from __future__ import annotations

from collections.abc import Callable

from handmade_maps import random_map

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.models import LoadedModel

Models = tuple[LoadedModel, LoadedModel]


def pair_of(random_model: Callable) -> Models:
    return random_model(layers=3, seed=1), random_model("llama", layers=6, head_dim=32, seed=2)


def bridge_of(pair: Models) -> KvBridge:
    return KvBridge(random_map(*pair), source=pair[0], target=pair[1])


def guard_of(limit: float, weights: int = 11) -> Guard:
    """Decides by the loss gap alone."""
    return Guard((1.0,) + (0.0,) * (weights - 1), 0.0, limit, {})
