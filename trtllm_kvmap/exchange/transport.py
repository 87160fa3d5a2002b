"""The contract of a transport: bytes of the source's blocks, read by the target. A leaf is a file.

The source exposes its pool once. The target opens a reader for an offer and starts transfers of
some blocks each; it is the only one that acts, so the source may be busy, or dead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol

from trtllm_kvmap.errors import InputError, KvMapError
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.messages import Address, Offer
from trtllm_kvmap.spec.layout import KvLayout


class TransferError(KvMapError):
    """Blocks could not be read. What landed must not be used."""


class Reader(Protocol):
    """Reads the blocks of one offer."""

    def start(self, remote: Sequence[int], local: Sequence[int]) -> Any:
        """Begin to read block remote[i] of the source into block local[i] of the landing pool, for
        every i. Returns what ``finished`` takes. Raises TransferError.
        """

    def finished(self, transfer: Any) -> bool:
        """Whether it has landed; ask again when it has not. Raises TransferError when it failed."""

    def checksums(self, transfer: Any) -> tuple[int, ...] | None:
        """Of the blocks that landed, when the reader took them while it copied; None: it did not,
        and the caller takes them. Once per transfer, after ``finished``.
        """

    def close(self) -> None:
        """Forget what belongs to this offer alone."""


class Transport(Protocol):
    """One end's access to a kind of memory traffic, for as many exchanges as it likes."""

    def expose(self, pool: BlockPool) -> Address:
        """Let the blocks of ``pool`` be read; once per pool, while the transport is open."""

    def open(self, offer: Offer, landing: BlockPool) -> Reader:
        """A reader into ``landing``, whose blocks are as large as the offer's. Raises
        TransferError when the address cannot be used.
        """

    def close(self) -> None: ...


_LEAVES = {
    "in_process": "InProcessTransport",
    "nixl": "NixlTransport",
    "shared_memory": "SharedMemoryTransport",
    "cuda_ipc": "CudaIpcTransport",
}


def make_transport(name: str) -> Transport:
    """By name. Raises InputError for an unknown one and UnavailableError when its library is not
    installed.
    """
    if name not in _LEAVES:
        raise InputError(f"No transport {name!r}; there are {', '.join(_LEAVES)}.")
    leaf: Callable[[], Transport] = getattr(
        import_module(f"trtllm_kvmap.exchange.{name}"), _LEAVES[name]
    )
    return leaf()


def allocate_pool(name: str, layout: KvLayout, dtype: str) -> BlockPool:
    """A source's pool in host memory, of the kind that the transport ``name`` can expose. Raises
    UnavailableError.
    """
    if name == "shared_memory":
        pool: BlockPool = import_module("trtllm_kvmap.exchange.shared_memory").SharedPool(
            layout, dtype
        )
        return pool
    return BlockPool.allocate(layout, dtype)
