"""Both ends over real sockets, blocks between two pools of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from exchange_cases import POISON, TOKEN_IDS, Sending, expected, make_pool, offer_of, target

from trtllm_kvmap.errors import InputError, MismatchError, UnavailableError
from trtllm_kvmap.exchange import nixl, send
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.checksum import block_checksums
from trtllm_kvmap.exchange.in_process import InProcessTransport
from trtllm_kvmap.exchange.messages import Reason
from trtllm_kvmap.exchange.receive import NotReceived, Received


def test_blocks_arrive_whole_in_order_and_nothing_else_changes() -> None:
    source, landing = make_pool(9), make_pool(7, fill=POISON)
    block_ids = (6, 0, 3, 8, 1)
    source.take(9)
    landing.take(1)  # so that landing ids are not those of the offer
    transport = InProcessTransport()
    before = source.data.clone()
    with target(landing) as (listener, receive):
        sending = Sending(listener.address, offer_of(source, transport), source, block_ids)
        sending.start()
        received = receive()
    assert isinstance(received, Received), received
    assert sending.ended().reason is Reason.COMPLETE
    wanted = torch.full_like(landing.data, POISON)
    wanted[list(received.block_ids)] = before[list(block_ids)]
    assert torch.equal(landing.data, wanted)
    assert torch.equal(source.data, before)
    assert source.num_free == len(block_ids)
    assert landing.num_free == 7 - 1 - len(block_ids)
    assert received.offer.num_tokens == len(TOKEN_IDS)


def test_batches_grow_so_that_the_target_begins_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(name: str, data: torch.Tensor, block_ids: Sequence[int]) -> tuple[int, ...]:
        sizes.append(len(block_ids))
        return block_checksums(name, data, block_ids)

    source, landing = make_pool(5), make_pool(5)
    monkeypatch.setattr(send, "block_checksums", noted)
    for batch_bytes, wanted in ((8 << 20, [1, 2, 2]), (source.block_bytes, [1] * 5)):
        sizes: list[int] = []
        monkeypatch.setattr(send, "BATCH_BYTES", batch_bytes)
        with target(landing) as (listener, receive):
            offer, block_ids = offer_of(source, InProcessTransport()), source.take(5)
            sending = Sending(listener.address, offer, source, block_ids)
            sending.start()
            received = receive()
        assert isinstance(received, Received)
        landing.give_back(received.block_ids)
        assert sending.ended().reason is Reason.COMPLETE
        assert sizes == wanted


def test_no_room_is_refused_and_both_sides_hold_nothing() -> None:
    source, landing = make_pool(5), make_pool(4)
    with target(landing) as (listener, receive):
        offer = offer_of(source, InProcessTransport())
        sending = Sending(listener.address, offer, source, source.take(5))
        sending.start()
        result = receive()
    assert isinstance(result, NotReceived)
    assert result.reason is Reason.NO_MEMORY
    assert sending.ended().reason is Reason.NO_MEMORY
    assert (source.num_free, landing.num_free) == (5, 4)


def test_a_strange_offer_is_refused_and_the_awaited_one_still_taken() -> None:
    source, landing, transport = make_pool(10), make_pool(5), InProcessTransport()
    with target(landing) as (listener, receive):
        ids = source.take(5), source.take(5)
        strange = Sending(listener.address, offer_of(source, transport, "r0"), source, ids[0])
        strange.start()
        second = Sending(listener.address, offer_of(source, transport), source, ids[1])
        threading.Timer(0.3, second.start).start()
        assert isinstance(receive(), Received)
    assert strange.ended().reason is Reason.WRONG_REQUEST
    assert second.ended().reason is Reason.COMPLETE


def test_blocks_of_other_counts_than_the_offer_are_a_mistake() -> None:
    source = make_pool(5)
    with target(make_pool(5)) as (listener, _):
        sending = Sending(listener.address, offer_of(source, InProcessTransport()), source, (0, 1))
        with pytest.raises(InputError, match="lie in 5 blocks; 2 were given"):
            sending.run()


def test_a_pool_gives_out_no_block_twice_and_takes_none_twice() -> None:
    pool = make_pool(4)
    assert sorted((*pool.take(1), *pool.take(3))) == [0, 1, 2, 3]
    with pytest.raises(UnavailableError, match="1 blocks are needed and 0 of 4"):
        pool.take(1)
    pool.give_back((2,))
    with pytest.raises(InputError, match="twice"):
        pool.give_back((1, 2))
    assert pool.num_free == 1


def test_a_layout_with_gaps_does_not_travel() -> None:
    pool = make_pool(2)
    gaps = replace(pool.layout, token_stride=pool.layout.token_stride + 1)
    with pytest.raises(MismatchError, match="one run of bytes"):
        BlockPool(gaps, "float32", pool.data.flatten())


def test_the_view_of_a_pool_is_the_trtllm_layout() -> None:
    """element(block, layer, field, head, token, channel) lies where the strides say."""
    pool = make_pool(3)
    flat, at = pool.data.flatten().view(torch.float32), pool.layout
    place = 2 * at.block_stride + (1 * 2 + 1) * 2 * at.head_stride + at.head_stride
    place += 3 * at.token_stride + 5
    assert pool.blocks[2, 1, 1, 1, 3, 5] == flat[place]
    assert expected().kv_shape == (at.num_layers, at.num_kv_heads, at.head_dim)


class FailingOnce:
    """A binding of NIXL, and its agent: the second turn fails, as after a peer that died."""

    def __init__(self) -> None:
        self.turns, self.went_on = 0, threading.Event()

    def nixl_agent_config(self, **options: object) -> None:
        return

    def nixl_agent(self, name: str, config: None) -> FailingOnce:
        return self

    def get_new_notifs(self) -> None:
        self.turns += 1
        if self.turns == 2:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        if self.turns > 4:
            self.went_on.set()


def test_a_source_goes_on_answering_after_a_turn_that_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = FailingOnce()
    agent = nixl._Agent(api, answers=True)
    try:
        assert api.went_on.wait(5), "nobody answers the next peer"
    finally:
        agent.close()
    assert "NIXL_ERR_REMOTE_DISCONNECT" in caplog.text
    assert [record.levelname for record in caplog.records] == ["WARNING"]
