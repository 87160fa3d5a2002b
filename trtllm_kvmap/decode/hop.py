"""One switch of a conversation from model to model, as it went, and who may object to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from trtllm_kvmap.decode.bridge import Handoff, KvBridge
from trtllm_kvmap.inject.hf_cache import HfCache

Outcome = Literal["applied", "fallback_reprefill"]


class Verdict(NamedTuple):
    """What a guard says of a hand-over: how far it has drifted, and whether it may stand."""

    drift: float
    applied: bool


class HopGuard(Protocol):
    """Judges a hand-over of ``token_ids`` that ``bridge`` has just made from ``source_cache``."""

    def __call__(
        self, bridge: KvBridge, source_cache: HfCache, token_ids: Sequence[int], handoff: Handoff
    ) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class Hop:
    """``source`` handed ``num_tokens`` over to ``target``, which had ``kept`` of them, ``exact`` of
    those exactly; ``mapped`` were mapped now and the rest computed.

    ``outcome`` says whether the map stands or the target read all but its exact entries for real,
    and ``reason`` why it did; ``drift`` is the guard's figure (None: no guard).
    """

    source: str
    target: str
    num_tokens: int
    kept: int
    exact: int
    mapped: int
    outcome: Outcome = "applied"
    reason: str = ""
    drift: float | None = None
