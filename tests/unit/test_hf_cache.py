"""transformers' caches seen as pools: views, spans taken out and put back, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from random_models import available_architectures

from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.inject.hf_cache import (
    HfCache,
    Pass,
    empty_cache,
    fork,
    join,
    make_cache,
    num_entries,
    put_cache,
    put_span,
    record_pass,
    recorded_passes,
    take_span,
    view_pool,
    written_lengths,
)
from trtllm_kvmap.models import LoadedModel


def read(loaded: LoadedModel, ids: torch.Tensor, cache: HfCache) -> torch.Tensor:
    with torch.no_grad():
        return loaded.model(ids, use_cache=True, **{loaded.cache_argument: cache}).logits


def tokens(count: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 60, (batch, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("architecture", available_architectures())
def test_the_pool_is_the_cache_itself(architecture: str, random_model: Callable) -> None:
    loaded = random_model(architecture, layers=3)
    cache = empty_cache()
    read(loaded, tokens(7, batch=2), cache)
    pool = view_pool(cache)
    assert pool.kv_shape == loaded.spec.kv_shape
    assert (pool.tokens_per_block, pool.num_slots) == (7, 14)
    assert pool.keys[1].data_ptr() == cache.layers[1].keys.data_ptr()
    assert pool.values[2].data_ptr() == cache.layers[2].values.data_ptr()


@pytest.mark.parametrize("architecture", available_architectures())
def test_reinjection_is_exact(architecture: str, random_model: Callable) -> None:
    """A cache taken out in two spans and put into a fresh one continues with the same bits."""
    loaded = random_model(architecture)
    own = empty_cache()
    read(loaded, tokens(9, batch=2), own)
    again = make_cache(loaded.spec, 9, batch=2)
    put_span(again, 0, take_span(own, range(0, 4)))
    put_span(again, 4, take_span(own, range(4, 9)))
    for here, there in zip(own.layers, again.layers, strict=True):
        assert torch.equal(here.keys, there.keys)
        assert torch.equal(here.values, there.values)
    more = tokens(5, batch=2, seed=1)
    assert torch.equal(read(loaded, more, own), read(loaded, more, again))
    assert num_entries(again) == 14


def test_put_span_writes_its_entries_and_no_others(random_model: Callable) -> None:
    loaded = random_model(layers=2)
    cache = make_cache(loaded.spec, 6, batch=2)
    pool = view_pool(cache)
    for view in pool.keys + pool.values:
        view.fill_(-7.0)
    span = take_span(cache, range(0, 2))
    for number, view in enumerate(span.keys + span.values):
        view.copy_(torch.arange(view.numel()).view(view.shape) + 1000 * number)
    put_span(cache, 3, span)
    for number, view in enumerate(pool.keys + pool.values):
        expected = torch.full((2, 2, 6, 16), -7.0)
        block = torch.arange(2 * 2 * 2 * 16, dtype=torch.float32).view(2, 2, 2, 16)
        expected[:, :, 3:5] = block + 1000 * number
        assert torch.equal(view, expected)


def test_take_span_is_a_copy(random_model: Callable) -> None:
    cache = make_cache(random_model().spec, 4)
    taken = take_span(cache, range(1, 3))
    taken.keys[0].fill_(5.0)
    assert not view_pool(cache).keys[0].any()


def test_a_fork_and_its_origin_grow_apart(random_model: Callable) -> None:
    loaded = random_model()
    cache = empty_cache()
    read(loaded, tokens(6), cache)
    before = view_pool(cache).keys[0].clone()
    short = fork(cache, 4)
    assert view_pool(short).keys[0].data_ptr() == view_pool(cache).keys[0].data_ptr()
    read(loaded, tokens(3, seed=2), short)
    assert (num_entries(short), num_entries(cache)) == (7, 6)
    assert torch.equal(view_pool(cache).keys[0], before)
    fresh = empty_cache()
    read(loaded, tokens(6)[:, :4], fresh)
    reference = read(loaded, tokens(3, seed=2), fresh)
    again = read(loaded, tokens(3, seed=2), fork(cache, 4))
    torch.testing.assert_close(again, reference, rtol=0, atol=1e-5)
    with pytest.raises(InputError, match="0 to 8 lie outside a cache of 6"):
        fork(cache, 8)
    assert num_entries(fork(empty_cache())) == 0


def test_a_new_cache_is_zero_and_finite(random_model: Callable) -> None:
    pool = view_pool(make_cache(random_model(layers=3).spec, 5, dtype=torch.bfloat16))
    assert (len(pool.keys), pool.dtype) == (3, torch.bfloat16)
    assert len({view.data_ptr() for view in pool.keys + pool.values}) == 6
    assert not any(view.any() for view in pool.keys + pool.values)


def static_cache(loaded: LoadedModel) -> object:
    return transformers.StaticCache(config=loaded.model.config, max_cache_len=8)


def sliding_cache(loaded: LoadedModel) -> object:
    config = copy.deepcopy(loaded.model.config)
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    config.sliding_window = 4
    return transformers.DynamicCache(config=config)


def hybrid_cache(loaded: LoadedModel) -> object:
    config = copy.deepcopy(loaded.model.config)
    config.layer_types = ["full_attention", "sliding_attention"]
    config.sliding_window = 4
    return transformers.DynamicCache(config=config)


def offloaded_cache(loaded: LoadedModel) -> object:
    cache = empty_cache()
    read(loaded, tokens(3), cache)
    cache.offloading = True  # making one from scratch needs an accelerator
    return cache


def quantised_cache(loaded: LoadedModel) -> object:
    from transformers.cache_utils import QuantizedLayer

    class RoundedLayer(QuantizedLayer):  # the real ones need packages that are not installed
        def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
            return tensor.round()

        def _dequantize(self, q_tensor: torch.Tensor) -> torch.Tensor:
            return q_tensor

    cache = transformers.DynamicCache()
    cache.layers.extend([RoundedLayer() for _ in range(loaded.spec.num_layers)])
    read(loaded, tokens(3), cache)
    return cache


@pytest.mark.parametrize(
    "make", [static_cache, sliding_cache, hybrid_cache, offloaded_cache, quantised_cache]
)
def test_caches_that_drop_or_move_tokens_are_refused(
    make: Callable, random_model: Callable
) -> None:
    with pytest.raises(MismatchError, match=r"Use a plain DynamicCache\(\)"):
        view_pool(make(random_model("mistral")))


def test_other_things_are_refused(random_model: Callable) -> None:
    with pytest.raises(MismatchError, match="type tuple cannot be read"):
        view_pool(((torch.zeros(1), torch.zeros(1)),))
    with pytest.raises(InputError, match="holds no token"):
        view_pool(empty_cache())


def test_a_span_that_does_not_fit_changes_nothing(random_model: Callable) -> None:
    spec = random_model().spec
    cache = make_cache(spec, 4)
    filled = make_cache(spec, 3)
    for view in view_pool(filled).keys + view_pool(filled).values:
        view.fill_(1.0)
    wrong_shape = view_pool(make_cache(random_model(head_dim=32).spec, 3))
    with pytest.raises(InputError, match="2 to 5 lie outside a cache of 4"):
        put_span(cache, 2, view_pool(filled))
    with pytest.raises(MismatchError, match="the cache needs 1 of"):
        put_span(cache, 0, wrong_shape)
    with pytest.raises(MismatchError, match="2 sequences"):
        put_span(cache, 0, view_pool(make_cache(spec, 3, batch=2)))
    with pytest.raises(MismatchError, match="bfloat16"):
        put_span(cache, 0, view_pool(make_cache(spec, 3, dtype=torch.bfloat16)))
    with pytest.raises(InputError, match="lie outside"):
        take_span(cache, range(2, 5))
    assert not any(view.any() for view in view_pool(cache).keys + view_pool(cache).values)


def test_the_record_of_passes_travels(random_model: Callable) -> None:
    cache = make_cache(random_model().spec, 30)
    assert written_lengths(cache, range(0, 1)) is None
    record_pass(cache, Pass(0, 10, 10))
    record_pass(cache, Pass(10, 20, 20))
    assert written_lengths(cache, range(2, 10)) == [10]
    assert written_lengths(cache, range(9, 11)) == [10, 20]
    assert written_lengths(cache, range(19, 21)) is None
    for other in (copy.deepcopy(cache), fork(cache)):
        assert written_lengths(other, range(0, 20)) == [10, 20]
    short = fork(cache, 15)
    record_pass(short, Pass(15, 18, 99))
    assert written_lengths(short, range(12, 18)) == [20, 99]
    assert written_lengths(short, range(16, 18)) == [99]
    assert written_lengths(cache, range(16, 18)) == [20]


def numbered(loaded: LoadedModel, entries: int, value: float) -> HfCache:
    cache = make_cache(loaded.spec, entries)
    for view in (*view_pool(cache).keys, *view_pool(cache).values):
        view.copy_(value + torch.arange(entries)[:, None].expand(view.shape))
    record_pass(cache, Pass(0, entries, int(value)))
    return cache


def test_a_head_and_what_lies_beyond_it_join(random_model: Callable) -> None:
    loaded = random_model()
    head, whole = numbered(loaded, 3, 100), numbered(loaded, 7, 200)
    joined = join(head, whole)
    expected = torch.tensor([100, 101, 102, 203, 204, 205, 206.0])
    for view in (*view_pool(joined).keys, *view_pool(joined).values):
        assert torch.equal(view[0, 1, :, 5], expected)
    assert recorded_passes(joined) == (Pass(0, 3, 100), Pass(3, 7, 200))
    alone = join(numbered(loaded, 7, 300), whole)
    assert float(view_pool(alone).keys[0].max()) == 306, "nothing lies beyond an equal head"
    assert float(view_pool(whole).keys[0].max()) == 206
    view_pool(joined).keys[0].zero_()
    assert float(view_pool(head).keys[0].min()) == 100, "the parts are copied"


def test_a_cache_is_put_over_the_first_entries(random_model: Callable) -> None:
    loaded = random_model()
    room = numbered(loaded, 6, 900)
    put_cache(room, numbered(loaded, 2, 100))
    for view in (*view_pool(room).keys, *view_pool(room).values):
        assert view[0, 0, :, 0].tolist() == [100, 101, 902, 903, 904, 905]
    assert recorded_passes(room)[-1] == Pass(0, 2, 100)
    before = view_pool(room).keys[0].clone()
    put_cache(room, empty_cache())
    assert torch.equal(view_pool(room).keys[0], before)
    with pytest.raises(InputError, match="outside a cache of 6"):
        put_cache(room, numbered(loaded, 7, 100))
