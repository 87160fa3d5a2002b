"""Drives the target's side of one exchange: blocks that are checked, or a reason why there are
none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trtllm_kvmap.errors import UnavailableError
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.channel import Channel, Listener, PeerLostError
from trtllm_kvmap.exchange.checksum import block_checksums
from trtllm_kvmap.exchange.messages import Blocks, MalformedMessageError, Offer, Reason
from trtllm_kvmap.exchange.offer import Expected, refusal
from trtllm_kvmap.exchange.source_end import Send
from trtllm_kvmap.exchange.target_end import Read, Refusal, TargetEnd, TargetState
from trtllm_kvmap.exchange.transport import Reader, TransferError, Transport

WAIT_SECONDS = 30.0
IDLE_SECONDS, BUSY_SECONDS = 0.02, 0.00005


@dataclass(frozen=True, slots=True)
class Received:
    """Every block of ``offer``, checked, in ``block_ids`` of the landing pool, in the order of the
    tokens. Give them back to it after use.
    """

    offer: Offer
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NotReceived:
    """Nothing that may be used arrived; no landing block is held."""

    reason: Reason
    detail: str


def receive_blocks(
    listener: Listener,
    expected: Expected,
    transports: Mapping[str, Transport],
    landing: BlockPool,
    *,
    wait_seconds: float = WAIT_SECONDS,
    cancelled: Callable[[], bool] = lambda: False,
) -> Received | NotReceived:
    """Wait for the offer that is expected, take its blocks and check them.

    Whoever offers something else is refused, and the wait goes on. Never longer than
    ``wait_seconds`` and what transfers under way then need to stop (at most the offer's lease).
    """
    until = time.monotonic() + wait_seconds
    # Checksums of what has landed are taken beside the next transfer, not before it.
    with ThreadPoolExecutor(1, "kvmap-checksum") as checker:
        checker.submit(bool)  # so that the thread is there before the first block is
        return _wait_for(listener, expected, transports, landing, checker, until, cancelled)


def _wait_for(
    listener: Listener,
    expected: Expected,
    transports: Mapping[str, Transport],
    landing: BlockPool,
    checker: ThreadPoolExecutor,
    until: float,
    cancelled: Callable[[], bool],
) -> Received | NotReceived:
    stray = ""
    while not cancelled():
        left = until - time.monotonic()
        if left <= 0:
            return NotReceived(Reason.TIMEOUT, f"no offer came in time{stray}")
        channel = listener.accept(min(left, IDLE_SECONDS))
        if channel is None:
            continue
        try:
            exchange = _Exchange(channel, expected, transports, landing, checker, until)
            result = exchange.run(cancelled)
        finally:
            channel.close()
        if isinstance(result, Received) or exchange.end.offer is not None:
            return result
        stray = f" ({result.detail})"
    return NotReceived(Reason.CANCELLED, "the target's request was cancelled")


class _Exchange:
    """One connection."""

    def __init__(
        self,
        channel: Channel,
        expected: Expected,
        transports: Mapping[str, Transport],
        landing: BlockPool,
        checker: ThreadPoolExecutor,
        until: float,
    ) -> None:
        now = time.monotonic()
        self.end = TargetEnd(expected.request_id, self._judge, now=now, wait_seconds=until - now)
        self._channel, self._expected = channel, expected
        self._transports, self._landing = transports, landing
        self._local: tuple[int, ...] = ()
        self._reader: Reader | None = None
        self._running: list[tuple[Blocks, Any]] = []  # transfers under way
        self._checking: list[tuple[Blocks, Future[tuple[int, ...]]]] = []
        self._checker = checker
        self._lost = self._deaf = False

    def run(self, cancelled: Callable[[], bool]) -> Received | NotReceived:
        try:
            while self.end.state is not TargetState.ENDED:
                if cancelled():
                    self._act(self.end.cancel(time.monotonic()))
                self._hear()
                self._look()
                self._act(self.end.tick(time.monotonic()))
        finally:
            if self._reader is not None:
                self._reader.close()
        assert self.end.reason is not None
        if self.end.reason is Reason.COMPLETE:
            assert self.end.offer is not None
            return Received(self.end.offer, self._local)
        if not self.end.reads:  # otherwise something may still be written there: never used again
            self._landing.give_back(self._local)
        return NotReceived(self.end.reason, self.end.detail)

    def _judge(self, offer: Offer) -> Refusal | None:
        refused = refusal(offer, self._expected, self._landing, self._transports)
        if refused is not None:
            return refused
        try:
            transport = self._transports[offer.address.transport]
            self._reader = transport.open(offer, self._landing)
            self._local = self._landing.take(offer.num_blocks)
        except TransferError as error:
            return Refusal(Reason.TRANSFER_FAILED, str(error))
        except UnavailableError as error:
            return Refusal(Reason.NO_MEMORY, str(error))
        return None

    def _hear(self) -> None:
        if self._lost or self._deaf:
            time.sleep(BUSY_SECONDS)
            return
        try:
            busy = bool(self._running or self._checking)
            message = self._channel.receive(0 if busy else IDLE_SECONDS)
            if message is None and busy:
                time.sleep(BUSY_SECONDS)  # a socket's own time-outs are of whole milliseconds
            if message is not None:
                self._act(self.end.received(message, time.monotonic()))
        except PeerLostError as error:
            self._lost = True
            self._act(self.end.peer_lost(str(error), time.monotonic()))
        except MalformedMessageError as error:
            self._act(self.end.malformed(str(error), time.monotonic()))
            self._deaf = True  # what follows cannot be told apart any more

    def _look(self) -> None:
        """At every transfer under way, and at every checksum."""
        for entry in list(self._running):
            blocks, transfer = entry
            assert self._reader is not None
            try:
                if not self._reader.finished(transfer):
                    continue
            except TransferError as error:
                self._running.remove(entry)
                self._act(self.end.read_failed(str(error), time.monotonic()))
                continue
            self._running.remove(entry)
            checked = self._reader.checksums(transfer)
            if checked is not None:
                self._compare(blocks, checked)
                continue
            self._checking.append((blocks, self._checker.submit(self._checksums, blocks)))
        while self._checking and self._checking[0][1].done():
            blocks, checking = self._checking.pop(0)
            failure = checking.exception()
            if failure is None:
                self._compare(blocks, checking.result())
            else:
                detail = f"a checksum could not be taken: {failure}"
                self._act(self.end.read_failed(detail, time.monotonic()))

    def _compare(self, blocks: Blocks, checksums: tuple[int, ...]) -> None:
        intact = checksums == blocks.checksums
        self._act(self.end.read_done(len(blocks.block_ids), intact, time.monotonic()))

    def _act(self, actions: list[Send | Read]) -> None:
        for action in actions:
            if isinstance(action, Read):
                self._read(action.blocks)
                continue
            try:
                if not self._lost:
                    self._channel.send(action.message)
            except PeerLostError as error:
                self._lost = True
                self._act(self.end.peer_lost(str(error), time.monotonic()))

    def _read(self, blocks: Blocks) -> None:
        assert self._reader is not None
        try:
            transfer = self._reader.start(blocks.block_ids, self._places(blocks))
        except TransferError as error:
            self._act(self.end.read_failed(str(error), time.monotonic()))
        else:
            self._running.append((blocks, transfer))

    def _places(self, blocks: Blocks) -> tuple[int, ...]:
        return self._local[blocks.first : blocks.first + len(blocks.block_ids)]

    def _checksums(self, blocks: Blocks) -> tuple[int, ...]:
        assert self.end.offer is not None
        return block_checksums(self.end.offer.checksum, self._landing.data, self._places(blocks))
