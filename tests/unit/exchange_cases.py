"""Pools with known contents, offers of them, and both ends of an exchange in one process."""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.channel import Listener, connect
from trtllm_kvmap.exchange.in_process import InProcessTransport
from trtllm_kvmap.exchange.messages import Offer
from trtllm_kvmap.exchange.offer import Expected, make_offer
from trtllm_kvmap.exchange.receive import NotReceived, Received, receive_blocks
from trtllm_kvmap.exchange.send import Sent, send_blocks
from trtllm_kvmap.exchange.transport import Transport
from trtllm_kvmap.spec.layout import trtllm_layout

SOURCE = Fingerprint(*(hashlib.sha256(part.encode()).hexdigest() for part in "cwt"))
LAYERS, HEADS, TOKENS_PER_BLOCK, HEAD_DIM = 3, 2, 4, 8
TOKEN_IDS = tuple(range(100, 118))  # 18 tokens: four full blocks and a half one
POISON = 0xA5


def make_pool(num_blocks: int, fill: int | None = None) -> BlockPool:
    """float32 blocks of 1,536 bytes: random, or ``fill`` in every byte."""
    layout = trtllm_layout(num_blocks, LAYERS, HEADS, TOKENS_PER_BLOCK, HEAD_DIM)
    pool = BlockPool.allocate(layout, "float32")
    if fill is not None:
        pool.data.fill_(fill)
    else:
        generator = torch.Generator().manual_seed(0)
        pool.data.copy_(
            torch.randint(0, 256, pool.data.shape, dtype=torch.uint8, generator=generator)
        )
    return pool


def expected(request_id: str = "r1", token_ids: Sequence[int] = TOKEN_IDS) -> Expected:
    return Expected(request_id, SOURCE, (LAYERS, HEADS, HEAD_DIM), tuple(token_ids))


def offer_of(
    pool: BlockPool, transport: Transport, request_id: str = "r1", *, lease_seconds: float = 5.0
) -> Offer:
    return make_offer(
        request_id,
        SOURCE,
        TOKEN_IDS,
        len(TOKEN_IDS),
        pool,
        transport.expose(pool),
        lease_seconds=lease_seconds,
    )


class Sending(threading.Thread):
    """send_blocks in a thread; ``ended()`` is its result."""

    def __init__(self, address: tuple[str, int], *arguments: Any, **options: Any) -> None:
        super().__init__(daemon=True)
        self._address, self._arguments, self._options = address, arguments, options
        self._sent: Sent | None = None

    def run(self) -> None:
        channel = connect(self._address, 5.0)
        self._sent = send_blocks(channel, *self._arguments, **self._options)

    def ended(self) -> Sent:
        self.join(30.0)
        assert self._sent is not None, "the source's end has not ended"
        return self._sent


@contextmanager
def target(
    landing: BlockPool, transport: Transport | None = None, **options: Any
) -> Iterator[tuple[Listener, Callable[[], Received | NotReceived]]]:
    """A listener, and a call that receives on it."""
    listener = Listener()
    transports = {"in_process": transport or InProcessTransport()}
    try:
        yield (
            listener,
            lambda: receive_blocks(listener, expected(), transports, landing, **options),
        )
    finally:
        listener.close()


def frame(data: bytes) -> bytes:
    """As the control channel writes a message, from its description: its length, big-endian, and
    it."""
    return struct.pack(">I", len(data)) + data


def raw_connection(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, 5.0)
