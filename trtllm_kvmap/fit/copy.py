"""`copy`: the same head of the source layer at the nearest normalised depth, as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.fit.blocks import Block, FittedGroup, targets_by_layer
from trtllm_kvmap.fit.centred import CentredPart
from trtllm_kvmap.fit.config import FitConfig
from trtllm_kvmap.fit.ridge import r2_of
from trtllm_kvmap.spec.slices import Slice, nearest_depth


def fit_copy(part: CentredPart, config: FitConfig) -> Iterator[FittedGroup]:
    """Nothing is learned: the moments only say how good the copy is. Raises MismatchError unless
    both models have equal KV heads and head_dim.
    """
    source, target = part.source, part.target
    shapes = (source.num_kv_heads, source.head_dim), (target.num_kv_heads, target.head_dim)
    if shapes[0] != shapes[1]:
        raise MismatchError(
            f"copy needs equal (KV heads, head_dim); {source.name} has {shapes[0]} and "
            f"{target.name} {shapes[1]}. Use the scope slice, which needs neither."
        )
    for field in part.target_fields():
        for targets in targets_by_layer(part, field):
            layer = nearest_depth(targets[0].layer, target.num_layers, source.num_layers)
            slices = tuple(Slice("source", field, layer, t.head) for t in targets)
            yield copied(part, slices, targets)


def copied(part: CentredPart, slices: Block, targets: Block) -> FittedGroup:
    """The group whose heads are ``slices`` unchanged, and the R2 of that."""
    heads = tuple(t.head for t in targets)
    group = HeadGroup(targets[0].field, targets[0].layer, heads, slices, weight=None, bias=None)
    error = copy_error(part, slices, targets).chunk(len(targets))
    variance = part.target_variance(targets).chunk(len(targets))
    return FittedGroup(group, tuple(map(r2_of, error, variance)))


def copy_error(
    part: CentredPart, slices: Sequence[Slice], targets: Sequence[Slice]
) -> torch.Tensor:
    """sum (y - x)^2 over tokens, not centred (a copy has no bias), [target columns]."""
    x, y, moments = part.columns(slices), part.target_columns(targets), part.moments
    product = moments.cross[x, y]
    error = moments.target_square[y] - 2 * product + moments.gram.diagonal()[x]
    return error.clamp_(min=0.0)
