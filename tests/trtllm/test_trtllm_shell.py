"""What only this engine does to a connector: order, bands of layers, blocks by chunk, salts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_blocks
import fake_tensorrt_llm as fake
import pytest
import torch
from connector_cases import Ask, mapped_end, require, require_status
from connector_world import REPAIR_WINDOW, World
from fake_host import FakeTrtLlm, Shell, start_target

from trtllm_kvmap.errors import UnavailableError
from trtllm_kvmap.inject.connector.blocks import InProcessBlocks
from trtllm_kvmap.inject.trtllm.bands import layers_of, make_bands
from trtllm_kvmap.inject.trtllm.staged import StagedBlocks


def _start(imported: Shell, world: World, **options: Any) -> FakeTrtLlm:
    return start_target(imported, world.target, fake_blocks.BLOCKS.awaited, **options)


def test_the_order_of_calls_is_upstreams(host: FakeTrtLlm, world: World) -> None:
    """Written down from the engine's own loop; a fake of another order would prove nothing."""
    ids = world.prompt(1)
    host.run([Ask(ids, 2, salt=world.offer(ids))])
    layers = world.target.spec.num_layers
    forward = ["build_connector_meta", "bind_connector_meta", "start_load_kv"]
    for layer in range(layers):
        forward += [f"wait_for_layer_load {layer}", f"save_kv_layer {layer}"]
    forward.append("wait_for_save")
    assert host.executor.trace == [
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        *forward,
        "get_finished",
        *forward,
        "request_finished",
        "get_finished",
    ]


@pytest.mark.parametrize("layers_per_band", [1, 2, 5, 8])
def test_bands_of_any_width_map_the_same(
    imported: Shell, settings: Path, world: World, layers_per_band: int
) -> None:
    host = _start(imported, world, layers_per_band=layers_per_band)
    ids = world.prompt(2)
    (answer,) = host.run([Ask(ids, salt=world.offer(ids))])
    require(answer, world.expect(ids, 16, end=mapped_end(host, ids)))


def test_a_layer_is_mapped_just_before_it_runs(
    imported: Shell, settings: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = _start(imported, world, layers_per_band=2)
    ids, blocks = world.prompt(3), host.executor.cache.blocks
    seen = []
    wait = host.executor.worker.wait_for_layer_load

    def spy(layer: int, stream: object) -> None:
        wait(layer, stream)
        table = host.executor.cache.get_cache_indices(request)
        filled = [bool(torch.isfinite(blocks[table[1], n]).all()) for n in range(5)]
        seen.append((layer, filled))

    monkeypatch.setattr(host.executor.worker, "wait_for_layer_load", spy)
    request = host.submit(Ask(ids, 1, salt=world.offer(ids)))
    host.executor.run()
    assert seen == [(layer, [n < (layer // 2 + 1) * 2 for n in range(5)]) for layer in range(5)]


def test_a_part_of_a_map_shares_its_weights(world: World) -> None:
    part = layers_of(world.kvmap, 1, 3)
    whole = [g for g in world.kvmap.groups if g.layer in (1, 2)]
    assert part.target.num_layers == 2
    assert [g.layer for g in part.groups] == [g.layer - 1 for g in whole]
    for mine, theirs in zip(part.groups, whole, strict=True):
        assert mine.weight is theirs.weight
    bands = make_bands(world.kvmap, InProcessBlocks(), "cpu", 2)
    assert [(band.first, band.last) for band in bands] == [(0, 2), (2, 4), (4, 5)]


@pytest.mark.parametrize("imported", fake.VERSIONS, indirect=True)
def test_nothing_outside_the_mapped_tokens_is_written(
    imported: Shell, settings: Path, world: World
) -> None:
    """The calls alone, without an engine: blocks come in two parts, one of them not here."""
    host = _start(imported, world)
    scheduler, worker, cache = host.executor.scheduler, host.executor.worker, host.executor.cache
    ids = world.prompt(4)
    request = _request(host, 7, ids, world.offer(ids))
    matched, load_async = scheduler.get_num_new_matched_tokens(request, 0)
    assert (matched, load_async) == (mapped_end(host, ids), False)
    count, size = matched // 32, 32
    table = [9, -1, 3, *range(20, 20 + count - 3)]
    names = fake.make_modules(imported.version)[fake.CONNECTOR[imported.version]]

    def step(new: list[int], cached: list[int]) -> None:
        data = [
            [names.RequestData(7, ids, blocks, 0, 32)] if blocks else [] for blocks in (new, cached)
        ]
        worker.bind_connector_meta(scheduler.build_connector_meta(names.SchedulerOutput(*data)))
        worker.start_load_kv(None)
        for layer in range(5):
            worker.wait_for_layer_load(layer, None)
        worker.wait_for_save(None)

    scheduler.update_state_after_alloc(request, table[:2])
    before = cache.pool.clone()
    step(table[:2], [])
    _require_written(cache.pool, before, {9})
    step([], table[2:])
    _require_written(cache.pool, before, {block for block in table if block >= 0})
    after = cache.pool.clone()
    step([], [40])  # a block of decoded tokens: nothing is left to load
    assert torch.equal(cache.pool.view(torch.int32), after.view(torch.int32))
    assert scheduler.request_finished(request, [*table, 40]) is False
    assert host.statuses[7]["mapped"] + host.statuses[7]["sink"] == count * size


def _require_written(pool: torch.Tensor, before: torch.Tensor, blocks: set[int]) -> None:
    for block in range(len(pool)):
        if block in blocks:
            assert bool(torch.isfinite(pool[block]).all()), block
        else:
            same = torch.equal(pool[block].view(torch.int32), before[block].view(torch.int32))
            assert same, block


@pytest.mark.parametrize("computed", [0, 5, 32, 45, 96, 10_000])
def test_matched_tokens_follow_the_formula(
    imported: Shell, settings: Path, world: World, computed: int
) -> None:
    host = _start(imported, world)
    for number, words in enumerate((40, 150, 260)):
        ids = world.prompt(5, words)
        request = _request(host, number, ids, world.offer(ids))
        have = min(computed, len(ids) - 1)
        matched, _ = host.executor.scheduler.get_num_new_matched_tokens(request, have)
        assert matched == max(0, (len(ids) - REPAIR_WINDOW) // 32 * 32 - have)


def test_a_partly_reused_block_is_filled_from_its_middle(
    imported: Shell, settings: Path, world: World
) -> None:
    """The next turn differs within a block of the last one: the engine copies its beginning."""
    host = _start(imported, world, partial_reuse=True)
    ids = world.prompt(6)
    identity = world.identity()
    other = [*ids[: 2 * 32 + 11], *world.prompt(7)[1:60]]
    (first,) = host.run([Ask(other, 4, salt=identity.salt, handoff=identity.salt)])
    require(first, world.native(other, 4))
    (answer,) = host.run([Ask(ids, salt=world.offer(ids, identity=identity))])
    shared = next(i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b)
    assert answer.cached == shared >= 2 * 32 + 11
    assert shared % 32, "it should end inside a block"
    end = mapped_end(host, ids)
    require(answer, world.expect(ids, 16, end=end, spliced=shared))
    assert answer.status is not None
    assert answer.status["mapped"] == end - shared


def test_blocks_that_come_with_the_chunks(imported: Shell, settings: Path, world: World) -> None:
    host = _start(imported, world, max_num_tokens=48, blocks_by_chunk=True)
    ids = world.prompt(8, 300)
    read = ids[: len(ids) // 2]
    (answer,) = host.run([Ask(ids, salt=world.offer(read))])
    require(answer, world.expect(ids, 16, end=len(read) // 32 * 32))


@pytest.mark.parametrize("imported", fake.VERSIONS, indirect=True)
def test_a_request_without_the_salt_is_a_plain_one(host: FakeTrtLlm, world: World) -> None:
    ids = world.prompt(9)
    salt = world.offer(ids)
    for answer in host.run([Ask(ids), Ask(ids, salt="another")]):
        require(answer, world.native(ids, 16))
        assert (answer.status, answer.cached) == (None, 0)
    (right,) = host.run([Ask(ids, salt=salt)])
    require(right, world.expect(ids, 16, end=mapped_end(host, ids)))


def test_a_lora_request_is_computed(host: FakeTrtLlm, world: World) -> None:
    """The fake runs the same model for it, so the answer is the target's own."""
    ids = world.prompt(10)
    request = host.submit(Ask(ids, 4, salt=world.offer(ids)), lora_task_id=1)
    host.executor.run()
    answer = host.answer(request)
    require(answer, world.native(ids, 4))
    require_status(answer, "fallback_reprefill", matched=0, computed=len(ids))
    assert "LoRA" in answer.status["reason"]


def test_a_load_that_fails_after_its_promise_fails_loudly(
    host: FakeTrtLlm, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves nothing: the next request is answered by the target."""
    ids = world.prompt(11)
    salt = world.offer(ids)
    request = host.submit(Ask(ids, 4, salt=salt))

    def gone(self: StagedBlocks, salt: str) -> None:
        raise UnavailableError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(type(host.executor.worker._bands[0].worker._blocks.blocks), "fetch", gone)
        host.executor.run()
    assert "was promised tokens 0 to" in request.error
    assert len(request.tokens) == request.prompt_len
    (plain,) = host.run([Ask(ids, salt=salt)])
    require(plain, world.native(ids, 16))
    assert plain.cached == 0


def test_layers_whose_hooks_do_not_run_fail_loudly(
    host: FakeTrtLlm, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = world.prompt(12)
    monkeypatch.setattr(host.executor, "_before_layer", lambda layer: None)
    request = host.submit(Ask(ids, 4, salt=world.offer(ids)))
    host.executor.run()
    assert "wait_for_layer_load for no layer of 3 of 3 bands" in request.error


def test_a_pass_without_new_metadata_loads_nothing_again(host: FakeTrtLlm, world: World) -> None:
    ids = world.prompt(13)
    host.submit(Ask(ids, 4, salt=world.offer(ids)))
    host.executor.step()
    host.executor.cache.pool.fill_(7.0)
    host.executor.worker.start_load_kv(None)
    for layer in range(5):
        host.executor.worker.wait_for_layer_load(layer, None)
    assert bool((host.executor.cache.pool == 7.0).all())


def test_blocks_that_do_not_fit_are_known_before_the_promise(
    host: FakeTrtLlm, world: World
) -> None:
    ids = world.prompt(14)
    salt = world.offer(ids)
    offer, source = fake_blocks.BLOCKS._held[salt]
    wrong = type(source.pool)(source.pool.keys[:2], source.pool.values[:2])
    fake_blocks.BLOCKS._held[salt] = offer, type(source)(wrong, source.slots, source.rope_length)
    (answer,) = host.run([Ask(ids, salt=salt)])
    require(answer, world.native(ids, 16))
    require_status(answer, "fallback_reprefill", matched=0)
    assert "they hold (layers, KV heads, head_dim) = (2, 2, 32)" in answer.status["reason"]
    assert salt not in fake_blocks.BLOCKS.salts(), "what cannot be used is not held"


def test_remembered_salts_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = fake_blocks.AwaitingBlocks()
    staged = StagedBlocks(blocks, world.kvmap)
    monkeypatch.setitem(StagedBlocks.salts.__globals__, "REMEMBERED", 3)
    for number in range(5):
        blocks.awaited = {str(number)}
        staged.salts()
    assert staged.salts() == ("2", "3", "4")


def _request(host: FakeTrtLlm, number: int, ids: list[int], salt: Any) -> Any:
    if host.salt_field == "cache_salt_id":
        salt = fake.get_cache_salt_id(salt)
    return host.requests(number, len(ids), list(ids), 4, **{host.salt_field: salt})
