"""How fast blocks travel between two processes on one machine, beside memcpy (run it through
bench.py).

A source's process offers blocks and the target reads them over NIXL, with the whole protocol and
every checksum on both sides; memcpy copies as many bytes from one buffer to another. The two take
turns in one run; figures are ratios of rates, exchange over memcpy, and 1.0 would be an exchange
that costs one copy and nothing else. The exchange needs two cores at a time and memcpy one, so a
busy machine holds back the exchange alone: read the figures of an idle one.
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
from trtllm_kvmap.exchange.offer import Expected, make_offer
from trtllm_kvmap.exchange.receive import Received, receive_blocks
from trtllm_kvmap.exchange.send import send_blocks
from trtllm_kvmap.exchange.transport import Transport, make_transport
from trtllm_kvmap.spec.layout import trtllm_layout

# One block of an 8-layer model of 8 KV heads of 128 in half precision: 1 MiB.
LAYERS, HEADS, TOKENS_PER_BLOCK, HEAD_DIM, DTYPE = 8, 8, 32, 128, "float16"
MEBIBYTES = (64, 256, 512)
ROUNDS = 9
SOURCE = Fingerprint(*[hashlib.sha256(b"a model").hexdigest()] * 3)


def bench_exchange() -> dict[str, object]:
    """The figures of `bench.py exchange`, see the module."""
    largest = max(MEBIBYTES)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=offer_forever, args=(there, largest), daemon=True)
    process.start()
    there.close()
    transport, landing, listener = make_transport("nixl"), make_pool(largest), Listener()
    here.send(listener.address)
    here.recv()  # it is ready
    figures = {
        str(size): turns(size, here, listener, transport, landing, ROUNDS) for size in MEBIBYTES
    }
    here.send(0)
    process.join()
    return {
        "exchange_to_memcpy_by_mebibytes": figures,
        "checksum_to_memcpy": checksum_ratio(landing),
        "checksum": FASTEST,
        "rounds": ROUNDS,
        "threads": torch.get_num_threads(),
    }


def turns(
    size: int,
    source: Connection,
    listener: Listener,
    transport: Transport,
    landing: BlockPool,
    rounds: int,
) -> dict[str, float]:
    """At ``size`` blocks of 1 MiB: ratios of turns, and the ratio of the quickest of each kind."""
    copy = torch.empty(size << 20, dtype=torch.uint8).numpy()
    filled = np.random.default_rng(0).integers(0, 256, size << 20, dtype=np.uint8)
    tokens = tuple(range(size * TOKENS_PER_BLOCK))
    times = []
    for turn in range(rounds + 1):
        began = time.perf_counter()
        np.copyto(copy, filled)
        copied = time.perf_counter() - began
        source.send(size)
        began = time.perf_counter()
        expected = Expected("bench", SOURCE, (LAYERS, HEADS, HEAD_DIM), tokens)
        received = receive_blocks(listener, expected, {"nixl": transport}, landing)
        exchanged = time.perf_counter() - began
        assert isinstance(received, Received), received
        landing.give_back(received.block_ids)
        source.recv()
        if turn:  # the first one connects the agents and touches the memory
            times.append((copied, exchanged))
    ratios = [copied / exchanged for copied, exchanged in times]
    return {
        "median": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "quickest_turns": min(copied for copied, _ in times) / min(e for _, e in times),
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


def offer_forever(control: Connection, largest: int) -> None:
    """The source's process: offers as many blocks as it is told, until it is told 0."""
    transport, pool = make_transport("nixl"), make_pool(largest)
    address, exposed = control.recv(), transport.expose(pool)
    control.send("ready")
    while size := control.recv():
        tokens = tuple(range(size * TOKENS_PER_BLOCK))
        offer = make_offer("bench", SOURCE, tokens, len(tokens), pool, exposed)
        control.send(str(send_blocks(connect(address, 5.0), offer, pool, pool.take(size))))


def make_pool(num_blocks: int) -> BlockPool:
    pool = BlockPool.allocate(
        trtllm_layout(num_blocks, LAYERS, HEADS, TOKENS_PER_BLOCK, HEAD_DIM), DTYPE
    )
    pool.data.view(-1).view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
    return pool
