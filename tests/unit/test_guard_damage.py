"""The damage that a guard is set on is what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from caches import stacked, tokens
from guard_cases import Models, pair_of
from handmade_maps import copy_map, random_map

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.second import SecondTerm
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.evaluate.damage import damaged_maps, with_neighbour, with_noise, with_order
from trtllm_kvmap.inject.hf_cache import view_pool


@pytest.fixture
def pair(random_model: Callable) -> Models:
    return pair_of(random_model)


def test_damage_is_what_it_says(pair: Models) -> None:
    kvmap = random_map(*pair)
    group = kvmap.groups[0]
    noisy = with_noise(group, 0.5, np.random.default_rng(0))
    ratio = float((noisy.weight - group.weight).std() / group.weight.std())
    assert 0.4 < ratio < 0.6
    neighbours = with_neighbour(kvmap, 5)  # the last layer takes the one before
    for mine, theirs in zip(neighbours, kvmap.groups, strict=True):
        wanted = 4 if theirs.layer == 5 else theirs.layer
        twin = next(
            g
            for g in kvmap.groups
            if (g.field, g.layer, g.heads) == (mine.field, wanted, mine.heads)
        )
        assert mine.layer == theirs.layer
        assert torch.equal(mine.weight, twin.weight)


def with_terms(kvmap: KvMap, activation: str, *, alone: bool) -> KvMap:
    """A second term of 3 channels in every group, ``alone`` or beside its matrix."""
    generator = torch.Generator().manual_seed(9)
    groups = []
    for group in kvmap.groups:
        width, out = group.weight.shape
        down, up = (
            torch.randn(*shape, generator=generator) / shape[0] ** 0.5
            for shape in ((width, 3), (3, out))
        )
        second = SecondTerm(down, torch.zeros(3), up, activation)
        groups.append(replace(group, weight=None if alone else group.weight, second=second))
    return replace(kvmap, groups=tuple(groups))


@pytest.mark.parametrize("terms", [None, ("identity", True), ("silu", False)])
def test_another_order_is_what_a_shuffled_layer_would_give(
    pair: Models, terms: tuple[str, bool] | None
) -> None:
    """Values of one source layer, channels shuffled in the cache, through the map as it is."""
    source, target = pair
    kvmap = random_map(source, target)
    kvmap = kvmap if terms is None else with_terms(kvmap, terms[0], alone=terms[1])
    layer, order = 1, torch.randperm(source.spec.head_dim)
    changed = replace(
        kvmap, groups=tuple(with_order(kvmap, group, layer, order) for group in kvmap.groups)
    )
    ids = tokens(30)
    cache = prefill(source, ids).cache
    shuffled = prefill(source, ids).cache
    # Row i of the changed matrix is row order[i] of the map's: the inverse shuffle of the cache.
    inverse = torch.argsort(order)
    view_pool(shuffled).values[layer].copy_(view_pool(cache).values[layer][..., inverse])
    through, beside = (
        stacked(KvBridge(m, source=source, target=target).convert(c, ids, first_tokens=0))[1]
        for m, c in ((kvmap, shuffled), (changed, cache))
    )
    torch.testing.assert_close(beside, through, rtol=0, atol=1e-4)


def test_a_low_rank_is_damaged_as_a_matrix_is(pair: Models) -> None:
    kvmap = random_map(*pair)
    low = with_terms(kvmap, "identity", alone=True)
    assert len(list(damaged_maps(low, 0))) == len(list(damaged_maps(kvmap, 0)))
    group = low.groups[0]
    (weight, bias), noisy = group.linear(), with_noise(group, 0.5, np.random.default_rng(0))
    assert torch.equal(noisy.bias, bias)
    assert 0.3 < float((noisy.weight - weight).std() / weight.std()) < 0.7


def test_a_map_that_cannot_be_damaged_that_way_is_left_out(random_model: Callable) -> None:
    loaded = random_model()
    damaged = list(damaged_maps(copy_map(loaded, loaded), 0))
    assert len(damaged) == loaded.spec.num_layers  # a copy has no matrix: only layers change
    assert all(isinstance(each, KvMap) for each in damaged)
