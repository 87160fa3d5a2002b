"""Mapping one chunk while the source reads the next changes no number."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import pytest
import torch
from caches import random_tokens, stacked
from handmade_maps import random_map

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.session.mirror import Mirror
from trtllm_kvmap.decode.session.overlap import read_mirrored
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.spec.plan import plan_handoff


def test_overlapped_is_one_after_the_other(random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(random_map(source, target), source=source, target=target)
    ids, plan = random_tokens(200), plan_handoff(200, repair_window=32)
    serial, cache = Mirror(bridge), None
    for start in range(0, 200, 48):
        cache = prefill(source, ids[start : start + 48], cache).cache
        serial.follow(cache, ids)
    expected = serial.hand_over(cache, ids, plan)
    for _ in range(5):  # threads meet differently every time
        mirror = Mirror(bridge)
        read = read_mirrored(source, ids, mirror, chunk_tokens=48)
        assert torch.equal(stacked(read), stacked(cache))
        overlapped = mirror.hand_over(read, ids, plan)
        assert torch.equal(stacked(overlapped.cache), stacked(expected.cache))
        assert torch.equal(overlapped.logits, expected.logits)
    at_once = bridge.hand_over(cache, ids, plan)
    torch.testing.assert_close(expected.logits, at_once.logits, rtol=0, atol=2e-5)


def test_the_source_reads_on_while_a_chunk_is_mapped(
    random_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map of the first chunk waits for the source to begin the second; were they one after the
    other, it would wait in vain.
    """
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(random_map(source, target), source=source, target=target)
    second, passes, met = threading.Event(), [], []
    forward, map_kv = source.model.forward, bridge.mapper.map_kv

    @functools.wraps(forward)
    def reading(input_ids: torch.Tensor, **rest: object) -> object:
        passes.append(input_ids.shape[1])
        if len(passes) == 2:
            second.set()
        return forward(input_ids=input_ids, **rest)

    def mapping(*args: object) -> None:
        met.append(second.wait(timeout=60))
        map_kv(*args)

    monkeypatch.setattr(source.model, "forward", reading)
    monkeypatch.setattr(bridge.mapper, "map_kv", mapping)
    read_mirrored(source, random_tokens(96), Mirror(bridge), chunk_tokens=48)
    assert (passes, met) == ([48, 48], [True, True])


def test_what_was_read_already_is_not_read_again(random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(random_map(source, target), source=source, target=target)
    ids, mirror = random_tokens(100), Mirror(bridge)
    cache = prefill(source, ids[:60]).cache
    assert read_mirrored(source, ids, mirror, cache, chunk_tokens=40) is cache
    assert mirror.entries == 96
    again = prefill(source, ids[60:], prefill(source, ids[:60]).cache).cache
    assert torch.equal(stacked(cache), stacked(again))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_in_the_background_comes_to_the_front(
    failing: int, random_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever chunk it was: the first, one in between, the last."""
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(random_map(source, target), source=source, target=target)
    map_kv, calls = bridge.mapper.map_kv, []

    def broken(*args: object) -> None:
        calls.append(1)
        if len(calls) == failing + 1:
            raise RuntimeError("no memory left")
        map_kv(*args)

    monkeypatch.setattr(bridge.mapper, "map_kv", broken)
    with pytest.raises(RuntimeError, match="no memory left"):
        read_mirrored(source, random_tokens(96), Mirror(bridge), chunk_tokens=32)


def test_another_model_is_refused(random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(random_map(source, target), source=source, target=target)
    with pytest.raises(InputError, match="read with that model"):
        read_mirrored(target, random_tokens(50), Mirror(bridge))
    with pytest.raises(InputError, match="at least 1 token"):
        read_mirrored(source, random_tokens(50), Mirror(bridge), chunk_tokens=0)
