"""The pipeline at work: source, relay and target, one hand-over for each request.

The source reads the blocks that will be mapped and nothing more. The relay turns its KV into the
target's. The target takes that into its cache, under a salt of this request alone, and answers: it
computes what was not mapped, at least the last repair_window tokens, and every token of the answer.
Whatever goes wrong on the way, the target has the prompt and reads it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from trtllm_kvmap.engine.manifest import Manifest
from trtllm_kvmap.engine.request import PipelineAnswer, PipelineHandle, PipelineRequest
from trtllm_kvmap.engine.stages import (
    CancelledError,
    ContextState,
    Deadline,
    Mapped,
    Piece,
    RelayStage,
    SourceStage,
    TargetStage,
)
from trtllm_kvmap.errors import InputError, UnavailableError
from trtllm_kvmap.inject.connector.identity import HandoffIdentity
from trtllm_kvmap.inject.connector.status import HandoffStatus
from trtllm_kvmap.spec.plan import plan_handoff

log = logging.getLogger(__name__)


class PipelineExecutor:
    """Thread-safe. ``threads`` requests are on their way at once, the others wait."""

    def __init__(
        self,
        manifest: Manifest,
        source: SourceStage,
        relay: RelayStage,
        target: TargetStage,
        threads: int | None = None,
    ) -> None:
        self._manifest, self._config = manifest, manifest.config
        self._source, self._relay, self._target = source, relay, target
        self._threads = ThreadPoolExecutor(threads or self._config.max_batch_size, "kvmap-pipeline")

    def submit(self, request: PipelineRequest) -> PipelineHandle:
        """Begin with ``request``. Raises InputError for one the target's engine cannot take:
        unknown tokens, too long, more draft tokens than it verifies.
        """
        count, config = len(request.token_ids), self._config
        if count + request.max_tokens > config.max_tokens:
            raise InputError(
                f"{count} prompt tokens and {request.max_tokens} of an answer are more than this "
                f"pipeline's max_tokens of {config.max_tokens}; shorten one of them."
            )
        if len(request.draft_token_ids) > config.max_draft_len:
            raise InputError(
                f"The request proposes {len(request.draft_token_ids)} draft tokens; this "
                f"pipeline's target verifies at most {config.max_draft_len}."
            )
        known = self._manifest.target.vocab_size
        unknown = [t for t in (*request.token_ids, *request.draft_token_ids) if not 0 <= t < known]
        if unknown:
            raise InputError(f"The target knows the tokens 0 to {known - 1}, not {unknown[0]}.")
        handle = PipelineHandle(request)
        self._threads.submit(self._run, handle)
        return handle

    def shutdown(self) -> None:
        """Wait for the requests that have begun."""
        self._threads.shutdown(wait=True)

    def _run(self, handle: PipelineHandle) -> None:
        try:
            handle.finish(self._answer(handle))
        except BaseException as error:
            log.warning("a request failed", exc_info=True)
            handle.finish(error)

    def _answer(self, handle: PipelineHandle) -> PipelineAnswer:
        request = handle.request
        given: list[int] = []
        salt, status = self._hand_over(handle)
        deadline = Deadline.after(request.answer_seconds, handle.cancelled)
        try:
            for piece in self._pieces(handle, (), salt, deadline):
                given += piece.token_ids
                handle.push(piece)
                if piece.finish_reason is not None:
                    return PipelineAnswer(
                        tuple(given), piece.finish_reason, _as_found(status, piece)
                    )
        except CancelledError:
            return PipelineAnswer(tuple(given), "cancelled", status)
        except Exception as error:
            if salt is None or handle.cancelled.is_set() or not deadline.left:
                raise
            # The mapped KV may be what ailed; the target goes on from the tokens themselves.
            status = _fallback(
                len(request.token_ids),
                f"{type(error).__name__} after {len(given)} tokens on mapped KV: {error}",
            )
        else:
            raise UnavailableError("The target's answer ended without a reason; see its log.")
        return self._go_on(handle, tuple(given), status, deadline)

    def _go_on(
        self,
        handle: PipelineHandle,
        given: tuple[int, ...],
        status: HandoffStatus,
        deadline: Deadline,
    ) -> PipelineAnswer:
        """The rest of an answer, on the target's own KV."""
        whole = list(given)
        try:
            for piece in self._pieces(handle, given, None, deadline):
                whole += piece.token_ids
                handle.push(piece)
                if piece.finish_reason is not None:
                    return PipelineAnswer(tuple(whole), piece.finish_reason, status)
        except CancelledError:
            return PipelineAnswer(tuple(whole), "cancelled", status)
        raise UnavailableError("The target's answer ended without a reason; see its log.")

    def _pieces(
        self,
        handle: PipelineHandle,
        given: tuple[int, ...],
        salt: int | None,
        deadline: Deadline,
    ) -> Iterator[Piece]:
        request = handle.request
        if len(given) >= request.max_tokens:
            yield Piece((), "length")
            return
        yield from self._target.answer(
            (*request.token_ids, *given),
            request.max_tokens - len(given),
            request.end_id,
            () if given else request.draft_token_ids,
            salt,
            deadline,
        )

    # --- The hand-over ---

    def _hand_over(self, handle: PipelineHandle) -> tuple[int | None, HandoffStatus]:
        """The salt under which the target holds mapped KV; None when it holds none."""
        request, config = handle.request, self._config
        count = len(request.token_ids)
        plan = plan_handoff(
            count,
            first_tokens=0,
            repair_window=config.repair_window,
            tokens_per_block=config.tokens_per_block,
        )
        if not plan.mapped:
            return None, _fallback(count, "the prompt is too short to map")
        known = self._manifest.source.vocab_size
        tokens = request.token_ids[: plan.mapped.stop]
        if max(tokens) >= known:
            return None, HandoffStatus(
                "unsupported", f"the source knows only the tokens 0 to {known - 1}", count
            )
        deadline = Deadline.after(request.handoff_seconds, handle.cancelled)
        salt = self._salt(request)
        state: ContextState | None = None
        mapped: Mapped | None = None
        try:
            deadline.check("the hand-over")
            state = self._source.read(tokens, salt, deadline)
            mapped = self._relay.map(state, tokens, deadline)
            self._target.land(tokens, request.token_ids[len(tokens)], mapped.state, salt, deadline)
        except CancelledError:
            return None, _fallback(count, "the request was cancelled")
        except Exception as error:
            log.warning("a hand-over failed", exc_info=True)
            return None, _fallback(count, f"{type(error).__name__}: {error}")
        finally:
            if mapped is not None:
                self._relay.release(mapped)
            elif state is not None:
                self._source.forget(state)
        missed = min(config.first_tokens, len(tokens)) - mapped.sink
        return salt, HandoffStatus(
            "applied",
            "",
            count,
            sink=mapped.sink,
            mapped=len(tokens) - mapped.sink,
            sink_missed=max(missed, 0),
        )

    def _salt(self, request: PipelineRequest) -> int:
        """What the engines key their cached blocks with: 63 bits of the hand-over's salt."""
        handoff = uuid.uuid4().hex
        identity = HandoffIdentity(
            tenant=request.tenant,
            conversation=request.conversation or handoff,
            target=self._manifest.target.name,
            kvmap_digest=self._manifest.kvmap_digest,
            handoff=handoff,
        )
        return int(identity.salt[:16], 16) >> 1 or 1


def _fallback(count: int, reason: str) -> HandoffStatus:
    return HandoffStatus("fallback_reprefill", reason, count)


def _as_found(status: HandoffStatus, last: Piece) -> HandoffStatus:
    """``status``, corrected by what the target's engine says it found in its cache."""
    reused = last.reused_tokens
    if status.state != "applied" or reused is None or reused >= status.matched:
        return status
    if reused == 0:
        return _fallback(status.prompt, "the target's engine did not find the landed blocks")
    return replace(status, sink=min(status.sink, reused), mapped=max(reused - status.sink, 0))
