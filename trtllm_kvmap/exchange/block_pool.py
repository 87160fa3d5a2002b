"""Memory that blocks are read from or land in, block by block, and who has which block."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from trtllm_kvmap.errors import InputError, MismatchError, UnavailableError
from trtllm_kvmap.exchange.messages import DTYPE_BYTES
from trtllm_kvmap.spec.layout import KvLayout, trtllm_layout

_HUGE_PAGE = 2 << 20


def pool_bytes(layout: KvLayout, dtype: str) -> int:
    """Of all blocks of a pool together."""
    return layout.num_blocks * layout.block_stride * DTYPE_BYTES[dtype]


def ask_huge_pages(room: mmap.mmap) -> None:
    """Where the system has none, or will not give any, small ones do."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            room.madvise(mmap.MADV_HUGEPAGE)


class BlockPool:
    """Blocks of one layout in one piece of memory, as ``data``: uint8 [num_blocks, block_bytes].

    A block holds every layer, keys and values, so that it travels as one run of bytes:
    [num_layers, 2, num_kv_heads, tokens_per_block, head_dim], TensorRT-LLM's order. The scales are
    those of an fp8 cache (real = stored * scale). Thread-safe.
    """

    def __init__(
        self,
        layout: KvLayout,
        dtype: str,
        data: torch.Tensor,
        *,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """Raises MismatchError for a layout with gaps, and for ``data`` of another size."""
        plain = trtllm_layout(
            layout.num_blocks,
            layout.num_layers,
            layout.num_kv_heads,
            layout.tokens_per_block,
            layout.head_dim,
        )
        if layout != plain:
            raise MismatchError(
                f"A block must be one run of bytes to travel; {layout} has gaps or another order. "
                f"Copy the blocks into a pool of trtllm_layout first."
            )
        self.layout, self.dtype = layout, dtype
        self.key_scale, self.value_scale = key_scale, value_scale
        self.block_bytes = layout.block_stride * DTYPE_BYTES[dtype]
        size = pool_bytes(layout, dtype)
        if data.dtype != torch.uint8 or data.numel() != size or not data.is_contiguous():
            raise MismatchError(
                f"The pool needs {size} contiguous bytes for {layout.num_blocks} blocks of "
                f"{self.block_bytes}; got {data.numel()} of {data.dtype}."
            )
        self.data = data.view(layout.num_blocks, self.block_bytes)
        self._free = list(range(layout.num_blocks))
        self._lock = threading.Lock()

    @staticmethod
    def allocate(layout: KvLayout, dtype: str) -> BlockPool:
        """In host memory; in huge pages where the system gives them, because reading another
        process's small pages costs as much as the copy itself.
        """
        size = pool_bytes(layout, dtype)
        room = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        ask_huge_pages(room)
        whole = torch.frombuffer(room, dtype=torch.uint8)
        aligned = -whole.data_ptr() % _HUGE_PAGE
        return BlockPool(layout, dtype, whole[aligned : aligned + size])

    @property
    def blocks(self) -> torch.Tensor:
        """The same memory as [num_blocks, num_layers, 2, num_kv_heads, tokens_per_block,
        head_dim].
        """
        at = self.layout
        shape = at.num_layers, 2, at.num_kv_heads, at.tokens_per_block, at.head_dim
        return self.data.view(getattr(torch, self.dtype)).view(at.num_blocks, *shape)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """``count`` blocks that nobody has, those given back last. Raises UnavailableError when
        there are not so many.
        """
        with self._lock:
            if count > len(self._free):
                raise UnavailableError(
                    f"{count} blocks are needed and {len(self._free)} of "
                    f"{self.layout.num_blocks} are free; wait for a hand-over to end, or make the "
                    f"pool larger."
                )
            kept = len(self._free) - count
            taken, self._free = self._free[kept:], self._free[:kept]
        return tuple(taken)

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Raises InputError, and takes none back, for a block that is free already."""
        with self._lock:
            twice = set(block_ids) & set(self._free)
            if twice or len(set(block_ids)) != len(block_ids):
                raise InputError(f"Blocks {sorted(twice)} were given back twice.")
            self._free.extend(block_ids)
