"""Sums of traffic, and when they may leave: in batches of many different conversations only."""

from __future__ import annotations

import threading
from dataclasses import asdict, replace

from trtllm_kvmap.artifact.moments import MomentPart, Moments, MomentSet
from trtllm_kvmap.artifact.native import TokenTable
from trtllm_kvmap.calibrate.accumulate import PartSums
from trtllm_kvmap.calibrate.capture import CapturedKv
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.parts import plan_parts
from trtllm_kvmap.errors import InputError, UnavailableError
from trtllm_kvmap.models import KnownModel

Marks = frozenset[bytes]  # what a prompt is known again by: salted digests of its name and tokens


class BatchedSums:
    """The running sums of one pair's prompts, of which ``documents`` have been added. Any thread
    may ask.

    ``table`` is the target's token table, which goes with the moments. ``torn``: a prompt was added
    half way (memory ran out); the sums are good for nothing more.
    """

    def __init__(
        self,
        source: KnownModel,
        target: KnownModel,
        calibration: CalibrationConfig,
        min_documents: int,
        table: TokenTable | None,
    ) -> None:
        self.source, self.target, self.calibration = source, target, calibration
        self.min_documents, self.table = min_documents, table
        self.documents, self.torn = 0, False
        self.parts = [PartSums(p) for p in plan_parts(source.spec, target.spec, calibration)]
        self._holding = threading.Lock()
        self._batch: set[bytes] = set()  # the marks of what was added since sums last left
        self._fresh = 0  # how many conversations that were

    def has(self, marks: Marks) -> bool:
        """Whether this batch has a prompt of the same name or the same tokens. Never waits."""
        return bool(marks & self._batch)

    @property
    def full(self) -> bool:
        """Whether moments() gives a batch now."""
        return self._fresh >= self.min_documents

    def add(self, marks: Marks, source: CapturedKv, target: CapturedKv) -> None:
        """Add a prompt that the batch has not."""
        with self._holding:
            self.torn = True
            for part in self.parts:
                part.add(source, target, self.calibration.skip_first)
            self.torn = False
            self._batch |= marks
            self._fresh += 1
            self.documents += 1

    def moments(self) -> MomentSet:
        """As TrafficMoments.moments."""
        with self._holding:
            if self.torn:
                raise UnavailableError(
                    "A prompt could be added to some of the sums only, so they are not given out; "
                    "make more memory free, and count anew."
                )
            if not self.full:
                raise InputError(
                    f"{self._fresh} different conversations have been counted since moments last "
                    f"left; there must be {self.min_documents}, so that none can be read off them. "
                    f"Wait for more traffic."
                )
            parts = tuple(_copied(sums.part()) for sums in self.parts)
            settings = {**asdict(self.calibration), "layers": list(self.calibration.layers)}
            settings.pop("checkpoint_every")
            record = {
                "config": settings,
                "text": [],
                "documents": self.documents,
                "tokens": self.parts[0].count,
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
            token_table=self.table,
        )


def _copied(part: MomentPart) -> MomentPart:
    a, b, c, d, e = (tensor.clone() for tensor in part.moments.tensors())
    return replace(part, moments=Moments(a, b, c, d, e, part.moments.count))
