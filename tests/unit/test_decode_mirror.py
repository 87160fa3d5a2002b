"""A target in hot standby holds what a map at the switch would give it, and only repairs then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from caches import random_tokens, stacked
from handmade_maps import copy_map, own_layer_map, random_map

from trtllm_kvmap.artifact.native import SinkEntry
from trtllm_kvmap.decode.bridge import KvBridge, complete
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.session.mirror import Mirror
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import HfCache, fork, make_cache, view_pool
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import plan_handoff

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.3 * i for i in range(8)],
    "factor": 2.0,
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


def read_along(source: LoadedModel, ids: list[int], mirror: Mirror, prompt: int = 50) -> HfCache:
    """The source reads a prompt at once and then decodes the rest, with the mirror behind it."""
    cache = prefill(source, ids[:prompt]).cache
    mirror.follow(cache, ids[:prompt])
    for end in range(prompt + 1, len(ids)):
        prefill(source, ids[end - 1 : end], cache)
        mirror.follow(cache, ids[:end])
    return cache


def counted(bridge: KvBridge, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of the bridge's mapper maps from now on."""
    mapped: list[int] = []
    original = bridge.mapper.map_kv

    def map_kv(source: object, target: object, span: object) -> None:
        mapped.append(span.num_tokens)
        original(source, target, span)

    monkeypatch.setattr(bridge.mapper, "map_kv", map_kv)
    return mapped


@pytest.mark.parametrize("make_map", [copy_map, random_map, own_layer_map])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_mirrored_switch_is_the_map_at_the_switch(
    make_map: Callable, architecture: str, random_model: Callable
) -> None:
    source, target = random_model(architecture, seed=1), random_model(architecture, seed=0)
    bridge = KvBridge(make_map(source, target), source=source, target=target)
    ids = random_tokens(150)
    mirror = Mirror(bridge, first_tokens=4, tokens_per_block=16)
    cache = read_along(source, ids, mirror)
    plan = plan_handoff(150, first_tokens=4, repair_window=16)
    expected = bridge.hand_over(cache, ids, plan)
    mirrored = mirror.hand_over(cache, ids, plan)
    assert mirrored.plan == plan
    # Copies keep their bits; products of other shapes may round differently, in float32.
    exact = make_map is copy_map
    for here, there in (
        (stacked(mirrored.cache), stacked(expected.cache)),
        (mirrored.logits, expected.logits),
    ):
        torch.testing.assert_close(here, there, rtol=0, atol=0 if exact else 2e-5)
        print(f"largest difference {float((here - there).abs().max()):.2e}")


def test_selected_tokens_are_computed_over_mirrored_ones(random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(random_map(source, target), source=source, target=target)
    ids = random_tokens(120)
    mirror = Mirror(bridge, tokens_per_block=16)
    cache = read_along(source, ids, mirror)
    plan = plan_handoff(120, repair_window=16).with_selected([40, 7, 80], 20)
    for _ in range(2):  # the second finds the mirror as the first did
        mirrored = mirror.hand_over(cache, ids, plan)
        expected = bridge.hand_over(cache, ids, plan)
        torch.testing.assert_close(
            stacked(mirrored.cache), stacked(expected.cache), rtol=0, atol=2e-5
        )
        torch.testing.assert_close(mirrored.logits, expected.logits, rtol=0, atol=2e-5)


def test_only_the_repair_is_left_and_nothing_is_copied(
    random_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(random_map(source, target), source=source, target=target)
    mapped = counted(bridge, monkeypatch)
    ids = random_tokens(140)
    mirror = Mirror(bridge, tokens_per_block=32)
    cache = read_along(source, ids, mirror)
    assert mapped == [31, 32, 32, 32], "the first block without its first token, then three whole"
    given: list[HfCache] = []

    def seen(target: object, prompt: object, plan: object, cache: HfCache, *rest: object) -> object:
        given.append(fork(cache))
        return complete(target, prompt, plan, cache, *rest)

    monkeypatch.setattr("trtllm_kvmap.decode.session.mirror.complete", seen)
    mapped.clear()
    before = mirror.entries
    mirror.hand_over(cache, ids, plan_handoff(140, repair_window=32))
    assert mapped == []
    assert mirror.entries == before == 128
    room = [view.data_ptr() for view in view_pool(mirror._room).keys]
    assert [view.data_ptr() for view in view_pool(given[0]).keys] == room
    mirror.hand_over(cache, ids, plan_handoff(140, repair_window=4))
    assert mapped == [8], "a window shorter than a block leaves a part of one to be mapped"


def test_room_grows_by_doubling(random_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    made: list[int] = []

    def make(spec: object, entries: int, **rest: object) -> HfCache:
        made.append(entries)
        return make_cache(spec, entries, **rest)

    monkeypatch.setattr("trtllm_kvmap.decode.session.mirror.make_cache", make)
    read_along(source, random_tokens(140), Mirror(bridge, tokens_per_block=4), prompt=10)
    assert made == [8, 16, 32, 64, 128, 256]


def test_what_the_target_has_read_itself_is_kept(random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(random_map(source, target), source=source, target=target)
    ids = random_tokens(120)
    own = prefill(target, ids[:40]).cache
    before = stacked(own)
    mirror = Mirror(bridge, own, tokens_per_block=16)
    cache = read_along(source, ids, mirror)
    plan = plan_handoff(120, spliced=40, repair_window=16)
    mirrored = mirror.hand_over(cache, ids, plan)
    expected = bridge.hand_over(cache, ids, plan, own)
    torch.testing.assert_close(stacked(mirrored.cache), stacked(expected.cache), rtol=0, atol=2e-5)
    assert torch.equal(stacked(mirrored.cache)[..., :40, :], before)
    assert torch.equal(stacked(own), before)


def test_a_mirror_goes_on_after_a_switch_and_after_the_text_has_changed(
    random_model: Callable,
) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(random_map(source, target), source=source, target=target)
    ids = random_tokens(100)
    mirror = Mirror(bridge, tokens_per_block=16)
    cache = read_along(source, ids, mirror)
    handoff = mirror.hand_over(cache, ids, plan_handoff(100))
    generate(target, handoff.cache, handoff.logits, 20)
    for changed in (ids + random_tokens(30, seed=2), ids[:70] + random_tokens(60, seed=3)):
        kept = next((i for i, (a, b) in enumerate(zip(ids, changed)) if a != b), 99)  # noqa: B905
        other = fork(cache, kept)
        prefill(source, changed[kept:], other)
        plan = plan_handoff(130, repair_window=8)
        mirror.follow(other, changed)
        torch.testing.assert_close(
            stacked(mirror.hand_over(other, changed, plan).cache),
            stacked(bridge.hand_over(other, changed, plan).cache),
            rtol=0,
            atol=2e-5,
        )


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=lambda rope: rope["rope_type"])
def test_frequencies_that_change_are_those_of_a_map_at_the_switch(
    rope: dict, random_model: Callable
) -> None:
    source = random_model("llama", seed=1, max_positions=128)
    target = random_model("llama", seed=0, max_positions=64, rope=rope)
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    ids = random_tokens(64)
    mirror = Mirror(bridge, first_tokens=2, tokens_per_block=8)
    cache = read_along(source, ids, mirror, prompt=20)
    plan = plan_handoff(64, first_tokens=2, repair_window=8)
    mirrored = stacked(mirror.hand_over(cache, ids, plan).cache)
    expected = stacked(bridge.hand_over(cache, ids, plan).cache)
    torch.testing.assert_close(mirrored, expected, rtol=0, atol=2e-5)


def test_first_tokens_from_the_sink_table_are_counted(random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    ids = random_tokens(60)
    pool = view_pool(prefill(target, ids[:3]).cache)
    sink = SinkEntry(tuple(ids[:3]), torch.cat(pool.keys), torch.cat(pool.values))
    bridge = KvBridge(copy_map(source, target, (sink,)), source=source, target=target)
    mirror = Mirror(bridge, first_tokens=3, tokens_per_block=16)
    cache = read_along(source, ids, mirror)
    mirrored = mirror.hand_over(cache, ids, plan_handoff(60, first_tokens=3, repair_window=16))
    assert mirrored.sink_tokens == 3
    assert torch.equal(stacked(mirrored.cache)[..., :3, :], stacked(prefill(target, ids[:3]).cache))


def test_a_conversation_that_is_too_short_to_map_is_handed_over_plainly(
    random_model: Callable,
) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    ids = random_tokens(20)
    mirror = Mirror(bridge)
    cache = read_along(source, ids, mirror, prompt=5)
    assert mirror.entries == 0
    handoff = mirror.hand_over(cache, ids, plan_handoff(20))
    assert torch.equal(handoff.logits, bridge.hand_over(cache, ids, plan_handoff(20)).logits)


def test_mistakes_are_one_sentence_and_change_nothing(random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    with pytest.raises(InputError, match="tokens_per_block of at least 1"):
        Mirror(bridge, tokens_per_block=0)
    ids = random_tokens(90)
    mirror = Mirror(bridge)
    cache = read_along(source, ids, mirror)
    with pytest.raises(InputError, match=r"maps from 4; the mirror holds 0 and maps from 1"):
        mirror.hand_over(cache, ids, plan_handoff(90, first_tokens=4))
    with pytest.raises(InputError, match="splices 10 tokens"):
        mirror.hand_over(cache, ids, plan_handoff(90, spliced=10))
    with pytest.raises(InputError, match="Token ids reach from"):
        mirror.follow(prefill(source, random_tokens(40), cache).cache, [*ids, *([10**6] * 40)])
    assert mirror.entries == 64
