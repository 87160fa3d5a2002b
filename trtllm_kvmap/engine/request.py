"""A request of the pipeline, its answer, and the handle between them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from trtllm_kvmap.engine.stages import Piece
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.connector.status import HandoffStatus

HANDOFF_SECONDS = 30.0
ANSWER_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class PipelineRequest:
    """Answer ``token_ids`` with up to ``max_tokens`` greedy tokens, to ``end_id`` at most.

    ``tenant`` and ``conversation`` are the caller's names; the mapped KV answers this request
    alone. ``draft_token_ids`` are proposed as the answer's first tokens, for the target to verify;
    at most the pipeline's max_draft_len. After ``handoff_seconds`` the target reads the prompt
    itself, after ``answer_seconds`` more the request fails.

    Raises InputError for an empty prompt, no tokens to answer with, or no time.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    end_id: int | None = None
    tenant: str = ""
    conversation: str = ""
    draft_token_ids: tuple[int, ...] = ()
    handoff_seconds: float = HANDOFF_SECONDS
    answer_seconds: float = ANSWER_SECONDS

    def __post_init__(self) -> None:
        if not self.token_ids or self.max_tokens < 1:
            raise InputError(
                f"A request has {len(self.token_ids)} prompt tokens and asks for "
                f"{self.max_tokens}; it needs at least one of each."
            )
        if self.handoff_seconds < 0 or self.answer_seconds <= 0:
            raise InputError(
                f"handoff_seconds is {self.handoff_seconds} and answer_seconds "
                f"{self.answer_seconds}; the first must not be negative, the second positive."
            )


@dataclass(frozen=True, slots=True)
class PipelineAnswer:
    """``finish_reason`` is stop, length or cancelled."""

    token_ids: tuple[int, ...]
    finish_reason: str
    status: HandoffStatus


class PipelineHandle:
    """One request on its way. Iterate over it for the tokens as they come, once; or wait for
    ``result``. Thread-safe.
    """

    def __init__(self, request: PipelineRequest) -> None:
        self.request = request
        self.cancelled = threading.Event()
        self._pieces: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._answer: PipelineAnswer | None = None
        self._error: BaseException | None = None

    def cancel(self) -> None:
        """End the request soon; the answer is what has come until then."""
        self.cancelled.set()

    def __iter__(self) -> Iterator[int]:
        """The tokens. Raises what ``result`` raises, after the last token."""
        while (piece := self._pieces.get()) is not None:
            yield from piece
        if self._error is not None:
            raise self._error

    def result(self, timeout: float | None = None) -> PipelineAnswer:
        """The whole answer. Raises TimeoutError when it is not there after ``timeout`` seconds, and
        the request's own error when the target could not answer.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"The request has no answer after {timeout} seconds.")
        if self._error is not None:
            raise self._error
        assert self._answer is not None  # one of the two was set before _done
        return self._answer

    # --- For the executor ---

    def push(self, piece: Piece) -> None:
        if piece.token_ids:
            self._pieces.put(piece.token_ids)

    def finish(self, outcome: PipelineAnswer | BaseException) -> None:
        if isinstance(outcome, PipelineAnswer):
            self._answer = outcome
        else:
            self._error = outcome
        self._pieces.put(None)
        self._done.set()
