"""A slice is one (K or V, layer, KV head) of a cache: the unit a map reads and a fit chooses.

A slice with ``origin="target"`` is one of the target's own shallow layers, computed from token ids
alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Field = Literal["key", "value"]
Origin = Literal["source", "target"]
FIELDS: tuple[Field, Field] = ("key", "value")


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    origin: Origin
    field: Field
    layer: int
    head: int


def source_slices(field: Field, num_layers: int, num_kv_heads: int) -> tuple[Slice, ...]:
    """Every slice of one field of the source, layer-major."""
    return tuple(
        Slice("source", field, layer, head)
        for layer in range(num_layers)
        for head in range(num_kv_heads)
    )


def own_slices(field: Field, num_kv_heads: int) -> tuple[Slice, ...]:
    """The target's own layer 0 of one field: exact, and a function of the token id alone."""
    return tuple(Slice("target", field, 0, head) for head in range(num_kv_heads))


def nearest_depth(layer: int, target_layers: int, source_layers: int) -> int:
    """The source layer at the nearest normalised depth; the middle of a layer counts, so first
    meets first.
    """
    return min(source_layers - 1, int((layer + 0.5) * source_layers / target_layers))
