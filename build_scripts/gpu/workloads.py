"""The maps that are timed: the geometry of a real pair, and what a call must at least compute and
move. Arithmetic only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Datasheet rates of an H100; the report replaces them by what the card at hand reaches.
MATMUL_FLOPS = 989e12
COPY_BYTES = 3.35e12
BYTES = 2  # bf16


@dataclass(frozen=True)
class Workload:
    """One map between two models of ``heads`` KV heads of ``head_dim``.

    ``scope`` as in a KvMap; ``slices`` is how many source slices a target head reads: k for head,
    k times the heads for pooled, n for slice.
    """

    name: str
    scope: str
    slices: int
    tokens: tuple[int, ...]
    source_layers: int = 40
    target_layers: int = 64
    heads: int = 8
    head_dim: int = 128
    weight_bytes: int = BYTES  # 1: fp8-e4m3

    @property
    def parameters(self) -> int:
        if self.scope == "copy":
            return 0
        return 2 * self.target_layers * self.heads * self.slices * self.head_dim**2

    def flops(self, tokens: int) -> int:
        return 2 * tokens * self.parameters

    def bytes_moved(self, tokens: int) -> int:
        """The weights and every source number once, every target number once."""
        numbers = 2 * (self.source_layers + self.target_layers) * self.heads * self.head_dim
        return self.weight_bytes * self.parameters + BYTES * tokens * numbers

    def tokens_for(self, variant: str) -> tuple[int, ...]:
        """The lengths to time a variant at: ``hopper`` multiplies, nothing for so few tokens
        that weights are streamed instead.
        """
        if variant == "hopper":
            return tuple(t for t in self.tokens if t > 64 and self.parameters > 0)
        return self.tokens

    def floor_seconds(self, tokens: int, matmul: float, copy: float) -> float:
        """No version runs faster at these rates (FLOP/s, bytes/s)."""
        return max(self.flops(tokens) / matmul, self.bytes_moved(tokens) / copy)


LONG = (64, 8192, 32768)
WORKLOADS = (
    Workload("pooled-8", "pooled", 8 * 8, LONG),
    Workload("head-8", "head", 8, LONG),
    Workload("slice-12", "slice", 12, LONG),
    Workload("copy", "copy", 1, (8192, 32768), source_layers=36),
    Workload("pooled-8-float8", "pooled", 8 * 8, (64,), weight_bytes=1),
)
# The same in small, to try the script itself.
TINY = (
    Workload("pooled-2", "pooled", 4, (5, 40), 3, 4, 2, 32),
    Workload("head-2", "head", 2, (40,), 3, 4, 2, 32),
    Workload("slice-3", "slice", 3, (40,), 3, 4, 2, 32),
    Workload("copy", "copy", 1, (40,), 3, 4, 2, 32),
    Workload("pooled-2-float8", "pooled", 4, (5,), 3, 4, 2, 32, weight_bytes=1),
)


def predictions() -> list[dict[str, Any]]:
    return [
        {
            "map": w.name,
            "tokens": tokens,
            "tflop": w.flops(tokens) / 1e12,
            "gigabytes": w.bytes_moved(tokens) / 1e9,
            "floor_ms": 1e3 * w.floor_seconds(tokens, MATMUL_FLOPS, COPY_BYTES),
        }
        for w in WORKLOADS
        for tokens in w.tokens
    ]
