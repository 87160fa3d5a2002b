"""Ways for a map to go wrong, made on purpose: a guard is set against them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import KvMap

NOISES = (0.025, 0.05, 0.1, 0.2, 0.4)  # of the standard deviation of each matrix


def damaged_maps(kvmap: KvMap, seed: int) -> Iterator[KvMap]:
    """One map at a time: noise of growing strength on every matrix, then, for every layer, the
    target's layer written by its neighbour's matrices, and the source's layer read with its
    channels in another order. A map is left out when there is nothing in it to damage that way.
    """
    rng = np.random.default_rng(seed)
    for noise in NOISES:
        yield from _changed(kvmap, [with_noise(group, noise, rng) for group in kvmap.groups])
    for layer in range(kvmap.target.num_layers):
        yield from _changed(kvmap, with_neighbour(kvmap, layer))
    for layer in range(kvmap.source.num_layers):
        order = torch.from_numpy(rng.permutation(kvmap.source.head_dim))
        yield from _changed(
            kvmap, [with_order(kvmap, group, layer, order) for group in kvmap.groups]
        )


def with_noise(group: HeadGroup, noise: float, rng: np.random.Generator) -> HeadGroup:
    """Every number of the matrix moved by ``noise`` standard deviations of the matrix. A low rank
    is multiplied out before.
    """
    if group.second is not None and group.second.activation == "identity":
        product = group.linear()
        assert product is not None  # a copy has no second term
        weight, bias = product
        group = replace(group, weight=weight, bias=bias, weight_scale=None, second=None)
    matrix = group.matrix()
    if matrix is None:
        return group
    drawn = torch.from_numpy(rng.standard_normal(matrix.shape)).to(matrix)
    return replace(group, weight=matrix + noise * matrix.std() * drawn, weight_scale=None)


def with_neighbour(kvmap: KvMap, layer: int) -> list[HeadGroup]:
    """The groups of a map whose target ``layer`` is written as the layer after it is (the last: as
    the one before). Unchanged where the two do not group their heads alike.
    """
    other = layer + 1 if layer + 1 < kvmap.target.num_layers else layer - 1
    by_place = {(group.field, group.layer, group.heads): group for group in kvmap.groups}
    return [
        replace(by_place.get((group.field, other, group.heads), group), layer=layer)
        if group.layer == layer
        else group
        for group in kvmap.groups
    ]


def with_order(kvmap: KvMap, group: HeadGroup, layer: int, order: torch.Tensor) -> HeadGroup:
    """``group`` as it reads when the channels of every head of the source's ``layer`` lie in
    another ``order``: the rows of the matrix, and of the second term, for these slices change
    places.
    """
    rows = torch.arange(sum(kvmap.slice_width(read) for read in group.slices))
    first = 0
    for read in group.slices:
        width = kvmap.slice_width(read)
        if read.origin == "source" and read.layer == layer:
            rows[first : first + width] = first + order
        first += width
    if group.copies or torch.equal(rows, torch.arange(len(rows))):
        return group
    matrix, second = group.matrix(), group.second
    return replace(
        group,
        weight=None if matrix is None else matrix[rows],
        weight_scale=None,
        second=None if second is None else replace(second, down=second.down[rows]),
    )


def _changed(kvmap: KvMap, groups: list[HeadGroup]) -> Iterator[KvMap]:
    if not all(_same(mine, theirs) for mine, theirs in zip(groups, kvmap.groups, strict=True)):
        yield replace(kvmap, groups=tuple(groups))


def _same(mine: HeadGroup, theirs: HeadGroup) -> bool:
    if mine.slices != theirs.slices or mine.second is not theirs.second:
        return False
    ours, others = mine.matrix(), theirs.matrix()
    if ours is None or others is None:
        return ours is others
    return torch.equal(ours, others)
