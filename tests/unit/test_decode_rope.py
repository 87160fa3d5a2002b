"""Hand-overs of models whose RoPE frequencies depend on how long the sequence was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from caches import tokens
from changing_rope import DYNAMIC, LENGTH_DEPENDENT
from handmade_maps import copy_map

from trtllm_kvmap.artifact.native import SinkEntry
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.inject.hf_cache import (
    Pass,
    make_cache,
    record_pass,
    view_pool,
    written_lengths,
)
from trtllm_kvmap.rotary import apply_rope, remove_rope
from trtllm_kvmap.spec.plan import plan_handoff


@pytest.mark.parametrize("options", LENGTH_DEPENDENT)
def test_keys_on_both_sides_of_a_change_are_refused(options: dict, random_model: Callable) -> None:
    source, target = random_model("llama", **options), random_model("llama", seed=1)
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    ids, plan = tokens(60), plan_handoff(60, repair_window=4)
    chunked = prefill(source, ids[:20]).cache
    prefill(source, ids[20:], chunked)
    with pytest.raises(MismatchError, match=r"across a change of \w+ RoPE frequencies"):
        bridge.hand_over(chunked, ids, plan)
    # Only what is mapped counts: here the second pass alone wrote it.
    bridge.hand_over(chunked, ids, plan_handoff(60, first_tokens=20, repair_window=4))
    bridge.hand_over(prefill(source, ids).cache, ids, plan)


@pytest.mark.parametrize("options", LENGTH_DEPENDENT)
def test_a_cache_that_does_not_say_how_it_was_written_is_refused(
    options: dict, random_model: Callable
) -> None:
    source, target = random_model("llama", **options), random_model("llama", seed=1)
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    plan = {count: plan_handoff(count, repair_window=4) for count in (20, 60)}
    long, short = make_cache(source.spec, 60), make_cache(source.spec, 20)
    with pytest.raises(MismatchError, match="its cache does not say"):
        bridge.hand_over(long, tokens(60), plan[60])
    with pytest.raises(MismatchError, match="its cache does not say"):
        bridge.hand_over(long, tokens(20), plan[20])
    bridge.hand_over(short, tokens(20), plan[20])  # short enough that there is but one answer


@pytest.mark.parametrize("options", LENGTH_DEPENDENT)
def test_keys_are_turned_with_the_frequencies_they_were_written_with(
    options: dict, random_model: Callable
) -> None:
    """From a long reading, and after the model has read something else in between."""
    source, target = random_model("llama", **options), random_model("llama", seed=1)
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    ids = tokens(60)
    cache = prefill(source, ids).cache
    prefill(source, tokens(100, seed=3))
    prefill(source, tokens(10, seed=3))
    converted = bridge.convert(cache, ids, first_tokens=0)
    positions = torch.arange(60)
    for here, there in zip(view_pool(cache).keys, view_pool(converted).keys, strict=True):
        content = remove_rope(here.double(), positions, source.spec.rope, rope_length=60)
        expected = apply_rope(content, positions, target.spec.rope)
        torch.testing.assert_close(there.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", LENGTH_DEPENDENT)
def test_a_target_gets_the_frequencies_it_would_have_used(
    options: dict, random_model: Callable
) -> None:
    """The identity of a model with itself, 60 tokens, beyond the original length: first tokens,
    mapped tokens and repaired tokens must all be turned as one native pass turns them.
    """
    loaded = random_model("llama", **options)
    ids = tokens(60)
    native = prefill(loaded, ids)
    bridge = KvBridge(copy_map(loaded, loaded), source=loaded, target=loaded)
    handoff = bridge.hand_over(native.cache, ids, plan_handoff(60, first_tokens=4, repair_window=8))
    torch.testing.assert_close(handoff.logits, native.logits[-1], rtol=0, atol=5e-5)
    for here, there in zip(
        view_pool(handoff.cache).keys, view_pool(native.cache).keys, strict=True
    ):
        torch.testing.assert_close(here, there, rtol=0, atol=5e-5)
    (written,) = written_lengths(native.cache, range(60))
    assert set(written_lengths(handoff.cache, range(60))) == {written}
    # What was handed over can be handed on.
    again = bridge.hand_over(handoff.cache, ids, plan_handoff(60, repair_window=8))
    torch.testing.assert_close(again.logits, native.logits[-1], rtol=0, atol=5e-5)


@pytest.mark.parametrize("options", LENGTH_DEPENDENT)
def test_the_sink_table_serves_a_long_sequence_its_first_token(
    options: dict, random_model: Callable
) -> None:
    """Its keys were turned for a short sequence; only position 0, never turned, still holds."""
    source, target = random_model("llama", seed=1), random_model("llama", **options)
    ids = tokens(60)
    pool = view_pool(prefill(target, ids[:6]).cache)
    sink = SinkEntry(
        tuple(ids[:6].tolist()), *(torch.stack(part)[:, 0] for part in (pool.keys, pool.values))
    )
    bridge = KvBridge(copy_map(source, target, (sink,)), source=source, target=target)
    cache = prefill(source, ids).cache
    long = bridge.hand_over(cache, ids, plan_handoff(60, first_tokens=4, repair_window=8))
    short = bridge.hand_over(cache, ids[:20], plan_handoff(20, first_tokens=4, repair_window=8))
    assert (long.sink_tokens, short.sink_tokens) == (1, 4)
    assert set(written_lengths(long.cache, range(60))) == {60}
    native = view_pool(prefill(target, ids).cache)
    for here, there in zip(view_pool(long.cache).keys, native.keys, strict=True):
        torch.testing.assert_close(here[:, :, :4], there[:, :, :4], rtol=0, atol=5e-5)


def test_splicing_keeps_the_record_of_what_was_spliced(random_model: Callable) -> None:
    source, target = random_model("llama", seed=1), random_model("llama", **DYNAMIC)
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    ids = tokens(60)
    held = prefill(target, ids[:20]).cache
    handoff = bridge.hand_over(
        prefill(source, ids).cache, ids, plan_handoff(60, spliced=20, repair_window=8), held
    )
    assert written_lengths(handoff.cache, range(0, 20)) == [20]
    assert written_lengths(handoff.cache, range(20, 60)) == [60, 60]
    unknown = make_cache(target.spec, 20)
    record_pass(unknown, Pass(5, 20, 20))
    handoff = bridge.hand_over(
        prefill(source, ids).cache, ids, plan_handoff(60, spliced=20, repair_window=8), unknown
    )
    assert written_lengths(handoff.cache, range(0, 20)) is None
