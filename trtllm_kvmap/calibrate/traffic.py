"""Calibration from what a server reads anyway: moments grow in the background, text does not stay.

Nothing is counted before the operator has consented. A prompt that is taken is read by both models
on a thread of its own, added to the sums and forgotten; only sums leave, and only of many prompts,
because the sums of one prompt would tell its contents. One conversation of several is held out
instead: its token ids stay in this process, bounded in number, to judge a new map by, and are
written nowhere.
"""

from __future__ import annotations

import hashlib
import queue
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from trtllm_kvmap.artifact.moments import MomentPart, Moments, MomentSet
from trtllm_kvmap.calibrate.accumulate import PartSums
from trtllm_kvmap.calibrate.capture import capture_kv, token_table
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.parts import plan_parts
from trtllm_kvmap.errors import InputError, KvMapError
from trtllm_kvmap.models import LoadedModel, require_same_tokens

# What became of an offered prompt. Only `queued` and `held_out` keep its token ids for a while.
Taken = Literal["queued", "held_out", "no_consent", "unusable", "dropped"]


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
        default=50, metadata={"help": "prompts that must be counted before any sum leaves"}
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
    """The moments of one pair's traffic.

    ``lock`` is held while the models read: give the server's own when its models must not run on
    two threads. Close it (or use ``with``) to stop the thread. Raises MismatchError for models with
    different tokenizers, InputError for a calibration that weighs tokens (which would read on
    after every prompt).
    """

    def __init__(
        self,
        source: LoadedModel,
        target: LoadedModel,
        config: TrafficConfig,
        calibration: CalibrationConfig | None = None,
        *,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.config, self.calibration = config, calibration or CalibrationConfig(joint=True)
        if self.calibration.weighting != "uniform":
            raise InputError(
                f"Traffic is counted with weighting uniform only, got "
                f"{self.calibration.weighting!r}; choose uniform."
            )
        require_same_tokens(source, target)
        self._source, self._target = source, target
        plans = plan_parts(source.spec, target.spec, self.calibration)
        self._sums = [PartSums(plan) for plan in plans]
        self._models, self._adding = lock or nullcontext(), threading.Lock()
        self._salt = secrets.token_bytes(16)
        self._pending: queue.Queue[Sequence[int] | None] = queue.Queue(config.max_pending)
        self._held_out: deque[tuple[int, ...]] = deque(maxlen=config.max_held_out)
        self.documents = self.failed = 0
        self._thread: threading.Thread | None = None
        if config.consent:
            self._thread = threading.Thread(target=self._work, name="traffic", daemon=True)
            self._thread.start()

    def offer(self, token_ids: Sequence[int], conversation: str = "") -> Taken:
        """Offer the prompt ``token_ids``; returns at once, whatever becomes of it, and raises
        nothing. Of a long prompt the first window (max_tokens) is read.

        ``conversation`` names what the prompt belongs to: prompts of one conversation repeat each
        other, so they are all held out or all counted. Without it a prompt stands for itself.
        """
        if self._thread is None:
            return "no_consent"
        window = self.calibration.window(self._source.spec, self._target.spec)
        ids = tuple(token_ids[:window])
        known = min(self._source.spec.vocab_size, self._target.spec.vocab_size)
        if len(ids) < self.calibration.min_tokens or not 0 <= min(ids) <= max(ids) < known:
            return "unusable"
        if self._is_held_out(conversation, ids):
            self._held_out.append(ids)
            return "held_out"
        try:
            self._pending.put_nowait(ids)
        except queue.Full:
            return "dropped"
        return "queued"

    def drain(self) -> None:
        """Wait until every prompt that was queued has been counted."""
        self._pending.join()

    def moments(self) -> MomentSet:
        """A copy of the sums so far, with the target's token table and no sinks (a sink names the
        tokens that prompts begin with). The record has counts, and no digest of any text.

        Raises InputError below min_documents.
        """
        with self._adding:
            if self.documents < self.config.min_documents:
                raise InputError(
                    f"{self.documents} prompts have been counted; their moments stay here until "
                    f"there are {self.config.min_documents}, so that none can be read off them."
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
        return MomentSet(
            source=self._source.spec,
            target=self._target.spec,
            source_fingerprint=self._source.fingerprint,
            target_fingerprint=self._target.fingerprint,
            parts=parts,
            record=record,
            token_table=token_table(self._target),
        )

    def held_out(self) -> list[tuple[int, ...]]:
        """The prompts held out now, token ids, oldest first. They must not be stored."""
        return list(self._held_out)

    def close(self) -> None:
        """Count what is queued, stop the thread and forget the prompts held out."""
        if self._thread is not None:
            self._pending.put(None)
            self._thread.join()
            self._thread = None
        self._held_out.clear()

    def __enter__(self) -> TrafficMoments:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_held_out(self, conversation: str, ids: tuple[int, ...]) -> bool:
        # Salted: which side a text falls on says nothing to anyone outside this process.
        named = conversation.encode() or repr(ids).encode()
        digest = hashlib.blake2b(named, key=self._salt, digest_size=8).digest()
        return int.from_bytes(digest, "little") % self.config.held_out_every == 0

    def _work(self) -> None:
        while (token_ids := self._pending.get()) is not None:
            try:
                self._add(token_ids)
            except (
                KvMapError,
                RuntimeError,
            ):  # a prompt that cannot be read is no server's failure
                self.failed += 1
            finally:
                self._pending.task_done()
        self._pending.task_done()

    def _add(self, token_ids: Sequence[int]) -> None:
        ids = torch.tensor(token_ids)
        with self._models:
            kv = capture_kv(self._source, ids), capture_kv(self._target, ids)
        with self._adding:
            for part in self._sums:
                part.add(*kv, self.calibration.skip_first)
            self.documents += 1


def _copied(part: MomentPart) -> MomentPart:
    a, b, c, d, e = (tensor.clone() for tensor in part.moments.tensors())
    return replace(part, moments=Moments(a, b, c, d, e, part.moments.count))
