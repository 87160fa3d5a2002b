"""The three stages of a pipeline, as the executor sees them, and what travels between them.

The stages over TensorRT-LLM are source_stage.py, relay.py and target_stage.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trtllm_kvmap.errors import UnavailableError

# How long a stage may sleep or wait before it looks at its deadline again.
POLL_SECONDS = 0.002


class CancelledError(Exception):
    """The caller has cancelled the request; no error of the pipeline."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Until when a request's stages may take, and whether it was cancelled."""

    ends: float
    cancelled: threading.Event = field(default_factory=threading.Event)

    @staticmethod
    def after(seconds: float, cancelled: threading.Event | None = None) -> Deadline:
        return Deadline(time.monotonic() + seconds, cancelled or threading.Event())

    @property
    def left(self) -> float:
        return max(self.ends - time.monotonic(), 0.0)

    def check(self, what: str) -> None:
        """Raise CancelledError, or UnavailableError when the time is up for ``what``."""
        if self.cancelled.is_set():
            raise CancelledError
        if not self.left:
            raise UnavailableError(
                f"{what} took too long. Give the request more time, or look at that stage's log."
            )

    def wait(self, what: str) -> None:
        """Sleep a moment, then check."""
        time.sleep(min(POLL_SECONDS, self.left))
        self.check(what)


@dataclass(frozen=True, slots=True)
class ContextState:
    """Where a peer finds the KV of a context phase: the request's id there, and the transceiver's
    own description of itself, which nobody else reads.
    """

    request_id: int
    opaque: bytes


@dataclass(frozen=True, slots=True)
class Mapped:
    """The target's KV of some tokens, held in the relay until it is released. ``sink`` of them came
    from the map's sink table.
    """

    state: ContextState
    sink: int
    held: Any = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of an answer as they come. The last one has a ``finish_reason`` (stop, length or
    cancelled) and, where the engine says so, how many prompt tokens it found in its cache.
    """

    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    reused_tokens: int | None = None


class SourceStage(Protocol):
    def read(self, token_ids: Sequence[int], salt: int, deadline: Deadline) -> ContextState:
        """Read a prompt and keep its KV until a peer has taken it, or it is forgotten."""

    def forget(self, state: ContextState) -> None:
        """No peer will take what was read."""


class RelayStage(Protocol):
    def map(self, state: ContextState, token_ids: Sequence[int], deadline: Deadline) -> Mapped:
        """Take the source's KV of these tokens and turn it into the target's."""

    def release(self, mapped: Mapped) -> None:
        """Nobody will take it any more. Blocks that a transfer still reads are kept until it has
        ended.
        """


class TargetStage(Protocol):
    def land(
        self,
        token_ids: Sequence[int],
        next_token: int,
        state: ContextState,
        salt: int,
        deadline: Deadline,
    ) -> None:
        """Take the KV of ``token_ids`` from the relay into the engine's own cache, to be found by
        requests of this salt alone. ``next_token`` follows them in the prompt.
        """

    def answer(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        end_id: int | None,
        draft_token_ids: Sequence[int],
        salt: int | None,
        deadline: Deadline,
    ) -> Iterator[Piece]:
        """Answer a prompt; what its salt finds in the cache is not read again."""
