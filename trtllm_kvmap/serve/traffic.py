"""Traffic counted where it is answered: in the target's process, which has what the source read.

Mapped requests are never read by the target, so no process has both models' caches of a prompt. A
prompt whose writer consents is therefore read by the target once more, when no answer is being made
and within a share of the time. The sums are written whenever a batch is full, and never else:
whatever is short of a batch when the server ends is forgotten.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.whole import require_writable
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.sent import SentKv
from trtllm_kvmap.calibrate.traffic import TrafficConfig, TrafficMoments
from trtllm_kvmap.models import RemoteModel
from trtllm_kvmap.serve.source import SourceRead
from trtllm_kvmap.serve.target import Event, Job, TargetAnswerer

log = logging.getLogger(__name__)

MAX_PENDING = 4  # prompts that wait, with the source's KV of each
# Nobody could ask this process for prompts held out: a new map is tried on others (promote).
CONFIG = TrafficConfig(consent=True, held_out_every=0, max_pending=MAX_PENDING)


class CountedAnswerer:
    """Answers as ``answerer`` does, and counts the prompts of jobs that may be counted. ``path`` is
    the file of this run, a new one in the ``folder``, written whole with every batch.

    Nothing here fails a request. The first error, wherever it comes from, is logged, and ends the
    counting.
    """

    def __init__(
        self,
        answerer: TargetAnswerer,
        folder: str | Path,
        max_share: float,
        config: TrafficConfig = CONFIG,
    ) -> None:
        self.answerer = answerer
        started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.path = Path(folder) / f"traffic-{started}-{secrets.token_hex(4)}.moments.safetensors"
        self._traffic: TrafficMoments | None = None
        self._stopped = False
        if answerer.kvmap is None:  # nothing is mapped either, and the answers say why
            return
        try:
            require_writable(self.path)  # now, not when the first batch is full
            self._traffic = TrafficMoments(
                _source_of(answerer.kvmap),
                answerer.loaded,
                replace(config, max_share=max_share),
                _columns_of(answerer.kvmap),
                after=self._after,
            )
        except Exception as error:
            self._stop(error)

    def answer(self, token_ids: list[int], job: Job, read: SourceRead | None) -> Iterator[Event]:
        """The events of ``answerer``; the last says what became of the prompt as traffic."""
        with self._answering():
            for event in self.answerer.answer(token_ids, job, read):
                if event.finish_reason and job.counted_as is not None:
                    event = replace(event, traffic=self._offer(token_ids, job, read, event))
                yield event

    def close(self) -> None:
        """Count no more."""
        if self._traffic is not None:
            self._traffic.close()

    def _answering(self) -> AbstractContextManager[None]:
        return nullcontext() if self._traffic is None else self._traffic.answering()

    def _offer(self, token_ids: list[int], job: Job, read: SourceRead | None, event: Event) -> str:
        if self._stopped:
            return "stopped"
        # What the map refused may be damaged; what its guard took back is what it has to learn.
        if self._traffic is None or read is None or event.outcome.reason not in ("", "guard"):
            return "not_mapped"
        if not job.counted_as:  # its turns, which repeat each other, would fill a batch alone
            return "unnamed"
        try:
            sent = SentKv(read.kv[0], read.kv[1], read.rope_length)
            return self._traffic.offer(token_ids, job.counted_as, sent)
        except Exception as error:
            self._stop(error)
            return "stopped"

    def _after(self, error: Exception | None) -> None:
        """On the thread that counts, after each prompt."""
        try:
            if error is not None:
                raise error
            if self._traffic is not None and self._traffic.batch_is_full:
                self._traffic.moments().save(self.path)
                log.info("wrote %s", self.path)
        except Exception as stopping:
            self._stop(stopping)

    def _stop(self, error: Exception) -> None:
        if not self._stopped:
            self._stopped = True
            log.error("traffic is not counted any more: %s", error, exc_info=error)
        if self._traffic is not None:
            self._traffic.stop()


def _columns_of(kvmap: KvMap) -> CalibrationConfig:
    """Those that the map was fitted from, so that these moments add to its own; where that was
    several files, weighed tokens, or is not said, keys and values together, from which any map can
    be fitted.
    """
    records = kvmap.fitted.get("moments", [])
    config = records[0].get("config") if len(records) == 1 else None
    if config is None or config.get("weighting", "uniform") != "uniform":
        return CalibrationConfig(joint=True)
    return CalibrationConfig(**{**config, "layers": tuple(config.get("layers", ()))})


def _source_of(kvmap: KvMap) -> RemoteModel:
    """What another model has written is not mapped here, and so not counted."""
    return RemoteModel(kvmap.source.name, kvmap.source, kvmap.source_fingerprint)
