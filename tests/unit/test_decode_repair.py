"""Tokens in the middle of a prompt that the target computes over their mapped entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from caches import stacked, tokens
from handmade_maps import copy_map, random_map
from random_models import available_architectures

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.select_tokens import rank_by_attention
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import (
    fork,
    make_cache,
    num_entries,
    overwrite_with_last,
    view_pool,
    written_lengths,
)
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import HandoffPlan, plan_handoff

SELECTED = (3, 4, 11, 25, 26, 40)


def token_by_token(
    target: LoadedModel, ids: torch.Tensor, plan: HandoffPlan, mapped: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The promise, slowly: every token in its turn, each as a pass of its own over a cache of
    exactly what stands before it. ``mapped`` is the cache of mapped entries, stacked.
    """
    cache, logits = make_cache(target.spec, 0), torch.empty(0)
    for position in range(plan.num_tokens):
        if position in plan.mapped and position not in plan.selected:
            pool, wide = view_pool(cache), make_cache(target.spec, position + 1)
            for layer, (keys, values) in enumerate(
                zip(view_pool(wide).keys, view_pool(wide).values, strict=True)
            ):
                keys[:, :, :position], values[:, :, :position] = (
                    pool.keys[layer],
                    pool.values[layer],
                )
                keys[:, :, position], values[:, :, position] = mapped[:, layer, :, :, position]
            cache = wide
        else:
            logits = prefill(target, ids[position : position + 1], cache).logits[-1]
    return stacked(cache), logits


@pytest.mark.parametrize("architecture", available_architectures())
def test_selected_tokens_are_computed_over_their_mapped_entries(
    architecture: str, random_model: Callable
) -> None:
    source, target = random_model(architecture, seed=1), random_model(architecture)
    bridge = KvBridge(random_map(source, target), source=source, target=target)
    ids = tokens(50)
    source_cache = prefill(source, ids).cache
    before = stacked(source_cache).clone()
    plan = plan_handoff(50, first_tokens=2, repair_window=6).with_selected(SELECTED, 14)
    assert plan.selected == SELECTED
    handoff = bridge.hand_over(source_cache, ids, plan)
    mapped = stacked(bridge.convert(source_cache, ids, first_tokens=0))
    cache, logits = token_by_token(target, ids, plan, mapped)
    torch.testing.assert_close(stacked(handoff.cache), cache, rtol=0, atol=2e-5)
    torch.testing.assert_close(handoff.logits, logits, rtol=0, atol=5e-5)
    # What was not selected is mapped, to the bit; what was selected is not.
    same = (stacked(handoff.cache) == mapped).flatten(0, 3).all(-1).all(0)
    middle = [token for token in plan.mapped if token not in SELECTED]
    assert same[middle].all()
    assert not same[list(SELECTED)].any()
    assert torch.equal(stacked(source_cache), before)
    # The cache is one a model goes on from, as if nothing had been moved in it.
    fresh = make_cache(target.spec, 50)
    for here, there in zip(view_pool(fresh).keys, view_pool(handoff.cache).keys, strict=True):
        here.copy_(there)
    for here, there in zip(view_pool(fresh).values, view_pool(handoff.cache).values, strict=True):
        here.copy_(there)
    assert generate(target, fork(handoff.cache), handoff.logits, 12) == generate(
        target, fresh, handoff.logits, 12
    )


def test_selecting_every_token_is_the_target_itself(random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model()
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    ids = tokens(2, 40)
    plan = plan_handoff(40, repair_window=4).with_selected(range(40), 40)
    handoff = bridge.hand_over(prefill(source, ids).cache, ids, plan)
    native = prefill(target, ids)
    torch.testing.assert_close(stacked(handoff.cache), stacked(native.cache), rtol=0, atol=2e-5)
    torch.testing.assert_close(handoff.logits, native.logits[:, -1], rtol=0, atol=5e-5)


def test_spliced_tokens_stay_exact_beside_selected_ones(random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model()
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    ids = tokens(40)
    target_cache = prefill(target, ids[:10]).cache
    plan = plan_handoff(40, spliced=8, repair_window=4).with_selected((5, 12, 20), 30)
    assert plan.selected == (12, 20)
    handoff = bridge.hand_over(prefill(source, ids).cache, ids, plan, target_cache)
    assert torch.equal(stacked(handoff.cache)[..., :8, :], stacked(target_cache)[..., :8, :])
    assert num_entries(target_cache) == 10


def test_keys_of_selected_tokens_have_the_frequencies_of_the_whole_sequence(
    random_model: Callable,
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    loaded = random_model(rope=rope, max_positions=32)
    bridge = KvBridge(copy_map(loaded, loaded), source=loaded, target=loaded)
    ids = tokens(50)
    native = prefill(loaded, ids)
    plan = plan_handoff(50, repair_window=4).with_selected((3, 20), 30)
    handoff = bridge.hand_over(native.cache, ids, plan)
    torch.testing.assert_close(stacked(handoff.cache), stacked(native.cache), rtol=0, atol=2e-5)
    torch.testing.assert_close(handoff.logits, native.logits[-1], rtol=0, atol=5e-5)
    # The cache says so, or it could not be handed over again.
    assert set(written_lengths(handoff.cache, range(50)) or ()) == {50}


def test_a_padded_batch_refuses_selected_tokens(random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model()
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    ids, mask = tokens(2, 20), torch.ones(2, 20)
    mask[1, :5] = 0
    cache = prefill(source, ids, attention_mask=mask).cache
    plan = plan_handoff(20, repair_window=4).with_selected((9,), 10)
    with pytest.raises(InputError, match=r"selected in a padded batch.*plan\.contiguous"):
        bridge.hand_over(cache, ids, plan, attention_mask=mask)
    bridge.hand_over(cache, ids, plan.contiguous, attention_mask=mask)


@pytest.mark.parametrize("selected", [(0,), (17,), (8, 5), (5, 5)])
def test_a_plan_that_selects_wrongly_is_refused(
    selected: tuple[int, ...], random_model: Callable
) -> None:
    source, target = random_model(seed=1), random_model()
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    ids = tokens(20)
    plan = replace(plan_handoff(20, repair_window=4), selected=selected)
    with pytest.raises(InputError, match="ascending and mapped"):
        bridge.hand_over(prefill(source, ids).cache, ids, plan)


@pytest.mark.parametrize("kv_heads", [1, 2])  # one head: the entries are one piece of memory
def test_overwriting_moves_the_last_entries_in_order(kv_heads: int, random_model: Callable) -> None:
    spec = random_model(kv_heads=kv_heads).spec
    cache = make_cache(spec, 7, batch=2)
    pool = view_pool(cache)
    for number, view in enumerate(pool.keys + pool.values):
        view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(number)))
    before = stacked(cache).clone()
    overwrite_with_last(cache, (4, 1))
    assert torch.equal(stacked(cache), before[..., [0, 6, 2, 3, 5], :])


# --- Ranking by what the source looks at ---------------------------------------------------------


@pytest.mark.parametrize("architecture", available_architectures())
def test_tokens_are_ranked_by_the_attention_of_the_last_ones(
    architecture: str, random_model: Callable
) -> None:
    """Against the probabilities transformers itself returns for the whole prompt at once."""
    source = random_model(architecture, seed=1)
    ids = tokens(40)
    plan = plan_handoff(40, first_tokens=2, repair_window=8)
    cache = prefill(source, ids).cache
    usual = source.model.config._attn_implementation
    ranked = rank_by_attention(source, cache, ids, plan, queries=5)
    assert source.model.config._attn_implementation == usual
    assert num_entries(cache) == 40
    source.model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = source.model(ids[None], output_attentions=True).attentions
    source.model.set_attn_implementation(usual)
    received = sum(layer[0, :, -5:].double().sum((0, 1)) for layer in weights)
    assert sorted(ranked) == list(plan.mapped)
    assert (received[ranked].diff() < 1e-5).all()


def test_the_source_cache_may_end_where_the_queries_begin(random_model: Callable) -> None:
    source = random_model(seed=1)
    ids, plan = tokens(40), plan_handoff(40, repair_window=8)
    long = rank_by_attention(source, prefill(source, ids).cache, ids, plan, queries=8)
    short = rank_by_attention(source, prefill(source, ids[:32]).cache, ids, plan, queries=8)
    assert long == short
