"""Calibration from what a server reads anyway: moments grow in the background, text does not stay.

Nothing is counted before the operator has consented. A prompt that is taken is read by both models
on a thread of its own, added to the sums and forgotten; while an answer is being made the thread
stands still. Only sums leave, and only of many conversations at once, because the sums of one would
tell its contents. One conversation of several is held out instead: its token ids stay in this
process, bounded in number, to judge a new map by, and are written nowhere.
"""

from __future__ import annotations

import atexit
import hashlib
import operator
import queue
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import torch

from trtllm_kvmap.artifact.moments import MomentPart, Moments, MomentSet
from trtllm_kvmap.calibrate.accumulate import PartSums
from trtllm_kvmap.calibrate.capture import CapturedKv, captured, read, token_table
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.parts import plan_parts
from trtllm_kvmap.calibrate.quiet import Quiet
from trtllm_kvmap.errors import InputError, UnavailableError
from trtllm_kvmap.models import LoadedModel, require_same_tokens

# What became of an offered prompt. Only `queued` and `held_out` keep its token ids for a while.
Taken = Literal["queued", "held_out", "repeated", "no_consent", "unusable", "dropped"]
Marks = frozenset[bytes]  # what a prompt is known again by: salted digests of its name and tokens
# Their rotary embedding is changed by every pass: two at a time would disturb an answer.
CHANGING_ROPES = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class TrafficConfig:
    """Whether traffic is counted, and how much of it is kept at any time."""

    consent: bool = field(
        default=False, metadata={"help": "count traffic: whoever writes it must have agreed"}
    )
    held_out_every: int = field(
        default=4, metadata={"help": "one of so many conversations is held out, and not counted"}
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

    def __post_init__(self) -> None:
        for name, least in (
            ("held_out_every", 2),
            ("max_held_out", 1),
            ("max_pending", 1),
            ("min_documents", 2),
        ):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, got {getattr(self, name)}.")


class TrafficMoments:
    """The moments of one pair's traffic. Close it (or use ``with``) to stop the thread; what is
    still open when the process ends is closed then.

    ``documents`` prompts have been counted, ``failed`` could not be read.

    Raises MismatchError for models with different tokenizers, InputError for a calibration that
    weighs tokens (which would read on after every prompt) and for a model whose rotary embedding
    changes with what it reads.
    """

    def __init__(
        self,
        source: LoadedModel,
        target: LoadedModel,
        config: TrafficConfig,
        calibration: CalibrationConfig | None = None,
    ) -> None:
        self.config, self.calibration = config, calibration or CalibrationConfig(joint=True)
        if self.calibration.weighting != "uniform":
            raise InputError(
                f"Traffic is counted with weighting uniform only, got "
                f"{self.calibration.weighting!r}; choose uniform."
            )
        for loaded in (source, target):
            if loaded.spec.rope.kind in CHANGING_ROPES:
                raise InputError(
                    f"{loaded.name} has RoPE of the kind {loaded.spec.rope.kind}, which a pass in "
                    f"the background would change under an answer; calibrate on text instead."
                )
        require_same_tokens(source, target)
        self.source, self.target = source, target
        self._sums = [PartSums(p) for p in plan_parts(source.spec, target.spec, self.calibration)]
        self._salt = secrets.token_bytes(16)
        self._pending: queue.Queue[tuple[Marks, tuple[int, ...]] | None] = queue.Queue(
            config.max_pending
        )
        self._held_out: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self.documents = self.failed = 0
        # The sums are held while a prompt is added to them, so an offer never asks for them.
        self._adding, self._holding = threading.Lock(), threading.Lock()
        self._batch: set[bytes] = set()  # the marks of what was counted since sums last left
        self._fresh = 0  # how many conversations that were
        self._torn = False  # a prompt is in some of the sums and not in others
        self._quiet, self._closing = Quiet(), False
        self._thread: threading.Thread | None = None
        if config.consent:
            self._thread = threading.Thread(target=self._work, name="traffic", daemon=True)
            self._thread.start()
            # A thread that the interpreter leaves behind inside torch ends the process by abort.
            atexit.register(self.close)

    def offer(self, token_ids: Sequence[int], conversation: str = "") -> Taken:
        """Offer the prompt ``token_ids``; returns at once, whatever becomes of it, and raises
        nothing. Of a long prompt the first window (max_tokens) is read.

        ``conversation`` names what the prompt belongs to; without it a prompt stands for itself.
        Prompts of one conversation repeat each other, so they are all held out (the latest is kept)
        or all counted, and those of one name, or of the same tokens, only once until sums leave.
        """
        if self._thread is None:
            return "no_consent"
        window = self.calibration.window(self.source.spec, self.target.spec)
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
        if int.from_bytes(name, "little") % self.config.held_out_every == 0:
            with self._holding:
                if self._closing:
                    return "no_consent"
                self._held_out[name] = ids
                self._held_out.move_to_end(name)
                if len(self._held_out) > self.config.max_held_out:
                    self._held_out.popitem(last=False)
            return "held_out"
        marks = frozenset((name, tokens))
        if marks & self._batch:
            return "repeated"
        with self._holding:
            if self._closing:  # nothing may wait for a thread that has ended
                return "no_consent"
            try:
                self._pending.put_nowait((marks, ids))
            except queue.Full:
                return "dropped"
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
        with self._adding:
            if self._torn:
                raise UnavailableError(
                    "A prompt could be added to some of the sums only, so they are not given out; "
                    "make more memory free, and count anew."
                )
            if self._fresh < self.config.min_documents:
                raise InputError(
                    f"{self._fresh} different conversations have been counted since moments last "
                    f"left; there must be {self.config.min_documents}, so that none can be read "
                    f"off them. Wait for more traffic."
                )
            parts = tuple(_copied(sums.part()) for sums in self._sums)
            settings = {**asdict(self.calibration), "layers": list(self.calibration.layers)}
            settings.pop("checkpoint_every")
            record = {
                "config": settings,
                "text": [],
                "documents": self.documents,
                "tokens": self._sums[0].count,
            }
            self._batch.clear()
            self._fresh = 0
        return MomentSet(
            source=self.source.spec,
            target=self.target.spec,
            source_fingerprint=self.source.fingerprint,
            target_fingerprint=self.target.fingerprint,
            parts=parts,
            record=record,
            token_table=token_table(self.target),
        )

    def held_out(self) -> list[tuple[int, ...]]:
        """The prompts held out now, token ids, oldest first. They must not be stored."""
        with self._holding:
            return list(self._held_out.values())

    def close(self) -> None:
        """Stop the thread when it has counted what it is reading; forget the prompts that wait and
        those held out.
        """
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        with self._holding:
            self._closing = True
            self._held_out.clear()
        self._quiet.end()
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
        while (taken := self._pending.get()) is not None:
            try:
                if not self._closing:
                    self._count(*taken)
            except Exception:  # a prompt that cannot be read is no server's failure
                self.failed += 1
            finally:
                self._pending.task_done()
        self._pending.task_done()

    def _count(self, marks: Marks, token_ids: tuple[int, ...]) -> None:
        if self._torn or marks & self._batch:  # the latter: it waited beside one of its own
            return
        kv = self._read(self.source, token_ids), self._read(self.target, token_ids)
        self._quiet.wait()
        with self._adding:
            self._torn = True
            for part in self._sums:
                part.add(*kv, self.calibration.skip_first)
            self._torn = False
            self._batch |= marks
            self._fresh += 1
            self.documents += 1

    def _read(self, loaded: LoadedModel, token_ids: tuple[int, ...]) -> CapturedKv:
        self._quiet.wait()
        return captured(loaded, read(loaded, torch.tensor(token_ids), self._quiet.wait))


def _copied(part: MomentPart) -> MomentPart:
    a, b, c, d, e = (tensor.clone() for tensor in part.moments.tensors())
    return replace(part, moments=Moments(a, b, c, d, e, part.moments.count))
