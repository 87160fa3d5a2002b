"""Host memory of one machine, without a library: the source's pool is a memory file, which the
target maps and copies from as if it were its own.

Linux, and one pid namespace (a host, or a container): the target opens ``/proc/<pid>/fd/<fd>``, as
a process of the same user may. The file has no name that could outlive its processes, and what is
mapped stays when the source dies.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from trtllm_kvmap.errors import MismatchError, UnavailableError
from trtllm_kvmap.exchange.block_pool import BlockPool, ask_huge_pages, pool_bytes
from trtllm_kvmap.exchange.checksum import copy_block
from trtllm_kvmap.exchange.messages import Address, Offer
from trtllm_kvmap.exchange.transport import TransferError
from trtllm_kvmap.spec.layout import KvLayout

# pid, file descriptor, and the file's name: new for every pool, so that a number which is somebody
# else's by now is not taken for the source's.
_TOKEN = re.compile(rb"([0-9]{1,10}):([0-9]{1,10}):(kvmap-[0-9a-f]{32})")


class SharedPool(BlockPool):
    """A BlockPool that other processes of this machine can read. Only a source needs one."""

    def __init__(self, layout: KvLayout, dtype: str) -> None:
        """Raises UnavailableError where the system has no such memory, or not enough of it."""
        size, name = pool_bytes(layout, dtype), f"kvmap-{uuid.uuid4().hex}"
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, fd)
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _fixed_size())
            room = mmap.mmap(fd, size)
        except (AttributeError, OSError) as error:
            raise UnavailableError(
                f"{size} bytes of shared memory cannot be had ({error}); that takes Linux and as "
                f"much free memory. Use the transport nixl, or a smaller pool."
            ) from error
        ask_huge_pages(room)
        super().__init__(layout, dtype, torch.frombuffer(room, dtype=torch.uint8))
        self.token = f"{os.getpid()}:{fd}:{name}".encode()


class SharedMemoryTransport:
    """See exchange.transport."""

    def __init__(self) -> None:
        self._mapped: dict[bytes, np.ndarray] = {}  # the sources' memory, by token

    def expose(self, pool: BlockPool) -> Address:
        """Raises MismatchError for a pool that is no SharedPool."""
        if not isinstance(pool, SharedPool):
            raise MismatchError(
                "The pool's memory is this process's alone; shared_memory reads a SharedPool "
                "(transport.allocate_pool makes one)."
            )
        return Address("shared_memory", 0, -1, pool.token)

    def open(self, offer: Offer, landing: BlockPool) -> SharedMemoryReader:
        if landing.data.device.type != "cpu":
            raise TransferError(
                f"The landing pool lies on {landing.data.device}; shared_memory copies into host "
                f"memory"
            )
        self._forget_gone()
        address = offer.address
        if address.token not in self._mapped:
            self._mapped[address.token] = _map(address.token)
        memory = self._mapped[address.token]
        end = address.base + pool_bytes(offer.layout, offer.dtype)
        if end > len(memory):
            raise TransferError(f"the offered pool ends at byte {end} of {len(memory)}")
        blocks = memory[address.base : end].reshape(offer.layout.num_blocks, -1)
        return SharedMemoryReader(blocks, landing, offer.checksum)

    def close(self) -> None:
        self._mapped.clear()

    def _forget_gone(self) -> None:
        """The system keeps a pool's memory while anyone has it mapped: no longer than its source
        does, and the next offer.
        """
        for token in [token for token in self._mapped if not _is_there(token)]:
            del self._mapped[token]


class SharedMemoryReader:
    """Copies at once, and takes each block's checksum on the way."""

    def __init__(self, blocks: np.ndarray, landing: BlockPool, checksum: str) -> None:
        self._blocks, self._landing, self._checksum = blocks, landing.data.numpy(), checksum

    def start(self, remote: Sequence[int], local: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            copy_block(self._checksum, self._blocks[there], self._landing[here])
            for there, here in zip(remote, local, strict=True)
        )

    def finished(self, transfer: tuple[int, ...]) -> bool:
        return True

    def checksums(self, transfer: tuple[int, ...]) -> tuple[int, ...]:
        return transfer

    def close(self) -> None:
        return


def _fixed_size() -> int:
    """Seals without which a reader is killed when the file becomes smaller."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _path(token: bytes) -> tuple[Path, str]:
    """Where the file can be opened, and what the system must call it. Raises TransferError."""
    parts = _TOKEN.fullmatch(token)
    if parts is None:
        raise TransferError("the address names no shared memory")
    pid, fd, name = (part.decode() for part in parts.groups())
    return Path(f"/proc/{pid}/fd/{fd}"), f"/memfd:{name} (deleted)"


def _is_there(token: bytes) -> bool:
    path, name = _path(token)
    try:
        return str(path.readlink()) == name
    except OSError:
        return False


def _map(token: bytes) -> np.ndarray:
    """The memory file, read-only, as uint8 [its size]. Raises TransferError."""
    path, _ = _path(token)
    # Asked before it is opened, because to open a device or a pipe is to do something to it.
    if not _is_there(token):
        raise TransferError(
            "the source's memory is not of this machine, user and container, or is gone; use nixl"
        )
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _fixed_size() != _fixed_size():
                raise TransferError("the source could make its memory smaller while it is read")
            room = mmap.mmap(fd, 0, prot=mmap.PROT_READ)  # has a descriptor of its own
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise TransferError(f"the source's memory cannot be mapped: {error}") from error
    return np.frombuffer(room, dtype=np.uint8)
