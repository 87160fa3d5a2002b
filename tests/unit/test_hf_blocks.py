"""Packing a transformers cache into blocks, and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.inject.hf_blocks import pack_blocks, unpack_blocks
from trtllm_kvmap.inject.hf_cache import HfCache
from trtllm_kvmap.models import LoadedModel

COUNT, PER_BLOCK, BLOCK_IDS = 10, 4, (5, 0, 3)
POISON = -77.0


@pytest.fixture(scope="module")
def source(random_model: Callable[..., LoadedModel]) -> LoadedModel:
    return random_model("qwen3", layers=3, kv_heads=2, seed=1)


@pytest.fixture(scope="module")
def cache(source: LoadedModel) -> HfCache:
    return prefill(source, list(range(COUNT + 1))).cache


def poisoned(source: LoadedModel, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    layers, heads, head_dim = source.spec.kv_shape
    return torch.full((7, layers, 2, heads, PER_BLOCK, head_dim), POISON).to(dtype)


def test_every_element_lands_where_the_layout_says(source: LoadedModel, cache: HfCache) -> None:
    blocks = poisoned(source)
    pack_blocks(cache, COUNT, blocks, BLOCK_IDS)
    wanted = poisoned(source)
    wanted[list(BLOCK_IDS)] = 0.0  # also what is left over of the last block
    for layer in range(source.spec.num_layers):
        for field, tensor in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
            for token in range(COUNT):
                block = BLOCK_IDS[token // PER_BLOCK]
                wanted[block, layer, field, :, token % PER_BLOCK] = tensor[0, :, token]
    assert torch.equal(blocks, wanted)


def test_there_and_back(source: LoadedModel, cache: HfCache) -> None:
    blocks = poisoned(source)
    pack_blocks(cache, COUNT, blocks, BLOCK_IDS)
    back = unpack_blocks(source.spec, COUNT, blocks, BLOCK_IDS)
    for here, there in zip(back.layers, cache.layers, strict=True):
        assert torch.equal(here.keys, there.keys[:, :, :COUNT])
        assert torch.equal(here.values, there.values[:, :, :COUNT])


def test_float8_is_scaled(source: LoadedModel) -> None:
    blocks = poisoned(source, torch.float8_e4m3fn)
    layers, heads, head_dim = source.spec.kv_shape
    numbers = torch.randint(-8, 8, (3, layers, 2, heads, PER_BLOCK, head_dim)).float()
    blocks[list(BLOCK_IDS)] = numbers.to(torch.float8_e4m3fn)  # whole numbers are exact in it
    back = unpack_blocks(
        source.spec, COUNT, blocks, BLOCK_IDS, key_scale=0.5, value_scale=0.25
    ).layers[1]
    assert back.keys.dtype == torch.float32
    assert torch.equal(back.keys[0, :, 5], 0.5 * numbers[1, 1, 0, :, 1])
    assert torch.equal(back.values[0, :, 9], 0.25 * numbers[2, 1, 1, :, 1])


def test_what_does_not_fit_is_refused_and_nothing_written(
    source: LoadedModel, cache: HfCache
) -> None:
    blocks = poisoned(source)
    with pytest.raises(MismatchError, match="do not fit"):
        pack_blocks(cache, COUNT, blocks, BLOCK_IDS[:2])
    with pytest.raises(MismatchError, match="do not fit"):
        pack_blocks(cache, COUNT, blocks[:, :2], BLOCK_IDS)
    with pytest.raises(InputError, match="outside a cache of 11"):
        pack_blocks(cache, COUNT + 2, blocks, BLOCK_IDS)
    assert bool((blocks == POISON).all())
    with pytest.raises(MismatchError, match="float16"):
        pack_blocks(cache, COUNT, poisoned(source, torch.float16), BLOCK_IDS)
    with pytest.raises(MismatchError, match="are not of"):
        unpack_blocks(source.spec, COUNT, blocks[:, :2], BLOCK_IDS)
