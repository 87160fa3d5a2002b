"""A pool of KV blocks in memory, whatever engine owns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.spec.slices import Field

CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class KvPool:
    """Per layer, views of shape [num_blocks, num_kv_heads, tokens_per_block, head_dim] with any
    strides.

    Keys are rotated, as engines store them. ``key_scale`` and ``value_scale`` turn stored numbers
    into real ones (real = stored * scale); they are 1.0 except for fp8 caches.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    key_scale: float = 1.0
    value_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.keys or len(self.keys) != len(self.values):
            raise MismatchError(
                f"A pool needs as many key views as value views, and at least one; got "
                f"{len(self.keys)} and "
                f"{len(self.values)}."
            )
        first = self.keys[0]
        for view in (*self.keys, *self.values):
            if view.ndim != 4 or view.shape != first.shape:
                raise MismatchError(
                    "Every view of a pool needs the same shape [num_blocks, num_kv_heads, "
                    "tokens_per_block, "
                    f"head_dim]; got {tuple(view.shape)} beside {tuple(first.shape)}."
                )
            if view.dtype != first.dtype or view.device != first.device:
                raise MismatchError(
                    f"Every view of a pool needs one dtype and device; got {view.dtype} on "
                    f"{view.device} beside "
                    f"{first.dtype} on {first.device}."
                )
        if first.dtype not in CACHE_DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in CACHE_DTYPES)
            raise MismatchError(f"A cache of {first.dtype} is not supported; use one of {names}.")

    @staticmethod
    def from_trtllm(pool: torch.Tensor, key_scale: float = 1.0, value_scale: float = 1.0) -> KvPool:
        """Views into TensorRT-LLM's pool [num_blocks, num_layers, 2, num_kv_heads,
        tokens_per_block, head_dim].
        """
        if pool.ndim != 6 or pool.shape[2] != 2:
            raise MismatchError(
                "A TensorRT-LLM pool has shape [num_blocks, num_layers, 2, num_kv_heads, "
                "tokens_per_block, head_dim]; "
                f"got {tuple(pool.shape)}."
            )
        layers: Sequence[int] = range(pool.shape[1])
        return KvPool(
            keys=tuple(pool[:, layer, 0] for layer in layers),
            values=tuple(pool[:, layer, 1] for layer in layers),
            key_scale=key_scale,
            value_scale=value_scale,
        )

    def field(self, field: Field) -> tuple[tuple[torch.Tensor, ...], float]:
        """The views of keys or of values, and their scale."""
        return (self.keys, self.key_scale) if field == "key" else (self.values, self.value_scale)

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """(num_layers, num_kv_heads, head_dim)."""
        return len(self.keys), int(self.keys[0].shape[1]), int(self.keys[0].shape[3])

    @property
    def tokens_per_block(self) -> int:
        return int(self.keys[0].shape[2])

    @property
    def num_slots(self) -> int:
        return int(self.keys[0].shape[0]) * self.tokens_per_block

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def device(self) -> torch.device:
        return self.keys[0].device
