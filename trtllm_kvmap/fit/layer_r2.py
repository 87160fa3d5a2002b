"""How much of each target layer one source layer alone explains: the map's raw material, as a table
of source layers by target layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.errors import NumericsError
from trtllm_kvmap.fit.centred import CentredPart
from trtllm_kvmap.fit.ridge import factorise, r2_of
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.slices import FIELDS, Field

RIDGE = 1e-3


def layer_r2(
    moments: MomentSet | Iterable[MomentSet], ridge: float = RIDGE
) -> dict[Field, list[list[float | None]]]:
    """{"key", "value"}: [target layers][source layers], the R2 on the calibration text of a ridge
    from all heads of one source layer (keys from keys, values from values) to a target layer.
    Moments of scope head hold no two heads together: then each head is read from the same head.

    None where the moments do not hold the two together, or no answer can be trusted. One factor
    for each source layer and part of the moments, whatever the target.
    """
    shards = [moments] if isinstance(moments, MomentSet) else moments
    sums: dict[tuple[Field, int, int], torch.Tensor] = {}  # of squared error, of variance
    shape = 0, 0
    for shard in shards:
        shape = shard.target.num_layers, shard.source.num_layers
        for part in shard.parts:
            _add(CentredPart(part, shard.source, shard.target), ridge, sums)
    return {
        field: [
            [_share(sums.get((field, target, source))) for source in range(shape[1])]
            for target in range(shape[0])
        ]
        for field in FIELDS
    }


def layer_r2_flops(source: ModelSpec, target: ModelSpec) -> float:
    """Float64 operations of layer_r2: for each source layer and field one factor, and two
    triangular solves for every column of the target's.
    """
    width = source.num_kv_heads * source.head_dim
    columns = target.num_layers * target.num_kv_heads * target.head_dim
    return len(FIELDS) * source.num_layers * (width**3 / 3 + 2 * width**2 * columns)


def with_layer_r2(kvmap: KvMap, moments: MomentSet | Iterable[MomentSet]) -> KvMap:
    """``kvmap`` with layer_r2 of the moments it was fitted from among what it says of its fit."""
    return replace(kvmap, fitted={**kvmap.fitted, "layer_r2": layer_r2(moments)})


def _add(part: CentredPart, ridge: float, sums: dict[tuple[Field, int, int], torch.Tensor]) -> None:
    for field in part.target_fields():
        targets = [t for t in part.targets if t.field == field]
        width = part.target.head_dim
        for layer in range(part.source.num_layers):
            read = [
                s
                for s in part.slices
                if (s.origin, s.field, s.layer) == ("source", field, layer) and part.varies(s)
            ]
            if not read:
                continue
            try:
                solved = factorise(part, read, ridge, targets).solve(targets)
            except NumericsError:
                continue
            found = torch.stack([solved.error, solved.variance]).view(2, -1, width).sum(-1)
            for column, target in enumerate(targets):
                key = field, target.layer, layer
                sums[key] = sums.get(key, torch.zeros(2)) + found[:, column]


def _share(found: torch.Tensor | None) -> float | None:
    return None if found is None else round(r2_of(found[0], found[1]), 4)
