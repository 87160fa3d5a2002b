"""A conversation between two random models, what one of them alone would hold, and a guard that is
told its figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from handmade_maps import random_map

from trtllm_kvmap.decode.bridge import Handoff, KvBridge
from trtllm_kvmap.decode.hop import Verdict
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.session.session import Session
from trtllm_kvmap.inject.hf_cache import HfCache
from trtllm_kvmap.models import LoadedModel


def conversation(
    random_model: Callable, make_map: Callable = random_map, **options: object
) -> Session:
    a, b = random_model(seed=0), random_model(seed=1)
    bridges = [KvBridge(make_map(x, y), source=x, target=y) for x, y in ((a, b), (b, a))]
    return Session({"a": a, "b": b}, bridges, **options)


def native(loaded: LoadedModel, ids: list[int], chunks: list[int]) -> HfCache:
    cache = None
    for chunk in torch.tensor(ids[: sum(chunks)]).split(chunks):
        cache = prefill(loaded, chunk, cache).cache
    return cache


class Figures:
    """A guard that reads its figures from a list and keeps what it was shown."""

    def __init__(self, *drifts: float) -> None:
        self.drifts, self.shown = list(drifts), []

    def __call__(
        self, bridge: KvBridge, source_cache: HfCache, token_ids: Sequence[int], handoff: Handoff
    ) -> Verdict:
        self.shown.append((bridge.target.spec, len(token_ids), handoff.plan.mapped))
        drift = self.drifts.pop(0)
        return Verdict(drift, drift <= 1.0)
