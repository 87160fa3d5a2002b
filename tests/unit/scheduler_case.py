"""A scheduler of the connector's core without an engine, and a hand-over offered to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from connector_engine import SIZE, SOURCE, Offers, identity
from handmade_maps import copy_map

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.native import SinkEntry
from trtllm_kvmap.inject.connector.blocks import Offer
from trtllm_kvmap.inject.connector.scheduler import HandoffScheduler, RequestView

PROMPT = tuple(range(10, 40))


def map_with_sinks(random_model: Callable) -> KvMap:
    """Knows the sinks of prompts that begin 7, 7, 7."""
    source, target = random_model(seed=1), random_model(seed=0)
    layers, heads, head_dim = target.spec.kv_shape
    kv = torch.zeros(layers, heads, 3, head_dim)
    made = copy_map(source, target, (SinkEntry((7, 7, 7), kv, kv),))
    return replace(made, source_fingerprint=SOURCE)


def make(kvmap: KvMap, offers: Offers, *, window: int = 3, first: int = 2) -> HandoffScheduler:
    return HandoffScheduler(
        kvmap, "digest", offers, tokens_per_block=SIZE, first_tokens=first, repair_window=window
    )


def offered(offers: Offers, tokens: tuple[int, ...], handoff: str = "1", exact: int = 0) -> str:
    return offers.put(Offer(identity(handoff), tokens, SOURCE, exact))


def running(scheduler: HandoffScheduler, name: str, salt: str, computed: int = 0) -> list:
    """A request that has begun; returns its orders."""
    scheduler.match(RequestView(name, PROMPT, salt, handoff=salt), computed)
    scheduler.allocated(name, range(8))
    return [order for order in scheduler.take_orders() if order.request_id == name]
