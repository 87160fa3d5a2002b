"""Why a request's prompt was, or was not, read by the target itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from trtllm_kvmap.inject.connector.status import State

STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True, slots=True)
class Outcome:
    """``status`` as of HandoffStatus: ``unsupported`` when no map can serve here or the client asks
    for another one, ``fallback_reprefill`` when the map could have. ``reason`` is one word, for
    counters, empty when applied; ``detail`` a sentence, for people.
    """

    status: State
    reason: str = ""
    detail: str = ""

    @property
    def kv_reason(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason
