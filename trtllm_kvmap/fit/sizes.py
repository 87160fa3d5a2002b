"""How much a router among several models keeps: a map for every ordered pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.fit.config import FitConfig
from trtllm_kvmap.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class RouterSize:
    """``models`` models, ``maps`` ordered pairs; ``parameters`` of all maps together, without token
    tables and sinks.
    """

    models: int
    maps: int
    parameters: int


def map_parameters(source: ModelSpec, target: ModelSpec, config: FitConfig) -> int:
    """Weights and biases of one map. Of scope slice at most so many: heads that need fewer than n
    slices, or read the target's own layer 0 where it is narrower, take less.
    """
    (source_layers, source_heads, source_dim), target_shape = source.kv_shape, target.kv_shape
    layers, heads, dim = target_shape
    fields = 2 if config.fields == "both" else 1
    layers_read = min(config.k, source_layers)
    if config.scope == "copy":
        return 0
    if config.scope == "pooled":
        width, out, groups = fields * layers_read * source_heads * source_dim, heads * dim, layers
    elif config.scope == "head":
        width, out, groups = fields * layers_read * source_dim, dim, layers * heads
    else:
        widest = max(source_dim, dim) if config.own_slices else source_dim
        width, out, groups = config.n * widest, dim, layers * heads
    if config.rank:
        rank = min(config.rank, width, out)
        return 2 * groups * (rank * (width + out) + rank + out)
    return 2 * groups * (width * out + out)


def router_sizes(specs: Sequence[ModelSpec], config: FitConfig) -> list[RouterSize]:
    """For the first 2, 3, ... of ``specs``. Raises InputError for fewer than two models."""
    if len(specs) < 2:
        raise InputError(f"A map needs two models, got {len(specs)}; give at least two.")
    found = []
    for count in range(2, len(specs) + 1):
        pairs = list(permutations(specs[:count], 2))
        parameters = sum(map_parameters(source, target, config) for source, target in pairs)
        found.append(RouterSize(count, len(pairs), parameters))
    return found
