"""How fast blocks travel between two processes on one machine, beside memcpy (run it through
bench.py).

A source's process offers blocks and the target reads them, over shared memory and over NIXL, with
the whole protocol and every checksum on both sides; memcpy copies as many bytes from one buffer to
another. The two take turns in one run; figures are ratios of rates, exchange over memcpy, and 1.0
would be an exchange that costs one copy and nothing else. An exchange needs two cores at a time and
memcpy one, so a busy machine holds back the exchange alone: read the figures of an idle one.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np
import torch

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.channel import Listener, connect
from trtllm_kvmap.exchange.checksum import FASTEST, block_checksums
from trtllm_kvmap.exchange.messages import Address, Offer
from trtllm_kvmap.exchange.offer import Expected, make_offer
from trtllm_kvmap.exchange.receive import Received, receive_blocks
from trtllm_kvmap.exchange.send import send_blocks
from trtllm_kvmap.exchange.transport import Reader, Transport, allocate_pool, make_transport
from trtllm_kvmap.spec.layout import KvLayout, trtllm_layout

# One block of an 8-layer model of 8 KV heads of 128 in half precision: 1 MiB.
LAYERS, HEADS, TOKENS_PER_BLOCK, HEAD_DIM, DTYPE = 8, 8, 32, 128, "float16"
MEBIBYTES = (64, 256, 512)
TRANSPORTS = ("shared_memory", "nixl")
ROUNDS = 15
SOURCE = Fingerprint(*[hashlib.sha256(b"a model").hexdigest()] * 3)


def bench_exchange() -> dict[str, object]:
    """The figures of `bench.py exchange`, see the module."""
    landing = filled_pool(BlockPool.allocate(layout(), DTYPE))
    return {
        "exchange_to_memcpy_by_mebibytes": {name: exchanges(name, landing) for name in TRANSPORTS},
        "checksum_to_memcpy": checksum_ratio(landing),
        "checksum": FASTEST,
        "rounds": ROUNDS,
        "threads": torch.get_num_threads(),
    }


def exchanges(name: str, landing: BlockPool) -> dict[str, object]:
    """Over one transport, and what it reaches alone."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=offer_forever, args=(there, name), daemon=True)
    process.start()
    there.close()
    transport, listener = make_transport(name), Listener()
    here.send(listener.address)
    exposed = here.recv()  # it is ready
    figures: dict[str, object] = {
        str(size): turns(size, here, listener, {name: transport}, landing) for size in MEBIBYTES
    }
    if name == "nixl":
        offer = offer_of(landing, exposed, max(MEBIBYTES))
        figures["reads alone"] = reads_alone(transport.open(offer, landing), landing)
    here.send(0)
    process.join()
    listener.close()
    transport.close()
    return figures


def turns(
    size: int,
    source: Connection,
    listener: Listener,
    transports: dict[str, Transport],
    landing: BlockPool,
) -> dict[str, float]:
    """At ``size`` blocks of 1 MiB: ratios of turns, and the ratio of the quickest of each kind."""
    copy = torch.empty(size << 20, dtype=torch.uint8).numpy()
    filled = np.random.default_rng(0).integers(0, 256, size << 20, dtype=np.uint8)
    tokens = tuple(range(size * TOKENS_PER_BLOCK))
    times = []
    for turn in range(ROUNDS + 1):
        began = time.perf_counter()
        np.copyto(copy, filled)
        copied = time.perf_counter() - began
        source.send(size)
        began = time.perf_counter()
        expected = Expected("bench", SOURCE, (LAYERS, HEADS, HEAD_DIM), tokens)
        received = receive_blocks(listener, expected, transports, landing)
        exchanged = time.perf_counter() - began
        assert isinstance(received, Received), received
        landing.give_back(received.block_ids)
        source.recv()
        if turn:  # the first one connects the agents and touches the memory
            times.append((copied, exchanged))
    return ratios_of(times)


def reads_alone(reader: Reader, landing: BlockPool) -> dict[str, float]:
    """64 blocks of 1 MiB without protocol and checksums: what the transport itself reaches."""
    size = min(MEBIBYTES)
    copy = torch.empty(size << 20, dtype=torch.uint8).numpy()
    filled = np.random.default_rng(0).integers(0, 256, size << 20, dtype=np.uint8)
    times = []
    for turn in range(ROUNDS + 1):
        began = time.perf_counter()
        np.copyto(copy, filled)
        copied = time.perf_counter() - began
        began = time.perf_counter()
        transfer = reader.start(range(size), range(size))
        while not reader.finished(transfer):
            pass
        if turn:
            times.append((copied, time.perf_counter() - began))
    return ratios_of(times)


def ratios_of(times: list[tuple[float, float]]) -> dict[str, float]:
    """Of seconds of memcpy and of what stood beside it."""
    ratios = [copied / other for copied, other in times]
    return {
        "median": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "quickest_turns": min(copied for copied, _ in times) / min(other for _, other in times),
    }


def checksum_ratio(pool: BlockPool) -> float:
    """The rate of one side's checksum over memcpy's, 64 MiB."""
    part = range(min(64, pool.layout.num_blocks))
    copy = torch.empty(len(part) * pool.block_bytes, dtype=torch.uint8).numpy()
    data = pool.data[: len(part)].flatten().numpy()
    ratios = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        np.copyto(copy, data)
        copied = time.perf_counter() - began
        began = time.perf_counter()
        block_checksums(FASTEST, pool.data, part)
        ratios.append(copied / (time.perf_counter() - began))
    return statistics.median(ratios)


def offer_forever(control: Connection, name: str) -> None:
    """The source's process: offers as many blocks as it is told, until it is told 0."""
    transport, pool = make_transport(name), filled_pool(allocate_pool(name, layout(), DTYPE))
    address, exposed = control.recv(), transport.expose(pool)
    control.send(exposed)
    while size := control.recv():
        offer = offer_of(pool, exposed, size)
        control.send(str(send_blocks(connect(address, 5.0), offer, pool, pool.take(size))))


def offer_of(pool: BlockPool, exposed: Address, size: int) -> Offer:
    tokens = tuple(range(size * TOKENS_PER_BLOCK))
    return make_offer("bench", SOURCE, tokens, len(tokens), pool, exposed)


def layout() -> KvLayout:
    return trtllm_layout(max(MEBIBYTES), LAYERS, HEADS, TOKENS_PER_BLOCK, HEAD_DIM)


def filled_pool(pool: BlockPool) -> BlockPool:
    """With random bytes, so that every page is there."""
    pool.data.view(-1).view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
    return pool
