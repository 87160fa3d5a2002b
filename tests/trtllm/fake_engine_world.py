"""What the FAKES of the engine lane share: KV that one offers and another fetches, and pools found
again by their address.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import torch

Shape = tuple[int, ...]  # layers, KV heads, tokens per block, head size


@dataclass
class Offered:
    """Blocks [n, layers, 2, heads, tokens, head_dim] that a peer may fetch once."""

    shape: Shape
    read: Callable[[], torch.Tensor]
    taken: Callable[[], None]


@dataclass
class EngineWorld:
    """``stalled`` are ends between which nothing moves: "relay" (from the source) and "target"
    (from the relay). ``fetched`` counts what did.
    """

    offers: dict[bytes, Offered] = field(default_factory=dict)
    pools: dict[int, torch.Tensor] = field(default_factory=dict)  # by address
    stalled: set[str] = field(default_factory=set)
    fetched: list[bytes] = field(default_factory=list)
    libraries: list[str] = field(default_factory=list)
    numbers: count = field(default_factory=lambda: count(1))

    def offer(self, who: str, offered: Offered) -> bytes:
        state = f"FAKE {who} {next(self.numbers)}".encode()
        self.offers[state] = offered
        return state

    def fetch(self, state: bytes, shape: Shape, into: torch.Tensor) -> None:
        """Copy what was offered into blocks [n, layers, 2, heads, tokens, head_dim]. As upstream's
        formatter, refuse a peer of another shape.
        """
        offered = self.offers.pop(state)
        if offered.shape != shape:
            raise RuntimeError(f"a peer of {offered.shape} cannot give to one of {shape}")
        into.copy_(offered.read())
        self.fetched.append(state)
        offered.taken()


WORLD = EngineWorld()


def new_world() -> EngineWorld:
    """Forget everything; the same object, which the fakes hold."""
    WORLD.__init__()  # type: ignore[misc]
    return WORLD
