"""What a hand-over writes, part by part, against caches put together by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from caches import stacked, tokens
from handmade_maps import copy_map, own_layer_map, random_map
from random_models import available_architectures
from streams import require_equal_streams

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.native import SinkEntry
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate, generate_batch
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.inject.hf_cache import HfCache, fork, make_cache, num_entries, view_pool
from trtllm_kvmap.models import LoadedModel, RemoteModel
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.spec.rope import RopeParams


def unstacked(loaded: LoadedModel, whole: torch.Tensor) -> HfCache:
    cache = make_cache(loaded.spec, whole.shape[4], batch=whole.shape[2])
    pool = view_pool(cache)
    for layer in range(loaded.spec.num_layers):
        pool.keys[layer].copy_(whole[0, layer])
        pool.values[layer].copy_(whole[1, layer])
    return cache


def turned(
    keys: torch.Tensor, positions: torch.Tensor, rope: RopeParams, sign: int
) -> torch.Tensor:
    """RoPE in complex numbers: channel pair z becomes z * exp(i sign position frequency)."""
    half = keys.shape[-1] // 2
    frequency = rope.theta ** -(torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(keys[..., :half].double(), keys[..., half:].double())
    z = z * torch.exp(1j * sign * positions[:, None] * frequency)
    return torch.cat([z.real, z.imag], dim=-1)


def mapped_by_formula(kvmap: KvMap, source: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """y = sum_i x_i W_i + b for one sequence, float64 [2, layers, heads, entries, head_dim]."""
    layers, heads, head_dim = kvmap.target.kv_shape
    result = torch.full((2, layers, heads, len(positions), head_dim), float("nan")).double()
    contents = {
        "key": turned(source[0], positions, kvmap.source.rope, -1),
        "value": source[1].double(),
    }
    for group in kvmap.groups:
        (head,) = group.heads
        x = torch.cat([contents[s.field][s.layer, s.head] for s in group.slices], dim=-1)
        y = x @ group.weight.double() + group.bias.double()
        if group.field == "key":
            y = turned(y, positions, kvmap.target.rope, +1)
        result[int(group.field == "value"), group.layer, head] = y
    return result


# --- A map that is the identity of a model with itself -------------------------------------------


@pytest.mark.parametrize("architecture", available_architectures())
def test_identity_handover_decodes_what_the_model_alone_decodes(
    architecture: str, random_model: Callable
) -> None:
    loaded = random_model(architecture)
    ids, steps = tokens(60), 200
    native = loaded.model.generate(ids[None], max_new_tokens=steps, do_sample=False)[
        0, 60:
    ].tolist()
    bridge = KvBridge(copy_map(loaded, loaded), source=loaded, target=loaded)
    handoff = bridge.hand_over(prefill(loaded, ids).cache, ids, plan_handoff(60, repair_window=16))
    mine = generate(loaded, handoff.cache, handoff.logits, steps)
    seen = prefill(loaded, torch.cat([ids, torch.tensor(native)])).logits
    require_equal_streams(mine, native, seen[59:-1])
    assert len(set(native)) > 5, "a stream of one token proves nothing"


@pytest.mark.parametrize("architecture", available_architectures())
def test_identity_convert_is_the_cache_itself(architecture: str, random_model: Callable) -> None:
    loaded = random_model(architecture)
    ids = tokens(40)
    own = prefill(loaded, ids).cache
    bridge = KvBridge(copy_map(loaded, loaded), source=loaded, target=loaded)
    assert torch.equal(stacked(bridge.convert(own, ids, first_tokens=0)), stacked(own))
    torch.testing.assert_close(stacked(bridge.convert(own, ids)), stacked(own), rtol=0, atol=1e-5)


# --- Every part of the plan comes from where it should -------------------------------------------


def test_computing_everything_is_the_target_itself(random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    ids = tokens(30)
    source_cache = prefill(source, ids).cache
    native = prefill(target, ids)
    everything = bridge.hand_over(
        source_cache, ids, plan_handoff(30, first_tokens=0, repair_window=30)
    )
    assert torch.equal(stacked(everything.cache), stacked(native.cache))
    one_by_one = prefill(target, ids, logits_to_keep=1)
    assert torch.equal(everything.logits, one_by_one.logits[0])
    # With first tokens the target reads in two passes; native reading in the same two is equal.
    two = bridge.hand_over(source_cache, ids, plan_handoff(30, first_tokens=4, repair_window=26))
    again = prefill(target, ids[:4]).cache
    last = prefill(target, ids[4:], again, logits_to_keep=1)
    assert torch.equal(two.logits, last.logits[0])
    assert torch.equal(stacked(two.cache), stacked(again))
    torch.testing.assert_close(two.logits, native.logits[-1], rtol=0, atol=2e-5)


def test_each_part_of_the_cache_comes_from_its_own_place(random_model: Callable) -> None:
    """spliced: the target's cache, bit for bit; first: read by the target on top of it; mapped: the
    source's (a copy map), bit for bit; repaired: read by the target on top of all that.
    """
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    ids = tokens(50)
    source_cache, target_cache = prefill(source, ids[:45]).cache, prefill(target, ids[:13]).cache
    plan = plan_handoff(50, spliced=6, first_tokens=9, repair_window=8)
    handoff = bridge.hand_over(source_cache, ids, plan, target_cache)

    own = fork(target_cache, 6)
    prefill(target, ids[6:9], own)
    mapped = stacked(source_cache)[..., 9:42, :]
    by_hand = unstacked(target, torch.cat([stacked(own), mapped], dim=4))
    repaired = prefill(target, ids[42:], by_hand, logits_to_keep=1)
    assert torch.equal(stacked(handoff.cache), stacked(by_hand))
    assert torch.equal(handoff.logits, repaired.logits[0])
    assert torch.equal(stacked(handoff.cache)[..., :6, :], stacked(target_cache)[..., :6, :])
    assert handoff.plan == plan
    assert (num_entries(source_cache), num_entries(target_cache)) == (45, 13)


def test_what_is_mapped_reaches_the_logits(random_model: Callable) -> None:
    """The same plan over two different source caches must not decode alike."""
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    ids, plan = tokens(50), plan_handoff(50, repair_window=8)
    own = bridge.hand_over(prefill(source, ids).cache, ids, plan)
    strange = bridge.hand_over(prefill(source, tokens(50, seed=9)).cache, ids, plan)
    assert (own.logits - strange.logits).abs().max() > 0.05


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_unequal_geometry_is_mapped_by_the_formula(backend: str, random_model: Callable) -> None:
    source = random_model("llama", layers=3, heads=4, kv_heads=4, head_dim=16, seed=1)
    target = random_model(
        "qwen3", layers=2, heads=2, kv_heads=2, head_dim=32, rope={"rope_theta": 500.0}
    )
    kvmap = random_map(source, target)
    ids = tokens(33)
    source_cache = prefill(source, ids).cache
    before = stacked(source_cache).clone()
    bridge = KvBridge(kvmap, source=source, target=target, backend=backend)
    converted = stacked(bridge.convert(source_cache, ids, first_tokens=2))[:, :, 0]
    expected = mapped_by_formula(kvmap, before[:, :, 0], torch.arange(33))
    expected[..., :2, :] = stacked(prefill(target, ids[:2]).cache)[:, :, 0].double()
    torch.testing.assert_close(converted.double(), expected, rtol=0, atol=3e-5)
    assert torch.equal(stacked(source_cache), before)


def test_a_map_that_reads_token_ids_is_given_the_right_ones(random_model: Callable) -> None:
    """The target's layer 0 through its own slices, from the token ids alone, is exact."""
    source, target = random_model(seed=1), random_model(seed=0)
    kvmap = own_layer_map(source, target)
    bridge = KvBridge(kvmap, source=source, target=target)
    ids, mask = tokens(2, 30), torch.ones(2, 30)
    mask[1, :9] = 0
    source_cache = prefill(source, ids, attention_mask=mask).cache
    converted = stacked(bridge.convert(source_cache, ids, first_tokens=0, attention_mask=mask))
    native = stacked(prefill(target, ids, attention_mask=mask).cache)
    for row, pads in ((0, 0), (1, 9)):
        mine, theirs = (whole[:, 0, row, :, pads:] for whole in (converted, native))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)


def test_a_source_that_another_process_holds_is_checked_and_maps_alike(
    random_model: Callable,
) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    kvmap = copy_map(source, target)
    remote = RemoteModel(source.name, source.spec, source.fingerprint)
    ids, plan = tokens(30), plan_handoff(30, repair_window=4)
    cache = prefill(source, ids).cache
    here, there = (
        KvBridge(kvmap, source=held, target=target).hand_over(cache, ids, plan)
        for held in (source, remote)
    )
    assert torch.equal(stacked(here.cache), stacked(there.cache))
    assert torch.equal(here.logits, there.logits)
    stranger = RemoteModel(target.name, target.spec, target.fingerprint)
    with pytest.raises(MismatchError, match="another source"):
        KvBridge(kvmap, source=stranger, target=target)


def test_times_of_every_step_are_reported(random_model: Callable) -> None:
    loaded = random_model()
    bridge = KvBridge(copy_map(loaded, loaded), source=loaded, target=loaded)
    ids = tokens(40)
    cache = prefill(loaded, ids).cache
    handoff = bridge.hand_over(cache, ids, plan_handoff(40, spliced=4, repair_window=4), cache)
    assert list(handoff.seconds) == ["splice", "first", "map", "repair"]
    assert all(value > 0 for value in handoff.seconds.values())


# --- Left-padded batches -------------------------------------------------------------------------

LENGTHS = (40, 31, 11, 5, 1)  # the last two are shorter than the repair window


def padded_batch() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    rows = [tokens(length, seed=length) for length in LENGTHS]
    ids, mask = torch.zeros(len(rows), 40, dtype=torch.long), torch.zeros(len(rows), 40)
    for index, row in enumerate(rows):
        ids[index, 40 - len(row) :] = row
        mask[index, 40 - len(row) :] = 1
    return rows, ids, mask


@pytest.mark.parametrize(
    ("first_tokens", "repair_window"), [(0, 8), (1, 8), (4, 8), (4, 36), (0, 40)]
)
def test_a_padded_batch_is_handed_over_row_by_row(
    first_tokens: int, repair_window: int, random_model: Callable
) -> None:
    source = random_model("llama", layers=3, kv_heads=4, seed=1)
    target = random_model("qwen3", head_dim=32)
    bridge = KvBridge(random_map(source, target), source=source, target=target)
    rows, ids, mask = padded_batch()
    source_cache = prefill(source, ids, attention_mask=mask).cache
    plan = plan_handoff(40, first_tokens=first_tokens, repair_window=repair_window)
    batch = bridge.hand_over(source_cache, ids, plan, attention_mask=mask)
    assert batch.logits.shape == (len(rows), target.spec.vocab_size)
    new = generate_batch(target, fork(batch.cache), batch.logits, 12, attention_mask=mask)
    whole = stacked(batch.cache)
    for index, row in enumerate(rows):
        own_plan = plan_handoff(len(row), first_tokens=first_tokens, repair_window=repair_window)
        alone = bridge.hand_over(prefill(source, row).cache, row, own_plan)
        torch.testing.assert_close(batch.logits[index], alone.logits, rtol=0, atol=5e-5)
        kept = whole[:, :, index, :, 40 - len(row) :]
        torch.testing.assert_close(kept, stacked(alone.cache)[:, :, 0], rtol=0, atol=5e-5)
        pads = whole[:, :, index, :, : min(40 - len(row), plan.mapped.stop)]
        assert not pads.any(), "a pad was written"
        stream = generate(target, fork(alone.cache), alone.logits, 12)
        seen = prefill(target, torch.tensor(stream), alone.cache).logits
        chosen_from = torch.cat([alone.logits[None], seen[:-1]])
        require_equal_streams(new[index], stream, chosen_from, margin=1e-3)


def test_a_padded_batch_converts_row_by_row(random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    rows, ids, mask = padded_batch()
    source_cache = prefill(source, ids, attention_mask=mask).cache
    whole = stacked(bridge.convert(source_cache, ids, first_tokens=2, attention_mask=mask))
    expected = stacked(source_cache)
    for index, row in enumerate(rows):
        pads = 40 - len(row)
        expected[:, :, index, :, :pads] = 0
        own = stacked(prefill(target, row[:2]).cache)[:, :, 0]
        there = whole[:, :, index, :, pads : pads + own.shape[3]]
        torch.testing.assert_close(there, own, rtol=0, atol=2e-5)
        expected[:, :, index, :, pads : pads + own.shape[3]] = there
    assert torch.equal(whole, expected)


def test_a_batch_without_pads_can_be_spliced(random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    ids = tokens(3, 40)
    source_cache, target_cache = prefill(source, ids).cache, prefill(target, ids[:, :10]).cache
    plan = plan_handoff(40, spliced=10, repair_window=8)
    batch = bridge.hand_over(source_cache, ids, plan, target_cache)
    assert torch.equal(stacked(batch.cache)[..., :10, :], stacked(target_cache))
    assert torch.equal(stacked(batch.cache)[..., 10:32, :], stacked(source_cache)[..., 10:32, :])


# --- The sink table ------------------------------------------------------------------------------


def sink_of(target: LoadedModel, ids: torch.Tensor, shift: float = 0.0) -> SinkEntry:
    whole = stacked(prefill(target, ids).cache)[:, :, 0]
    return SinkEntry(tuple(ids.tolist()), whole[0].clone(), whole[1].clone() + shift)


def test_a_known_prefix_comes_from_the_sink_table(random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    ids, plan = tokens(40), plan_handoff(40, first_tokens=4, repair_window=8)
    source_cache = prefill(source, ids).cache

    def hand_over(*sinks: SinkEntry) -> object:
        bridge = KvBridge(copy_map(source, target, sinks), source=source, target=target)
        return bridge.hand_over(source_cache, ids, plan)

    computed = hand_over()
    hit = hand_over(sink_of(target, ids[:6]))
    wrong = hand_over(sink_of(target, ids[:6], shift=3.0))
    partly = hand_over(sink_of(target, ids[:3], shift=3.0))
    miss = hand_over(sink_of(target, ids[1:7], shift=3.0))
    assert [h.sink_tokens for h in (computed, hit, wrong, partly, miss)] == [0, 4, 4, 3, 0]
    torch.testing.assert_close(hit.logits, computed.logits, rtol=0, atol=2e-5)
    assert torch.equal(miss.logits, computed.logits)
    assert (wrong.logits - computed.logits).abs().max() > 0.05
    assert (partly.logits - computed.logits).abs().max() > 0.05
    shifted = stacked(wrong.cache)[1, ..., :4, :] - stacked(hit.cache)[1, ..., :4, :]
    torch.testing.assert_close(shifted, torch.full_like(shifted, 3.0))


def test_an_exact_prefix_goes_before_the_sink_table(random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    ids = tokens(40)
    kvmap = copy_map(source, target, (sink_of(target, ids[:6], shift=3.0),))
    bridge = KvBridge(kvmap, source=source, target=target)
    plan = plan_handoff(40, spliced=1, first_tokens=4, repair_window=8)
    target_cache = prefill(target, ids[:2]).cache
    handoff = bridge.hand_over(prefill(source, ids).cache, ids, plan, target_cache)
    assert handoff.sink_tokens == 0
    expected = prefill(target, ids[1:4], fork(target_cache, 1)).cache
    assert torch.equal(stacked(handoff.cache)[..., :4, :], stacked(expected))


def test_the_sink_table_serves_a_batch_only_when_it_knows_every_row(random_model: Callable) -> None:
    source, target = random_model(seed=1), random_model(seed=0)
    ids = tokens(2, 40)
    plan = plan_handoff(40, first_tokens=3, repair_window=8)
    source_cache = prefill(source, ids).cache
    for known, taken in (((), 0), ((6,), 0), ((6, 6), 3), ((6, 2), 2)):
        sinks = tuple(sink_of(target, row[:n]) for n, row in zip(known, ids, strict=False))
        bridge = KvBridge(copy_map(source, target, sinks), source=source, target=target)
        handoff = bridge.hand_over(source_cache, ids, plan)
        assert handoff.sink_tokens == taken
        own = stacked(prefill(target, ids[:, :3]).cache)
        torch.testing.assert_close(stacked(handoff.cache)[..., :3, :], own, rtol=0, atol=2e-5)
