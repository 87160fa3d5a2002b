"""Calibration from what a server reads anyway: moments grow in the background, text does not stay.

Nothing is counted before the operator has consented. A prompt that is taken is read by both models
on a thread of its own, added to the sums and forgotten (by the target alone where the source runs
elsewhere and has sent what it read); while an answer is being made the thread stands still. Only
sums leave, and only of many conversations at once (batches.py), because the sums of one would tell
its contents. One conversation of several is held out instead: its token ids stay in this process,
bounded in number, to judge a new map by, and are written nowhere.
"""

from __future__ import annotations

import atexit
import hashlib
import operator
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.calibrate.batches import BatchedSums, Marks
from trtllm_kvmap.calibrate.capture import CapturedKv, captured, read, token_table
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.quiet import Quiet
from trtllm_kvmap.calibrate.sent import SentKv
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.models import KnownModel, LoadedModel, require_same_tokens
from trtllm_kvmap.spec.model import ModelSpec

# What became of an offered prompt. Only `queued` and `held_out` keep its token ids for a while.
Taken = Literal["queued", "held_out", "repeated", "no_consent", "unusable", "dropped"]
# Their rotary embedding is changed by every pass: two at a time would disturb an answer.
CHANGING_ROPES = ("dynamic", "longrope")


def require_steady_rope(*specs: ModelSpec) -> None:
    """Raise InputError for a model whose rotary embedding changes with what it reads."""
    for spec in specs:
        if spec.rope.kind in CHANGING_ROPES:
            raise InputError(
                f"{spec.name} has RoPE of the kind {spec.rope.kind}, which a pass in the "
                f"background would change under an answer; calibrate on text instead."
            )


class Waiting(NamedTuple):
    """A prompt that is to be counted."""

    marks: Marks
    token_ids: tuple[int, ...]
    sent: SentKv | None


@dataclass(frozen=True, slots=True)
class TrafficConfig:
    """Whether traffic is counted, and how much of it is kept at any time."""

    consent: bool = field(
        default=False, metadata={"help": "count traffic: whoever writes it must have agreed"}
    )
    held_out_every: int = field(
        default=4,
        metadata={"help": "one of so many conversations is held out, and not counted; 0: none"},
    )
    max_held_out: int = field(
        default=64, metadata={"help": "prompts held out at a time; the oldest goes first"}
    )
    max_pending: int = field(
        default=16, metadata={"help": "prompts waiting at a time; further ones are dropped"}
    )
    min_documents: int = field(
        default=50,
        metadata={"help": "different conversations that must be counted before any sum leaves"},
    )
    max_share: float = field(
        default=1.0, metadata={"help": "of the time, at most so much is spent counting"}
    )

    def __post_init__(self) -> None:
        if self.held_out_every < 0 or self.held_out_every == 1:
            raise InputError(
                f"held_out_every must be 0 (none) or at least 2, got {self.held_out_every}."
            )
        if not 0 < self.max_share <= 1:
            raise InputError(f"max_share must lie above 0 and be at most 1, got {self.max_share}.")
        for name, least in (
            ("max_held_out", 1),
            ("max_pending", 1),
            ("min_documents", 2),
        ):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, got {getattr(self, name)}.")


class TrafficMoments:
    """The moments of one pair's traffic. Close it (or use ``with``) to stop the thread; what is
    still open when the process ends is closed then.

    ``failed`` prompts could not be read. A ``source`` that another process holds needs what it sent
    with every offer. ``after`` is called on the thread that counts, after each prompt, with what
    went wrong with it or None; it must raise nothing.

    Raises MismatchError for models with different tokenizers, InputError for a calibration that
    weighs tokens (which would read on after every prompt) and for a model whose rotary embedding
    changes with what it reads.
    """

    def __init__(
        self,
        source: KnownModel,
        target: LoadedModel,
        config: TrafficConfig,
        calibration: CalibrationConfig | None = None,
        after: Callable[[Exception | None], None] = lambda error: None,
    ) -> None:
        self.config, self.calibration = config, calibration or CalibrationConfig(joint=True)
        if self.calibration.weighting != "uniform":
            raise InputError(
                f"Traffic is counted with weighting uniform only, got "
                f"{self.calibration.weighting!r}; choose uniform."
            )
        require_steady_rope(source.spec, target.spec)
        require_same_tokens(source, target)
        self.source, self.target = source, target
        self._salt = secrets.token_bytes(16)
        self._pending: queue.Queue[Waiting | None] = queue.Queue(config.max_pending)
        self._held_out: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._holding = threading.Lock()
        # Made here, once: its pass over every token id could not stand still.
        table = token_table(target) if config.consent else None
        self._sums = BatchedSums(source, target, self.calibration, config.min_documents, table)
        self.failed, self._after = 0, after
        self._quiet, self._closing = Quiet(), False
        self._thread: threading.Thread | None = None
        if config.consent:
            self._thread = threading.Thread(target=self._work, name="traffic", daemon=True)
            self._thread.start()
            # A thread that the interpreter leaves behind inside torch ends the process by abort.
            atexit.register(self.close)

    def offer(
        self, token_ids: Sequence[int], conversation: str = "", sent: SentKv | None = None
    ) -> Taken:
        """Offer the prompt ``token_ids``; returns at once, whatever becomes of it, and raises
        nothing. Of a long prompt the first window (max_tokens) is read. ``sent`` is what a source
        elsewhere has read of it: no more is counted, and as much is copied.

        ``conversation`` names what the prompt belongs to; without it a prompt stands for itself.
        Prompts of one conversation repeat each other, so they are all held out (the latest is kept)
        or all counted, and those of one name, or of the same tokens, only once until sums leave.
        """
        if self._thread is None:
            return "no_consent"
        window = self.calibration.window(self.source.spec, self.target.spec)
        if sent is not None:
            if not sent.is_of(self.source):
                return "unusable"
            window = min(window, sent.num_tokens)
        elif not isinstance(self.source, LoadedModel):
            return "unusable"
        known = min(self.source.spec.vocab_size, self.target.spec.vocab_size)
        try:
            ids = tuple(map(operator.index, token_ids[:window]))
        except Exception:  # whatever a request brings along
            return "unusable"
        if len(ids) < self.calibration.min_tokens or not 0 <= min(ids) <= max(ids) < known:
            return "unusable"
        tokens = self._mark(repr(ids))
        name = self._mark(str(conversation)) if conversation else tokens
        # Salted: which side a text falls on says nothing to anyone outside this process.
        every = self.config.held_out_every
        if every and int.from_bytes(name, "little") % every == 0:
            with self._holding:
                if self._closing:
                    return "no_consent"
                self._held_out[name] = ids
                self._held_out.move_to_end(name)
                if len(self._held_out) > self.config.max_held_out:
                    self._held_out.popitem(last=False)
            return "held_out"
        marks = frozenset((name, tokens))
        if self._sums.has(marks):
            return "repeated"
        with self._holding:
            if self._closing:  # nothing may wait for a thread that has ended
                return "no_consent"
            if self._pending.full():  # before anything is copied
                return "dropped"
            self._pending.put_nowait(Waiting(marks, ids, sent and sent.kept(len(ids))))
        return "queued"

    def answering(self) -> AbstractContextManager[None]:
        """While such a block is open, on any thread, counting stands still. Opening one never
        waits: what is being read at that moment stops at the model's next layer. (Only the sums of
        a document that both models have read are finished; those are made on the CPU.)
        """
        return self._quiet.answering()

    def drain(self) -> None:
        """Wait until every prompt that was queued has been counted.

        Raises InputError inside a block of answering() that this thread opened: counting stands
        still until that ends.
        """
        if self._quiet.asked_for_here:
            raise InputError(
                "drain() was called while this thread makes an answer, which counting waits for; "
                "it would never return. Call it after the answer."
            )
        self._pending.join()

    @property
    def documents(self) -> int:
        """How many prompts have been counted."""
        return self._sums.documents

    @property
    def batch_is_full(self) -> bool:
        """Whether moments() gives sums now."""
        return self._sums.full

    def moments(self) -> MomentSet:
        """A copy of the sums so far, with the target's token table and no sinks (a sink names the
        tokens that prompts begin with). The record has counts, and no digest of any text.

        Sums leave in batches: of at least min_documents different conversations, and again when as
        many have been counted since, each adding one prompt to a batch. So nobody who has the sums,
        or two of them in a row, can subtract their way to the gram of one prompt. It does not
        protect from someone who wrote the rest of a batch himself (subtract what is known), nor
        where one person's conversations bear different names and tokens, and it is no differential
        privacy: treat the file as you treat a model trained on the text.

        Raises InputError before a batch is full, UnavailableError when adding a prompt failed half
        way (memory ran out): nothing is counted or given out from then on.
        """
        return self._sums.moments()

    def held_out(self) -> list[tuple[int, ...]]:
        """The prompts held out now, token ids, oldest first. They must not be stored."""
        with self._holding:
            return list(self._held_out.values())

    def stop(self) -> None:
        """Take nothing more; forget the prompts that wait and those held out. Never waits."""
        with self._holding:
            self._closing = True
            self._held_out.clear()
        self._quiet.end()

    def close(self) -> None:
        """stop(), and end the thread when it has counted what it is reading."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self.stop()
        self._pending.put(None)
        thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> TrafficMoments:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mark(self, text: str) -> bytes:
        encoded = text.encode(errors="surrogatepass")
        return hashlib.blake2b(encoded, key=self._salt, digest_size=8).digest()

    def _work(self) -> None:
        while (waiting := self._pending.get()) is not None:
            began, stood_still = time.monotonic(), self._quiet.stood_still
            try:
                if not self._closing:
                    self._count(waiting)
            finally:
                self._pending.task_done()
            worked = time.monotonic() - began - (self._quiet.stood_still - stood_still)
            self._quiet.rest(worked * (1 / self.config.max_share - 1))
        self._pending.task_done()

    def _count(self, waiting: Waiting) -> None:
        error: Exception | None = None
        try:
            self._add(waiting)
        except Exception as caught:  # a prompt that cannot be read is no server's failure
            error = caught
            self.failed += 1
        self._after(error)

    def _add(self, waiting: Waiting) -> None:
        marks, token_ids, sent = waiting
        if self._sums.torn or self._sums.has(marks):  # the latter: it waited beside one of its own
            return
        if sent is not None:
            source = sent.content(self.source)
        else:
            assert isinstance(self.source, LoadedModel), "offer() saw to it"
            source = self._read(self.source, token_ids)
        target = self._read(self.target, token_ids)
        self._quiet.wait()
        self._sums.add(marks, source, target)

    def _read(self, loaded: LoadedModel, token_ids: tuple[int, ...]) -> CapturedKv:
        self._quiet.wait()
        return captured(loaded, read(loaded, torch.tensor(token_ids), self._quiet.wait))
