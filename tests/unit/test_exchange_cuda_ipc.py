"""cuda_ipc under a fake of cuda-python: whether handles, offsets, copies and events fit together.

The fake keeps "GPU" memory on the host, so that addresses are real and the copies take place. No
GPU is touched, and nothing here says that one would do the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exchange_cases import POISON, SOURCE, TOKEN_IDS, make_pool

from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.exchange import cuda_ipc
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.cuda_ipc import CudaIpcTransport
from trtllm_kvmap.exchange.messages import Offer
from trtllm_kvmap.exchange.offer import make_offer
from trtllm_kvmap.exchange.transport import TransferError

SUCCESS, NOT_READY, INVALID = 0, 600, 1
BEFORE = 512  # bytes of the allocation before the pool, as torch's allocator has them


class FakeHandle:
    """64 bytes behind a pointer, as cudaIpcMemHandle_t of cuda-python."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self._bytes)


class FakeCudaPython:
    """The calls of cuda.bindings that cuda_ipc makes, with their shapes of results."""

    cudaIpcMemHandle_t = FakeHandle  # noqa: N815
    cudaIpcMemLazyEnablePeerAccess = 1  # noqa: N815
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)  # noqa: N815
    cudaError_t = SimpleNamespace(cudaSuccess=SUCCESS, cudaErrorNotReady=NOT_READY)  # noqa: N815

    def __init__(self) -> None:
        self.allocations: dict[int, int] = {}
        self.queued: list[tuple[int, int, int]] = []
        self.open, self.streams, self.events = 0, 0, 0

    def cuMemGetAddressRange(self, where: int) -> tuple[Any, ...]:  # noqa: N802
        for base, size in self.allocations.items():
            if base <= where < base + size:
                return SUCCESS, base, size
        return INVALID, None, None

    def cudaIpcGetMemHandle(self, where: int) -> tuple[Any, ...]:  # noqa: N802
        _, base, _ = self.cuMemGetAddressRange(where)
        handle = FakeHandle()
        ctypes.memmove(handle.getPtr(), base.to_bytes(64, "little"), 64)
        return SUCCESS, handle

    def cudaIpcOpenMemHandle(self, handle: FakeHandle, flags: int) -> tuple[Any, ...]:  # noqa: N802
        base = int.from_bytes(ctypes.string_at(handle.getPtr(), 64), "little")
        if base not in self.allocations or flags != 1:
            return INVALID, None
        self.open += 1
        return SUCCESS, base

    def cudaIpcCloseMemHandle(self, where: int) -> tuple[Any, ...]:  # noqa: N802
        self.open -= 1
        return (SUCCESS,)

    def cudaSetDevice(self, device: int) -> tuple[Any, ...]:  # noqa: N802
        return (SUCCESS if device == 0 else INVALID,)

    def cudaStreamCreate(self) -> tuple[Any, ...]:  # noqa: N802
        self.streams += 1
        return SUCCESS, self.streams

    def cudaStreamDestroy(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        self.streams -= 1
        return (SUCCESS,)

    def cudaMemcpyAsync(  # noqa: N802
        self, to: int, source: int, count: int, kind: int, stream: int
    ) -> tuple[Any, ...]:
        self.queued.append((to, source, count))
        return (SUCCESS if kind == 4 and stream else INVALID,)

    def cudaEventCreate(self) -> tuple[Any, ...]:  # noqa: N802
        self.events += 1
        return SUCCESS, object()

    def cudaEventDestroy(self, event: object) -> tuple[Any, ...]:  # noqa: N802
        self.events -= 1
        return (SUCCESS,)

    def cudaEventRecord(self, event: object, stream: int) -> tuple[Any, ...]:  # noqa: N802
        return (SUCCESS,)

    def cudaEventQuery(self, event: object) -> tuple[Any, ...]:  # noqa: N802
        """Not ready when it is first asked for; then everything is copied."""
        if self.queued:
            self.cudaStreamSynchronize(1)
            return (NOT_READY,)
        return (SUCCESS,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        for copy in self.queued:
            ctypes.memmove(*copy)
        self.queued.clear()
        return (SUCCESS,)


class FakeGpuTensor:
    """Host memory that says it is a GPU's."""

    device = torch.device("cuda", 0)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCudaPython:
    cuda_python = FakeCudaPython()
    monkeypatch.setattr(cuda_ipc, "import_module", lambda name: cuda_python)
    return cuda_python


def gpu_pool(fake: FakeCudaPython, num_blocks: int, fill: int | None = None) -> BlockPool:
    """A pool of a "GPU", BEFORE bytes into its allocation."""
    plain = make_pool(num_blocks, fill)
    whole = torch.zeros(BEFORE + plain.data.numel(), dtype=torch.uint8)
    whole[BEFORE:] = plain.data.flatten()
    fake.allocations[whole.data_ptr()] = len(whole)
    pool = BlockPool(plain.layout, plain.dtype, whole[BEFORE:])
    pool.data = FakeGpuTensor(pool.data)  # type: ignore[assignment]
    return pool


def offer_from(pool: BlockPool, transport: CudaIpcTransport) -> Offer:
    return make_offer("r1", SOURCE, TOKEN_IDS, len(TOKEN_IDS), pool, transport.expose(pool))


def read(reader: Any, remote: Sequence[int], local: Sequence[int]) -> int:
    """Read and wait; how often it was not ready."""
    transfer, asked = reader.start(remote, local), 0
    while not reader.finished(transfer):
        asked += 1
    return asked


def test_blocks_arrive_whole_under_a_fake_cuda(fake: FakeCudaPython) -> None:
    source, landing = gpu_pool(fake, 9), gpu_pool(fake, 6, fill=POISON)
    transport = CudaIpcTransport()
    offer = offer_from(source, transport)
    assert offer.address.base == BEFORE
    reader = transport.open(offer, landing)
    assert read(reader, (6, 0, 8), (1, 2, 5)) == 1
    wanted = torch.full((6, landing.block_bytes), POISON, dtype=torch.uint8)
    wanted[[1, 2, 5]] = source.data.tensor[[6, 0, 8]]
    assert torch.equal(landing.data.tensor, wanted)
    reader.close()
    transport.close()
    assert (fake.open, fake.streams, fake.events, fake.queued) == (0, 0, 0, [])


def test_closing_waits_for_copies_under_way_under_a_fake_cuda(fake: FakeCudaPython) -> None:
    source, landing = gpu_pool(fake, 9), gpu_pool(fake, 6)
    transport = CudaIpcTransport()
    reader = transport.open(offer_from(source, transport), landing)
    reader.start((1,), (1,))
    reader.close()
    assert fake.queued == []


def test_false_handles_are_refused_under_a_fake_cuda(fake: FakeCudaPython) -> None:
    source, landing = gpu_pool(fake, 9), gpu_pool(fake, 6)
    transport = CudaIpcTransport()
    good = offer_from(source, transport)
    for change, words in (
        ({"token": b"short"}, "handle of 5 bytes"),
        ({"token": bytes(64)}, "cudaIpcOpenMemHandle says 1"),
        ({"base": BEFORE + 1}, "the offered pool ends at byte"),
    ):
        bad = replace(good, address=replace(good.address, **change))
        with pytest.raises(TransferError, match=words):
            transport.open(bad, landing)
    with pytest.raises(TransferError, match="GPU memory"):
        transport.open(good, make_pool(6))


def test_host_memory_is_not_shared_under_a_fake_cuda(fake: FakeCudaPython) -> None:
    with pytest.raises(MismatchError, match="Use nixl"):
        CudaIpcTransport().expose(make_pool(2))
