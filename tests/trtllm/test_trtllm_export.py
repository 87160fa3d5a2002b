"""A source on the FAKE TensorRT-LLM keeps what it is told to, and a target goes on from it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import fake_blocks
import pytest
import torch
from connector_cases import Ask, require
from connector_world import World
from fake_host import FakeTrtLlm, Shell, start_source, start_target, write_settings

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import UnavailableError
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.channel import Listener, connect
from trtllm_kvmap.exchange.in_process import InProcessTransport
from trtllm_kvmap.exchange.messages import Reason
from trtllm_kvmap.exchange.offer import Expected, make_offer
from trtllm_kvmap.exchange.receive import receive_blocks
from trtllm_kvmap.exchange.send import send_blocks
from trtllm_kvmap.inject.connector.blocks import Offer
from trtllm_kvmap.inject.connector.received import ReceivedBlocks, pack_exported
from trtllm_kvmap.inject.hf_cache import view_pool
from trtllm_kvmap.mapper.paging import Places
from trtllm_kvmap.spec.layout import trtllm_layout


@pytest.fixture
def exports(imported: Shell, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = __import__(imported.connector.KvExportScheduler.__module__, fromlist=["x"])
    made = module.WantedExports()
    monkeypatch.setattr(fake_blocks, "EXPORTS", made)
    return made


@pytest.fixture
def source(
    imported: Shell,
    exports: Any,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> FakeTrtLlm:
    path = write_settings(tmp_path / "source.json", exports="fake_blocks:EXPORTS")
    monkeypatch.setenv("TRTLLM_KVMAP_CONNECTOR", path)
    return start_source(imported, world.source)


def test_prompt_and_answer_are_kept_as_the_model_computed_them(
    source: FakeTrtLlm, exports: Any, world: World
) -> None:
    """Beside others, in a pool that is used again afterwards."""
    ids, other = world.prompt(31), world.prompt(32)
    exports.want("mine", ids)
    (answer, _) = source.run([Ask(ids, 9), Ask(other, 3)])
    source.forget()
    source.executor.cache.pool.fill_(float("nan"))
    exported = exports.take("mine")
    read = (*ids, *answer.token_ids[:-1])
    assert exported.token_ids == read, "the last token was sampled and never read"
    expected = view_pool(prefill(world.source, list(read)).cache)
    for kept, views in ((exported.keys, expected.keys), (exported.values, expected.values)):
        torch.testing.assert_close(kept, torch.stack(views)[:, 0], rtol=1e-4, atol=1e-4)
    with pytest.raises(UnavailableError, match="No export named 'mine'"):
        exports.take("mine")


def test_a_target_goes_on_from_what_the_source_kept(
    source: FakeTrtLlm, exports: Any, imported: Shell, world: World, request: Any
) -> None:
    ids = world.prompt(33)
    exports.want("hand-over", ids)
    source.run([Ask(ids, 1)])
    exported = exports.take("hand-over")
    request.getfixturevalue("settings")
    target = start_target(imported, world.target, fake_blocks.BLOCKS.awaited)
    offer = Offer(world.identity(), exported.token_ids, world.source.fingerprint)
    salt = fake_blocks.BLOCKS.offer(offer, exported.as_source())
    (answer,) = target.run([Ask(ids, salt=salt)])
    require(answer, world.expect(ids, 16, end=(len(ids) - 20) // 32 * 32))


@pytest.mark.parametrize("corrupt", [False, True])
def test_from_engine_to_engine_over_an_exchange(
    source: FakeTrtLlm,
    exports: Any,
    imported: Shell,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    corrupt: bool,
) -> None:
    """Both engines are fakes around real models; the exchange is the real one, in one process."""
    ids = world.prompt(36)
    exports.want("hand-over", ids)
    source.run([Ask(ids, 1)])
    exported, transport = exports.take("hand-over"), InProcessTransport()
    layout = trtllm_layout(24, *world.source.spec.kv_shape[:2], 16, world.source.spec.head_dim)
    sent_from, landing = (BlockPool.allocate(layout, "float32") for _ in range(2))
    blocks = pack_exported(exported, sent_from)
    address = transport.expose(sent_from)
    fingerprint = world.source.fingerprint
    offer = make_offer("r1", fingerprint, ids, len(ids), sent_from, address)
    wanted = Expected("r1", fingerprint, world.source.spec.kv_shape, tuple(ids))
    with closing(Listener()) as listener, ThreadPoolExecutor(1) as threads:
        if corrupt:
            wrong = "trtllm_kvmap.exchange.send.block_checksums"
            monkeypatch.setattr(wrong, lambda name, data, part: (0,) * len(part))
        sent = threads.submit(
            lambda: send_blocks(connect(listener.address, 5.0), offer, sent_from, blocks)
        )
        received = receive_blocks(listener, wanted, {"in_process": transport}, landing)
        assert (sent.result(30).reason is Reason.COMPLETE) is not corrupt
    held = ReceivedBlocks(landing)
    monkeypatch.setattr(fake_blocks, "RECEIVED", held)
    path = write_settings(
        tmp_path / "target.json",
        kvmap=str(world.path),
        blocks="fake_blocks:RECEIVED",
        first_tokens=4,
        repair_window=20,
        allow_unproven=True,
    )
    monkeypatch.setenv("TRTLLM_KVMAP_CONNECTOR", path)
    target = start_target(imported, world.target, set())
    salt = held.hold(Offer(world.identity(), tuple(ids), fingerprint), received)
    (answer,) = target.run([Ask(ids, salt=salt)])
    assert answer.status is not None
    if corrupt:
        require(answer, world.native(ids, 16))
        assert answer.status["state"] == "fallback_reprefill"
        assert "corrupted" in answer.status["reason"]
    else:
        require(answer, world.expect(ids, 16, end=(len(ids) - 20) // 32 * 32))
        assert answer.status["state"] == "applied"
    assert (landing.num_free, sent_from.num_free, held.salts()) == (24, 24, ())


def test_blocks_are_held_until_the_copy_is_done(
    source: FakeTrtLlm, exports: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        done = False

        def query(self) -> bool:
            return self.done

    copied = Slow()

    ids, worker = world.prompt(34), source.executor.worker
    begin = worker._begin

    def slowly(request_id: int) -> bool:
        begun = begin(request_id)
        worker._copying = {key: (*entry[:2], copied) for key, entry in worker._copying.items()}
        return begun

    monkeypatch.setattr(worker, "_begin", slowly)
    exports.want("slow", ids)
    free = len(source.executor.cache._free)
    request = source.submit(Ask(ids, 1))
    for _ in range(5):
        source.executor.step()
    held = source.executor.cache.get_cache_indices(request)
    assert len(held) == -(-len(ids) // 32)
    assert len(source.executor.cache._free) == free - len(held)
    assert all(source.executor.cache._users[block] for block in held)
    with pytest.raises(UnavailableError):
        exports.take("slow")
    copied.done = True
    source.executor.run()
    assert not any(source.executor.cache._users.values())
    assert exports.take("slow").token_ids == tuple(ids)


def test_a_copy_off_the_cpu_is_a_gather_for_each_layer() -> None:
    """The engine's loop would wait for a launch per block and layer."""
    slots = torch.cat([torch.arange(640, 1280), torch.arange(0, 64)])
    assert Places.of(slots, 32, torch.device("cpu")).runs
    assert not Places.of(slots, 32, torch.device("meta")).runs


def test_the_longest_prompt_asked_for_wins_and_others_stay_wanted(exports: Any) -> None:
    exports.want("short", [1, 2])
    exports.want("long", [1, 2, 3])
    assert exports.order(1, [1, 2, 3, 4], [0], 32)
    assert exports.take_order(1).name == "long"
    assert not exports.order(2, [1], [0], 32)
    assert exports.order(3, [1, 2, 9], [0], 32)
    assert exports.take_order(3).name == "short"
    assert exports.take_order(3) is None
    assert not exports.order(4, [1, 2, 3, 4], [0], 32), "one request is kept for each name"


def test_what_cannot_be_kept_lets_go_of_its_blocks(
    source: FakeTrtLlm, exports: Any, world: World
) -> None:
    ids = world.prompt(35)
    # Cancelled before its prompt was read.
    exports.want("cancelled", ids)
    request = source.submit(Ask(ids, 4))
    source.executor._max_num_tokens = 64
    source.executor.step()
    request.cancelled = True
    source.executor.run()
    assert request.context_remaining_length > 0
    # An adapter's KV is not this model's.
    source.submit(Ask(ids, 1), lora_task_id=3)
    source.executor.run()
    # A block that is not in the pool.
    assert source.executor.scheduler._exports.order(99, ids, [-1, 0, 1, 2, 3, 4, 5, 6, 7, 8], 32)
    assert source.executor.worker.get_finished([99], []) == ([99], [])
    with pytest.raises(UnavailableError):
        exports.take("cancelled")
    assert not any(source.executor.cache._users.values())
