"""The target's half: it maps what the source read, or reads the prompt itself, and answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import Handoff, KvBridge
from trtllm_kvmap.decode.generate import stream_tokens
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.decode.guard.guarded import Guarded, hand_over_guarded
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError, KvMapError, MismatchError, NumericsError, UnprovenError
from trtllm_kvmap.exchange.offer import token_digest
from trtllm_kvmap.inject.hf_cache import (
    HfCache,
    Pass,
    make_cache,
    put_span,
    record_pass,
)
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.serve.outcome import Outcome
from trtllm_kvmap.serve.source import SourceRead
from trtllm_kvmap.serve.token_text import TokenText
from trtllm_kvmap.spec.plan import plan_handoff

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """What the target is asked to do with a prompt's token ids. ``outcome`` says why nothing was
    read for it, where that is so. ``counted_as`` names the conversation that the prompt may be
    counted as part of, empty where it has no name; None: nobody has agreed.
    """

    max_tokens: int
    stop: tuple[str, ...] = ()
    stream: bool = False
    first_tokens: int = 1
    repair_window: int = 32
    outcome: Outcome | None = None
    counted_as: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Job:
        outcome = entry["outcome"]
        entry = {**entry, "stop": tuple(entry["stop"])}
        return Job(**{**entry, "outcome": None if outcome is None else Outcome(**outcome)})


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of an answer. The last one has a ``finish_reason`` (stop or length) and the counts:
    prompt, completion, mapped and repaired tokens, milliseconds, bytes of source KV received, and
    what became of the prompt as ``traffic`` (serve.traffic; empty: it was not to be counted).
    """

    text: str
    outcome: Outcome
    finish_reason: str | None = None
    tokens: dict[str, int] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)
    bytes_moved: int = 0
    traffic: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Event:
        return Event(**{**entry, "outcome": Outcome(**entry["outcome"])})


class TargetAnswerer:
    """Answers with one model. No answer depends on the map: without one, with one that was fitted
    for other models, when a hand-over fails or the map's guard takes it back, the model reads the
    prompt itself and says why.
    """

    def __init__(
        self, loaded: LoadedModel, kvmap: str | Path, *, allow_unproven: bool = False
    ) -> None:
        self.loaded = loaded
        self.kvmap: KvMap | None = None
        self.guard: Guard | None = None
        self.without = Outcome("applied")  # what every request ends with when there is no map
        self._bridge: KvBridge | None = None
        tokenizer: Any = loaded.tokenizer
        if tokenizer is None:
            raise InputError(f"{loaded.name} has no tokenizer, so it cannot answer with text.")
        self._eos = {tokenizer.eos_token_id} - {None}
        try:
            opened = KvMap.load(kvmap, allow_unproven=allow_unproven)
            opened.target_fingerprint.require(loaded.fingerprint, "target")
            self.guard = None if opened.guard is None else Guard.from_json(opened.guard)
            self.kvmap = opened
        except UnprovenError as error:
            self.without = Outcome("unsupported", "unproven", str(error))
        except MismatchError as error:
            self.without = Outcome("unsupported", "mismatch", str(error))
        except KvMapError as error:
            self.without = Outcome("unsupported", "unreadable_map", str(error))

    def answer(self, token_ids: list[int], job: Job, read: SourceRead | None) -> Iterator[Event]:
        """The answer as events, one per piece of text when ``job.stream``, else one in all.

        Raises InputError before the first event when the model cannot read the prompt.
        """
        began = time.perf_counter()
        outcome, handoff = self._hand_over(token_ids, job, read)
        milliseconds = {}
        mapped = repaired = 0
        if handoff is None:
            own = prefill(self.loaded, token_ids, logits_to_keep=1)
            cache, logits = own.cache, own.logits[-1]
        else:
            cache, logits = handoff.cache, handoff.logits
        if handoff is not None and outcome.status == "applied":
            mapped, repaired = len(handoff.plan.mapped), len(handoff.plan.repaired)
            milliseconds = {step: 1e3 * handoff.seconds[step] for step in ("map", "repair")}
        milliseconds["first_token"] = 1e3 * (time.perf_counter() - began)
        text = TokenText(self.loaded.tokenizer, job.stop)
        whole, count, ended = "", 0, False
        for token in stream_tokens(
            self.loaded, cache, logits, job.max_tokens, eos_token_ids=self._eos
        ):
            count, ended = count + 1, token in self._eos
            if ended:
                break
            piece = text.push(token)
            if text.stopped:
                whole += piece
                break
            if piece and job.stream:
                yield Event(piece, outcome)
            elif piece:
                whole += piece
        whole += text.finish()
        yield Event(
            whole,
            outcome,
            finish_reason="stop" if ended or text.stopped else "length",
            tokens={
                "prompt": len(token_ids),
                "completion": count,
                "mapped": mapped,
                "repaired": repaired,
            },
            milliseconds=milliseconds,
            bytes_moved=0 if read is None else read.kv.nbytes,
        )

    def _hand_over(
        self, token_ids: list[int], job: Job, read: SourceRead | None
    ) -> tuple[Outcome, Handoff | None]:
        if self.kvmap is None:
            return self.without, None
        if read is None:
            nothing = Outcome("fallback_reprefill", "not_read", "no source read this prompt")
            return job.outcome or nothing, None
        plan = plan_handoff(
            len(token_ids), first_tokens=job.first_tokens, repair_window=job.repair_window
        )
        try:
            bridge = self._bridge_from(self.kvmap, read)
        except MismatchError as error:
            return Outcome("unsupported", "mismatch", str(error)), None
        if self.guard is not None and read.losses is None:
            detail = (
                "the map carries a guard, and the source sent no losses for it to weigh; start "
                "the pipeline again, which asks for them where it finds a guard in the map"
            )
            return Outcome("fallback_reprefill", "not_judged", detail), None
        try:
            made = hand_over_guarded(
                bridge,
                self.guard,
                _as_cache(read, token_ids),
                token_ids,
                plan,
                source_losses=read.losses,
            )
            if not bool(torch.isfinite(made.handoff.logits).all()):
                raise NumericsError("The target computed NaN or infinity on the mapped cache.")
        except Exception as error:
            # Whatever went wrong, the target still has the prompt.
            log.warning("a hand-over failed", exc_info=True)
            return Outcome("fallback_reprefill", "hand_over_failed", str(error)), None
        return _outcome_of(made), made.handoff

    def _bridge_from(self, kvmap: KvMap, read: SourceRead) -> KvBridge:
        """The bridge from whoever wrote ``read``, made anew only when that is another model."""
        if self._bridge is None or self._bridge.source != read.model:
            self._bridge = KvBridge(kvmap, source=read.model, target=self.loaded)
        return self._bridge


def _outcome_of(made: Guarded) -> Outcome:
    if made.status == "applied":
        return Outcome("applied")
    return Outcome("fallback_reprefill", "guard", made.reason)


def _as_cache(read: SourceRead, token_ids: list[int]) -> HfCache:
    """Raises MismatchError for the KV of other tokens: a server may hand on the late answer to an
    earlier question as the answer to this one.
    """
    count = read.kv.shape[3]
    if read.token_digest != token_digest(token_ids[:count]):
        raise MismatchError("The source sent the keys and values of another prompt.")
    cache = make_cache(read.model.spec, count, dtype=read.kv.dtype)
    keys, values = (tuple(layer[None] for layer in field) for field in read.kv)
    put_span(cache, 0, KvPool(keys, values))
    record_pass(cache, Pass(0, count, read.rope_length))
    return cache
