"""CUDA peer copies between two processes of one node: the target opens the source's memory by an
IPC handle and copies blocks over NVLink or PCIe.

Unverified: written against cuda-python's runtime and driver bindings, run under a fake of them.
Both processes must number their GPUs alike (the same CUDA_VISIBLE_DEVICES), and a process cannot
open its own handles: within one process use in_process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from trtllm_kvmap.errors import MismatchError, UnavailableError
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.messages import DTYPE_BYTES, Address, Offer
from trtllm_kvmap.exchange.transport import TransferError

HANDLE_BYTES = 64


class Cuda:
    """cuda-python's calls, which return (error, results...), as calls that raise TransferError."""

    def __init__(self) -> None:
        try:
            self.runtime = import_module("cuda.bindings.runtime")
            self.driver = import_module("cuda.bindings.driver")
        except ImportError as error:
            raise UnavailableError(
                "cuda-python is not installed, so GPU memory cannot be shared between processes. "
                "Install cuda-python."
            ) from error

    def __call__(self, name: str, *arguments: Any) -> Any:
        """``cuda("cudaStreamCreate")``: the result, or None."""
        module = self.runtime if name.startswith("cuda") else self.driver
        error, *results = getattr(module, name)(*arguments)
        if int(error) != 0:
            raise TransferError(f"{name} says {error!r}")
        return results[0] if len(results) == 1 else (results or None)


class CudaIpcTransport:
    """See exchange.transport."""

    def __init__(self) -> None:
        self._cuda = Cuda()
        self._opened: dict[bytes, int] = {}  # the allocation behind a handle, as it is seen here

    def expose(self, pool: BlockPool) -> Address:
        """Raises MismatchError for a pool in host memory."""
        if pool.data.device.type != "cuda":
            raise MismatchError(
                f"The pool lies on {pool.data.device}; cuda_ipc shares GPU memory. Use nixl."
            )
        where = pool.data.data_ptr()
        # A handle names a whole allocation, and torch gives out parts of large ones.
        allocation, _ = self._cuda("cuMemGetAddressRange", where)
        handle = self._cuda("cudaIpcGetMemHandle", where)
        offset = where - int(allocation)
        token = ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
        return Address("cuda_ipc", offset, pool.data.device.index, token)

    def open(self, offer: Offer, landing: BlockPool) -> CudaIpcReader:
        token = offer.address.token
        if len(token) != HANDLE_BYTES or landing.data.device.type != "cuda":
            raise TransferError(
                f"A handle of {len(token)} bytes is offered to a pool on {landing.data.device}; "
                f"{HANDLE_BYTES} bytes and GPU memory are needed"
            )
        self._cuda("cudaSetDevice", landing.data.device.index)
        if token not in self._opened:
            handle = self._cuda.runtime.cudaIpcMemHandle_t()
            ctypes.memmove(handle.getPtr(), token, HANDLE_BYTES)
            flags = self._cuda.runtime.cudaIpcMemLazyEnablePeerAccess
            self._opened[token] = int(self._cuda("cudaIpcOpenMemHandle", handle, flags))
        base = self._opened[token] + offer.address.base
        self._require_inside(offer, base)
        return CudaIpcReader(self._cuda, base, landing)

    def close(self) -> None:
        for where in self._opened.values():
            self._cuda("cudaIpcCloseMemHandle", where)
        self._opened.clear()

    def _require_inside(self, offer: Offer, base: int) -> None:
        """A copy from beyond an allocation is a fault that ends the process."""
        allocation, size = self._cuda("cuMemGetAddressRange", self._opened[offer.address.token])
        blocks = offer.layout.num_blocks * offer.layout.block_stride
        needed = base - int(allocation) + blocks * DTYPE_BYTES[offer.dtype]
        if needed > int(size):
            raise TransferError(f"the offered pool ends at byte {needed} of {int(size)}")


class CudaIpcReader:
    """Copies on a stream of its own; an event per transfer says when it has landed."""

    def __init__(self, cuda: Cuda, base: int, landing: BlockPool) -> None:
        self._cuda, self._base, self._landing = cuda, base, landing
        self._stream = cuda("cudaStreamCreate")

    def start(self, remote: Sequence[int], local: Sequence[int]) -> Any:
        size, here = self._landing.block_bytes, self._landing.data.data_ptr()
        kind = self._cuda.runtime.cudaMemcpyKind.cudaMemcpyDefault
        for there, landing in zip(remote, local, strict=True):
            self._cuda(
                "cudaMemcpyAsync",
                here + landing * size,
                self._base + there * size,
                size,
                kind,
                self._stream,
            )
        event = self._cuda("cudaEventCreate")
        self._cuda("cudaEventRecord", event, self._stream)
        return event

    def finished(self, transfer: Any) -> bool:
        errors = self._cuda.runtime.cudaError_t
        state = self._cuda.runtime.cudaEventQuery(transfer)[0]
        if state == errors.cudaErrorNotReady:
            return False
        self._cuda("cudaEventDestroy", transfer)
        if state != errors.cudaSuccess:
            raise TransferError(f"a copy between GPUs failed: {state!r}")
        return True

    def checksums(self, transfer: Any) -> None:
        return

    def close(self) -> None:
        self._cuda("cudaStreamSynchronize", self._stream)  # nothing is written here after this
        self._cuda("cudaStreamDestroy", self._stream)
