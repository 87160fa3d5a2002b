"""Blocks of a memory file: from another process, from one that dies, and what is refused."""

from __future__ import annotations

import errno
import gc
import mmap
import multiprocessing
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exchange_cases import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    POISON,
    TOKENS_PER_BLOCK,
    Sending,
    expected,
    make_pool,
    offer_of,
)

from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.exchange import checksum, send
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.channel import Listener, connect
from trtllm_kvmap.exchange.messages import Offer, Reason
from trtllm_kvmap.exchange.receive import NotReceived, Received, receive_blocks
from trtllm_kvmap.exchange.shared_memory import SharedMemoryTransport, SharedPool
from trtllm_kvmap.exchange.transport import allocate_pool, make_transport
from trtllm_kvmap.spec.layout import trtllm_layout

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="Memory files with seals are a matter of Linux."
)
BLOCK_IDS = (6, 0, 3, 8, 1)
NUM_BLOCKS = 9


def shared_pool() -> SharedPool:
    """With the numbers of make_pool."""
    layout = trtllm_layout(NUM_BLOCKS, LAYERS, HEADS, TOKENS_PER_BLOCK, HEAD_DIM)
    pool = allocate_pool("shared_memory", layout, "float32")
    assert isinstance(pool, SharedPool)
    pool.data.copy_(make_pool(NUM_BLOCKS).data)
    return pool


def receive(
    transport: SharedMemoryTransport, listener: Listener, landing: BlockPool
) -> Received | NotReceived:
    return receive_blocks(listener, expected(), {"shared_memory": transport}, landing)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listening = Listener()
    yield listening
    listening.close()


def offer_from_here(address: tuple[str, int], dies_after: int | None) -> None:
    """A source's process; it is gone when it comes to the checksums of batch ``dies_after``."""
    taken = send.block_checksums

    def until(name: str, data: torch.Tensor, block_ids: Sequence[int]) -> tuple[int, ...]:
        until.left -= 1
        if until.left < 0:
            os._exit(1)
        return taken(name, data, block_ids)

    until.left = sys.maxsize if dies_after is None else dies_after
    send.block_checksums = until
    pool = shared_pool()
    pool.take(NUM_BLOCKS)
    offer = offer_of(pool, make_transport("shared_memory"))
    send.send_blocks(connect(address, 5.0), offer, pool, BLOCK_IDS)


def test_from_another_process_and_from_one_that_dies(listener: Listener) -> None:
    transport, context = SharedMemoryTransport(), multiprocessing.get_context("spawn")
    landing = make_pool(7, fill=POISON)
    landing.take(1)  # so that landing ids are not those of the offer
    before = make_pool(NUM_BLOCKS).data

    def from_a_process(dies_after: int | None) -> Received | NotReceived:
        process = context.Process(target=offer_from_here, args=(listener.address, dies_after))
        process.start()
        result = receive(transport, listener, landing)
        process.join()
        assert process.exitcode == (0 if dies_after is None else 1)
        return result

    lost = from_a_process(2)
    assert isinstance(lost, NotReceived)
    assert lost.reason is Reason.PEER_LOST
    assert landing.num_free == 6
    landing.data.fill_(POISON)
    received = from_a_process(None)
    assert isinstance(received, Received), received
    wanted = torch.full_like(landing.data, POISON)
    wanted[list(received.block_ids)] = before[list(BLOCK_IDS)]
    assert torch.equal(landing.data, wanted)


def mapped_files() -> set[str]:
    """Names of memory files that this process has mapped read-only."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return {line[5] for line in lines if line[1] == "r--s" and "/memfd:kvmap-" in line[-2]}


def test_a_source_that_is_gone_is_not_kept_in_memory(listener: Listener) -> None:
    """Its pool's memory would be held for as long as the target runs."""
    transport, known = SharedMemoryTransport(), mapped_files()
    seen = []
    for _ in range(2):
        pool = shared_pool()
        pool.take(NUM_BLOCKS)
        sending = Sending(listener.address, offer_of(pool, transport), pool, BLOCK_IDS)
        sending.start()
        assert isinstance(receive(transport, listener, make_pool(5)), Received)
        sending.ended()
        seen.append(mapped_files() - known)
        del pool, sending
        gc.collect()
    assert [len(files) for files in seen] == [1, 1]
    assert seen[0] != seen[1]
    transport.close()
    gc.collect()
    assert not mapped_files() & seen[1]


def refused(listener: Listener, change: Callable[[Offer], Offer]) -> NotReceived:
    """What becomes of an offer that ``change`` made; both sides hold nothing then."""
    source, landing, transport = shared_pool(), make_pool(5), SharedMemoryTransport()
    sending = Sending(listener.address, change(offer_of(source, transport)), source, source.take(5))
    sending.start()
    result = receive(transport, listener, landing)
    assert isinstance(result, NotReceived), result
    assert result.reason is Reason.TRANSFER_FAILED
    assert sending.ended().reason is Reason.TRANSFER_FAILED
    assert (source.num_free, landing.num_free) == (NUM_BLOCKS, 5)
    return result


def with_token(token: str) -> Callable[[Offer], Offer]:
    return lambda offer: replace(offer, address=replace(offer.address, token=token.encode()))


def test_tokens_that_name_no_memory_are_refused(listener: Listener) -> None:
    name = "kvmap-" + "0" * 32
    for token in ("", "1:2", f"../1:2:{name}", f"1:2:{name}\n", f"1:2:{name[:-1]}/"):
        assert "names no shared memory" in refused(listener, with_token(token)).detail
    for token in (f"{os.getpid()}:0:{name}", f"4194305:3:{name}"):  # another file; no process
        assert "not of this machine" in refused(listener, with_token(token)).detail


def test_memory_that_can_shrink_is_refused(listener: Listener) -> None:
    """To read behind its end would kill the target."""
    name = "kvmap-" + "1" * 32
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    result = refused(listener, with_token(f"{os.getpid()}:{fd}:{name}"))
    assert "smaller" in result.detail
    os.close(fd)


def test_what_lies_outside_the_memory_is_not_read(listener: Listener) -> None:
    def behind(offer: Offer) -> Offer:
        return replace(offer, address=replace(offer.address, base=1))

    def more_blocks(offer: Offer) -> Offer:
        return replace(offer, layout=replace(offer.layout, num_blocks=NUM_BLOCKS + 1))

    size = 1536 * NUM_BLOCKS
    assert f"ends at byte {size + 1} of {size}" in refused(listener, behind).detail
    assert f"ends at byte {size + 1536} of {size}" in refused(listener, more_blocks).detail


def test_blocks_that_change_after_their_checksum_are_found(
    monkeypatch: pytest.MonkeyPatch, listener: Listener
) -> None:
    """The last byte of the last block."""

    def overwritten(name: str, data: torch.Tensor, block_ids: Sequence[int]) -> tuple[int, ...]:
        taken = checksum.block_checksums(name, data, block_ids)
        if BLOCK_IDS[-1] in block_ids:
            data[BLOCK_IDS[-1], -1] ^= 1
        return taken

    monkeypatch.setattr(send, "block_checksums", overwritten)
    source, landing, transport = shared_pool(), make_pool(5), SharedMemoryTransport()
    source.take(NUM_BLOCKS)
    sending = Sending(listener.address, offer_of(source, transport), source, BLOCK_IDS)
    sending.start()
    result = receive(transport, listener, landing)
    assert isinstance(result, NotReceived)
    assert (result.reason, sending.ended().reason) == (Reason.CORRUPTED, Reason.CORRUPTED)
    assert (source.num_free, landing.num_free) == (5, 5)


def test_the_target_cannot_write_into_the_source() -> None:
    pool, transport = shared_pool(), SharedMemoryTransport()
    reader = transport.open(offer_of(pool, transport), make_pool(5))
    with pytest.raises(ValueError, match="read-only"):
        reader._blocks[0] = 0


def test_a_system_without_huge_pages_has_pools_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SmallPages(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            asked.append(advice)
            raise OSError(errno.EINVAL, "Invalid argument")  # a kernel built without them

    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(mmap, "mmap", SmallPages)
    pool = shared_pool()  # and a pool of this process alone, whose numbers it takes
    assert asked == [(mmap.MADV_HUGEPAGE,)] * 2
    assert torch.equal(pool.data, make_pool(NUM_BLOCKS).data)


def test_memory_of_this_process_alone_is_not_exposed() -> None:
    with pytest.raises(MismatchError, match="allocate_pool"):
        SharedMemoryTransport().expose(make_pool(1))


@pytest.mark.parametrize("size", [1, 1000, 3 * 256 * 1024, 3 * 256 * 1024 + 5])
def test_the_checksum_of_a_copied_block_is_of_what_landed(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    block = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    landed = np.full(size + 2, POISON, dtype=np.uint8)
    assert checksum.copy_block("crc32", block, landed[1:-1]) == zlib.crc32(block.tobytes())
    assert landed.tobytes() == bytes([POISON]) + block.tobytes() + bytes([POISON])
    if "xxh3_64" in checksum.CHECKSUMS:
        xxhash = pytest.importorskip("xxhash")
        found = checksum.copy_block("xxh3_64", block, landed[1:-1])
        assert found == xxhash.xxh3_64_intdigest(block.tobytes())
    with pytest.raises(InputError, match="No checksum 'md5'"):
        checksum.copy_block("md5", block, landed[1:-1])

    def torn(into: np.ndarray, piece: np.ndarray, **options: Any) -> None:
        into[:] = piece
        into[-1] ^= 1

    monkeypatch.setattr(np, "copyto", torn)
    assert checksum.copy_block("crc32", block, landed[1:-1]) == zlib.crc32(landed[1:-1].tobytes())
