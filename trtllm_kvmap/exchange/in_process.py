"""Both ends in one process: a block is copied from pool to pool, between any two devices."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.messages import Address, Offer
from trtllm_kvmap.exchange.transport import TransferError

_exposed: dict[bytes, BlockPool] = {}


class InProcessTransport:
    """See exchange.transport."""

    def __init__(self) -> None:
        self._tokens: list[bytes] = []

    def expose(self, pool: BlockPool) -> Address:
        token = secrets.token_bytes(16)
        _exposed[token] = pool
        self._tokens.append(token)
        return Address("in_process", 0, -1, token)

    def open(self, offer: Offer, landing: BlockPool) -> InProcessReader:
        source = _exposed.get(offer.address.token)
        if source is None or source.block_bytes != landing.block_bytes:
            raise TransferError(
                "The offered pool is not of this process, or its transport was closed; use nixl "
                "between processes."
            )
        return InProcessReader(source, landing)

    def close(self) -> None:
        for token in self._tokens:
            _exposed.pop(token, None)


class InProcessReader:
    def __init__(self, source: BlockPool, landing: BlockPool) -> None:
        self._source, self._landing = source, landing

    def start(self, remote: Sequence[int], local: Sequence[int]) -> None:
        if max(remote) >= len(self._source.data):
            raise TransferError(f"The source's pool has no block {max(remote)}.")
        for there, here in zip(remote, local, strict=True):
            self._landing.data[here].copy_(self._source.data[there])

    def finished(self, transfer: None) -> bool:
        return True

    def checksums(self, transfer: None) -> None:
        return

    def close(self) -> None:
        return
