"""Peers that die, stall, lie and repeat: the target re-prefills with a reason, and no block is
lost.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from exchange_cases import (
    POISON,
    SOURCE,
    Sending,
    expected,
    frame,
    make_pool,
    offer_of,
    raw_connection,
    target,
)

from trtllm_kvmap.exchange import send
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.checksum import CHECKSUMS
from trtllm_kvmap.exchange.in_process import InProcessReader, InProcessTransport
from trtllm_kvmap.exchange.messages import Accept, Blocks, End, Offer, Reason, encode
from trtllm_kvmap.exchange.offer import refusal
from trtllm_kvmap.exchange.receive import NotReceived
from trtllm_kvmap.exchange.transport import Reader, TransferError


@pytest.fixture(autouse=True)
def one_block_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "BATCH_BYTES", 1)


class SlowTransport(InProcessTransport):
    """Its transfers take place when the test says so: each waits for ``gate``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.started = threading.Event(), threading.Event()
        self.under_way = 0

    def open(self, offer: Offer, landing: BlockPool) -> Reader:
        inner, outer = super().open(offer, landing), self

        class SlowReader:
            def start(self, remote: Sequence[int], local: Sequence[int]) -> Any:
                outer.under_way += 1
                outer.started.set()
                return remote, local

            def finished(self, transfer: Any) -> bool:
                if not outer.gate.is_set():
                    return False
                inner.start(*transfer)
                outer.under_way -= 1
                return True

            def checksums(self, transfer: Any) -> None:
                return None

            def close(self) -> None:
                inner.close()

        return SlowReader()


class Poisoner(threading.Thread):
    """Whoever else uses the source's pool: takes blocks as soon as they are free, and overwrites
    them.
    """

    def __init__(self, pool: BlockPool, transport: SlowTransport) -> None:
        super().__init__(daemon=True)
        self.pool, self.transport = pool, transport
        self.taken_during_a_read: list[int] = []
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            if self.pool.num_free:
                for block in self.pool.take(self.pool.num_free):
                    if self.transport.under_way:
                        self.taken_during_a_read.append(block)
                    self.pool.data[block].fill_(POISON)
            time.sleep(0.001)


@pytest.fixture
def reused() -> Iterator[tuple[BlockPool, tuple[int, ...], SlowTransport, Poisoner]]:
    """A source's pool of five blocks in use, and somebody who waits for them."""
    pool, transport = make_pool(5), SlowTransport()
    block_ids = pool.take(5)
    poisoner = Poisoner(pool, transport)
    poisoner.start()
    yield pool, block_ids, transport, poisoner
    poisoner.stop.set()
    poisoner.join()


def test_a_cancelled_source_frees_no_block_that_is_being_read(reused: Any) -> None:
    pool, block_ids, transport, poisoner = reused
    landing, cancelled = make_pool(5), threading.Event()
    with target(landing, transport) as (listener, receive):
        offer = offer_of(pool, transport)
        sending = Sending(listener.address, offer, pool, block_ids, cancelled=cancelled.is_set)
        sending.start()
        threading.Thread(target=cancel_then_open, args=(transport, cancelled)).start()
        result = receive()
    assert isinstance(result, NotReceived)
    assert result.reason is Reason.CANCELLED
    assert sending.ended().reason is Reason.CANCELLED
    poisoner.stop.set()
    poisoner.join()
    assert poisoner.taken_during_a_read == []
    assert landing.num_free == 5


def cancel_then_open(transport: SlowTransport, cancelled: threading.Event) -> None:
    transport.started.wait(10)
    cancelled.set()
    time.sleep(0.2)
    transport.gate.set()


def test_blocks_reused_after_the_lease_are_never_taken_for_the_source_s(reused: Any) -> None:
    """A transfer that outlives both the target's patience and the lease: what it brings is
    thrown away, even where it is whole.
    """
    pool, block_ids, transport, _ = reused
    landing = make_pool(5)
    with target(landing, transport) as (listener, receive):
        offer = offer_of(pool, transport, lease_seconds=0.5)
        sending = Sending(listener.address, offer, pool, block_ids)
        sending.start()
        result = receive()
    assert isinstance(result, NotReceived)
    assert result.reason is Reason.TIMEOUT
    # The source's lease began later than the target's, so it may hear nothing or its own end.
    assert sending.ended().reason in (Reason.TIMEOUT, Reason.PEER_LOST)
    assert landing.num_free == 0  # something may still be written there


def test_a_block_overwritten_before_it_was_read_is_found() -> None:
    """As if the source had reused a block in spite of everything."""

    def overwrite() -> None:
        while transport.under_way < 5:  # all announced, with their checksums
            time.sleep(0.001)
        pool.data[block_ids[3]].fill_(POISON)
        transport.gate.set()

    pool, landing, transport = make_pool(5), make_pool(5), SlowTransport()
    block_ids = pool.take(5)
    with target(landing, transport) as (listener, receive):
        sending = Sending(listener.address, offer_of(pool, transport), pool, block_ids)
        sending.start()
        threading.Thread(target=overwrite, daemon=True).start()
        result = receive()
    assert isinstance(result, NotReceived)
    assert result.reason is Reason.CORRUPTED
    assert sending.ended().reason is Reason.CORRUPTED
    assert (pool.num_free, landing.num_free) == (5, 5)


@pytest.mark.parametrize("checksum", CHECKSUMS)
@pytest.mark.parametrize("byte", [0, 1535])
def test_one_flipped_bit_is_found(
    monkeypatch: pytest.MonkeyPatch, checksum: str, byte: int
) -> None:
    def flip(self: InProcessReader, remote: Sequence[int], local: Sequence[int]) -> None:
        original(self, remote, local)
        if 4 in remote:
            self._landing.data[local[list(remote).index(4)], byte] ^= 1

    original = InProcessReader.start
    monkeypatch.setattr(InProcessReader, "start", flip)
    pool, landing, transport = make_pool(5), make_pool(5), InProcessTransport()
    with target(landing) as (listener, receive):
        offer = replace(offer_of(pool, transport), checksum=checksum)
        sending = Sending(listener.address, offer, pool, pool.take(5))
        sending.start()
        result = receive()
    assert isinstance(result, NotReceived)
    assert result.reason is Reason.CORRUPTED
    assert sending.ended().reason is Reason.CORRUPTED
    assert (pool.num_free, landing.num_free) == (5, 5)


def test_a_transfer_that_fails_ends_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: InProcessReader, transfer: None) -> bool:
        raise TransferError("the link is down")

    monkeypatch.setattr(InProcessReader, "finished", fail)
    pool, landing, transport = make_pool(5), make_pool(5), InProcessTransport()
    with target(landing) as (listener, receive):
        sending = Sending(listener.address, offer_of(pool, transport), pool, pool.take(5))
        sending.start()
        result = receive()
    assert isinstance(result, NotReceived)
    assert (result.reason, result.detail) == (Reason.TRANSFER_FAILED, "the link is down")
    assert sending.ended().reason is Reason.TRANSFER_FAILED
    assert (pool.num_free, landing.num_free) == (5, 5)


def test_nobody_offers() -> None:
    landing = make_pool(5)
    with target(landing, wait_seconds=0.2) as (_, receive):
        assert receive() == NotReceived(Reason.TIMEOUT, "no offer came in time")


def test_a_cancelled_target_tells_the_source() -> None:
    pool, landing, transport = make_pool(5), make_pool(5), SlowTransport()
    with target(landing, transport, cancelled=transport.started.is_set) as (listener, receive):
        sending = Sending(listener.address, offer_of(pool, transport), pool, pool.take(5))
        sending.start()
        threading.Timer(0.5, transport.gate.set).start()
        result = receive()
    assert isinstance(result, NotReceived)
    assert result.reason is Reason.CANCELLED
    assert sending.ended().reason is Reason.CANCELLED
    assert (pool.num_free, landing.num_free) == (5, 5)


# What a hostile source sends after it connected; {offer} and so on are whole frames.
OFFER, ACCEPT = "offer", "accept"
SAYS: dict[str, tuple[list[Any], Reason]] = {
    "nothing, and closes": ([], Reason.TIMEOUT),
    "half a length": ([b"\x00\x00"], Reason.TIMEOUT),
    "a length of 4 GB": ([b"\xff\xff\xff\xff"], Reason.TIMEOUT),
    "a length of nothing": ([b"\x00\x00\x00\x00"], Reason.TIMEOUT),
    "no JSON": ([frame(b"\x80\x04pickle")], Reason.TIMEOUT),
    "half an offer": ([OFFER, -100], Reason.TIMEOUT),
    "accept for an offer": ([frame(encode(Accept("r1")))], Reason.TIMEOUT),
    "an offer, and closes": ([OFFER], Reason.PEER_LOST),
    "two offers": ([OFFER, OFFER], Reason.MALFORMED),
    "blocks it did not offer": (
        [OFFER, frame(encode(Blocks("r1", 0, (5,), (0,))))],
        Reason.MALFORMED,
    ),
    "blocks of another request": (
        [OFFER, frame(encode(Blocks("r2", 0, (0,), (0,))))],
        Reason.WRONG_REQUEST,
    ),
    "a wrong checksum": ([OFFER, frame(encode(Blocks("r1", 0, (0,), (12345,))))], Reason.CORRUPTED),
    "an end": (
        [OFFER, frame(encode(End("r1", Reason.CANCELLED, "never mind")))],
        Reason.CANCELLED,
    ),
    "complete, without a block": (
        [OFFER, frame(encode(End("r1", Reason.COMPLETE, "")))],
        Reason.MALFORMED,
    ),
    "noise after the offer": ([OFFER, frame(b"{}")], Reason.MALFORMED),
}


@pytest.mark.parametrize(("says", "reason"), SAYS.values(), ids=SAYS)
def test_a_hostile_source(says: list[Any], reason: Reason) -> None:
    """Before an offer that is awaited the wait goes on (and here, ends); after it, the exchange
    does.
    """
    pool, landing, transport = make_pool(5), make_pool(5, fill=POISON), InProcessTransport()
    data = b""
    for part in says:
        if isinstance(part, int):
            data = data[:part]
        else:
            data += frame(encode(offer_of(pool, transport))) if part == OFFER else part
    patience = 0.3 if reason is Reason.TIMEOUT else 20.0
    with target(landing, wait_seconds=patience) as (listener, receive):
        source = raw_connection(listener.address)
        source.sendall(data)
        if reason in (Reason.TIMEOUT, Reason.PEER_LOST):
            source.shutdown(socket.SHUT_WR)
        result = receive()
        source.close()
    assert isinstance(result, NotReceived)
    assert result.reason is reason
    assert landing.num_free == 5


def test_a_source_that_stalls_is_not_waited_for_longer_than_said() -> None:
    pool, landing, transport = make_pool(5), make_pool(5), InProcessTransport()
    with target(landing, wait_seconds=0.3) as (listener, receive):
        source = raw_connection(listener.address)
        source.sendall(frame(encode(offer_of(pool, transport))))
        result = receive()
        source.close()
    assert result == NotReceived(Reason.TIMEOUT, "the blocks did not come in time")


@pytest.mark.parametrize("says", [b"", b"\xff" * 8, frame(b"[]"), frame(encode(Accept("r2")))])
def test_a_hostile_target_gets_no_block(says: bytes) -> None:
    pool = make_pool(5)
    offer = offer_of(pool, InProcessTransport())
    server = socket.create_server(("127.0.0.1", 0))
    sending = Sending(server.getsockname(), offer, pool, pool.take(5), answer_seconds=0.3)
    sending.start()
    peer, _ = server.accept()
    peer.sendall(says)
    sent = sending.ended()
    heard = b""
    while data := peer.recv(1 << 16):
        heard += data
    peer.close()
    server.close()
    assert sent.reason is (Reason.MALFORMED if says else Reason.TIMEOUT)
    assert pool.num_free == 5
    assert b'"blocks"' not in heard


def test_what_a_target_refuses() -> None:
    pool, landing = make_pool(9), make_pool(9)
    good = offer_of(pool, InProcessTransport())
    wanted, transports = expected(), ("in_process",)
    assert refusal(good, wanted, landing, transports) is None
    for changed, reason in (
        (replace(good, source=replace(SOURCE, weights="0" * 64)), Reason.WRONG_MODEL),
        (replace(good, token_digest="0" * 64), Reason.WRONG_TOKENS),
        (replace(good, num_tokens=17), Reason.WRONG_TOKENS),
        (replace(good, num_tokens=19), Reason.WRONG_TOKENS),
        (replace(good, dtype="float16"), Reason.WRONG_LAYOUT),
        (replace(good, layout=replace(good.layout, num_kv_heads=1)), Reason.WRONG_LAYOUT),
        (replace(good, layout=replace(good.layout, tokens_per_block=8)), Reason.WRONG_LAYOUT),
        (replace(good, checksum="md5"), Reason.UNSUPPORTED),
        (replace(good, address=replace(good.address, transport="nixl")), Reason.UNSUPPORTED),
    ):
        found = refusal(changed, wanted, landing, transports)
        assert found is not None
        assert found.reason is reason


def test_fewer_tokens_than_the_prompt_may_be_offered() -> None:
    pool = make_pool(9)
    offer = offer_of(pool, InProcessTransport())
    longer = expected(token_ids=(*expected().token_ids, 7, 8, 9))
    assert refusal(offer, longer, make_pool(9), ("in_process",)) is None
