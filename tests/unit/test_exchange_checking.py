"""Checksums of landed blocks are taken in a thread: what goes wrong there ends the exchange, and no
landing block is free while the thread may still read it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from exchange_cases import Sending, make_pool, offer_of, target

from trtllm_kvmap.exchange import receive, send
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.checksum import block_checksums
from trtllm_kvmap.exchange.in_process import InProcessTransport
from trtllm_kvmap.exchange.messages import Reason
from trtllm_kvmap.exchange.receive import NotReceived, Received

NUM_BLOCKS = 5


class Check:
    """Stands in for block_checksums on the target's side. The check of the last block waits for
    ``gate`` and does ``then`` to the block before it is taken.
    """

    def __init__(self) -> None:
        self.gate, self.waits = threading.Event(), threading.Event()
        self.then: Callable[[torch.Tensor], None] = lambda block: None
        self.threads: set[str] = set()
        self._seen = 0

    def __call__(self, name: str, data: torch.Tensor, block_ids: Sequence[int]) -> tuple[int, ...]:
        self._seen += len(block_ids)
        self.threads.add(threading.current_thread().name)
        if self._seen == NUM_BLOCKS:
            self.waits.set()
            assert self.gate.wait(20)
            self.then(data[block_ids[-1]])
        return block_checksums(name, data, block_ids)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Iterator[Check]:
    check = Check()
    monkeypatch.setattr(send, "BATCH_BYTES", 1)
    monkeypatch.setattr(receive, "block_checksums", check)
    yield check
    check.gate.set()


def exchange(
    check: Check,
    landing: BlockPool,
    at_last_check: Callable[[], None] = lambda: None,
    *,
    source_cancelled: Callable[[], bool] = lambda: False,
    target_cancelled: Callable[[], bool] = lambda: False,
) -> tuple[Received | NotReceived, Reason]:
    """The result of an exchange of five blocks, and the source's; ``at_last_check`` runs in another
    thread while the last block's check waits, and the check goes on after it.
    """

    def meanwhile() -> None:
        assert check.waits.wait(20)
        at_last_check()
        check.gate.set()

    source = make_pool(NUM_BLOCKS)
    with target(landing, cancelled=target_cancelled) as (listener, receive_now):
        offer, blocks = offer_of(source, InProcessTransport()), source.take(NUM_BLOCKS)
        sending = Sending(listener.address, offer, source, blocks, cancelled=source_cancelled)
        sending.start()
        other = threading.Thread(target=meanwhile, daemon=True)
        other.start()
        result = receive_now()
        assert check.gate.is_set(), "it ended before the last block was checked"
        other.join(20)
    ended = sending.ended().reason
    assert source.num_free == NUM_BLOCKS
    return result, ended


def test_nothing_is_complete_before_the_last_check(check: Check) -> None:
    result, ended = exchange(check, make_pool(NUM_BLOCKS), lambda: time.sleep(0.2))
    assert isinstance(result, Received)
    assert ended is Reason.COMPLETE
    assert threading.current_thread().name not in check.threads


def test_the_last_block_is_corrupted_while_it_is_checked(check: Check) -> None:
    def flip(block: torch.Tensor) -> None:
        block[-1] ^= 1

    landing, check.then = make_pool(NUM_BLOCKS), flip
    result, ended = exchange(check, landing)
    assert isinstance(result, NotReceived)
    assert (result.reason, ended) == (Reason.CORRUPTED, Reason.CORRUPTED)
    assert landing.num_free == NUM_BLOCKS


def test_a_check_that_fails_ends_the_exchange(check: Check) -> None:
    def fail(block: torch.Tensor) -> None:
        raise MemoryError("no room for a host copy")

    landing, check.then = make_pool(NUM_BLOCKS), fail
    result, ended = exchange(check, landing)
    assert isinstance(result, NotReceived)
    assert (result.reason, ended) == (Reason.TRANSFER_FAILED, Reason.TRANSFER_FAILED)
    assert result.detail == "a checksum could not be taken: no room for a host copy"
    assert landing.num_free == NUM_BLOCKS


@pytest.mark.parametrize("who", ["target", "source"])
def test_cancelled_while_a_check_runs(check: Check, who: str) -> None:
    """The landing blocks come back after the check, and not before; nothing is used."""
    landing, cancelled = make_pool(NUM_BLOCKS), threading.Event()
    free_meanwhile = []

    def cancel() -> None:
        cancelled.set()
        time.sleep(0.3)
        free_meanwhile.append(landing.num_free)

    result, ended = exchange(check, landing, cancel, **{f"{who}_cancelled": cancelled.is_set})
    assert isinstance(result, NotReceived)
    assert (result.reason, ended) == (Reason.CANCELLED, Reason.CANCELLED)
    assert free_meanwhile == [0]
    assert landing.num_free == NUM_BLOCKS
