"""The source's side of one exchange, as a state machine without input or output.

Events come in as method calls with the time they happened at (seconds of any steady clock); every
call returns what to do. The one rule that everything serves: between the first Blocks message and
the target's End, the blocks are *leased* and not freed, unless the lease has run out. The target
stops reading well before that (see target_end), so a freed block is never read; and if it were, its
checksum would not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from trtllm_kvmap.exchange.messages import (
    MAX_DETAIL,
    Accept,
    Blocks,
    End,
    Message,
    Offer,
    Reason,
)


@dataclass(frozen=True, slots=True)
class Send:
    message: Message


@dataclass(frozen=True, slots=True)
class Free:
    """The blocks may be given back now. Said exactly once in an exchange."""


class SourceState(Enum):
    OFFERED = "offered"
    SENDING = "sending"
    DRAINING = "draining"  # over, but the target may still read: waiting for its End or the lease
    ENDED = "ended"


class SourceEnd:
    """One offer, from ``start`` to ENDED; then ``reason`` and ``detail`` say how it ended.

    ``answer_seconds``: how long the target may take to accept or refuse.
    """

    def __init__(self, offer: Offer, *, answer_seconds: float) -> None:
        self.offer = offer
        self.state = SourceState.OFFERED
        self.reason: Reason | None = None
        self.detail = ""
        self.announced = 0
        self._answer_seconds = answer_seconds
        self._until = float("inf")  # the answer's deadline, then the end of the lease

    def start(self, now: float) -> list[Send | Free]:
        self._until = now + self._answer_seconds
        return [Send(self.offer)]

    @property
    def wants_blocks(self) -> bool:
        """Whether more blocks should be announced."""
        return self.state is SourceState.SENDING and self.announced < self.offer.num_blocks

    def ready(self, block_ids: Sequence[int], checksums: Sequence[int]) -> list[Send | Free]:
        """The next blocks may be read; only while ``wants_blocks``."""
        first, self.announced = self.announced, self.announced + len(block_ids)
        blocks = Blocks(self.offer.request_id, first, tuple(block_ids), tuple(checksums))
        return [Send(blocks)]

    def received(self, message: Message, now: float) -> list[Send | Free]:
        if self.state is SourceState.ENDED:
            return []
        if message.request_id == self.offer.request_id:
            if isinstance(message, End):
                return self._target_ended(message)
            if self.state is SourceState.DRAINING:
                return []  # said before the target knew
            if isinstance(message, Accept) and self.state is SourceState.OFFERED:
                self.state, self._until = SourceState.SENDING, now + self.offer.lease_ms / 1000
                return []
        return self.malformed(
            f"{type(message).__name__} of {message.request_id} came while {self.state.value}", now
        )

    def malformed(self, detail: str, now: float) -> list[Send | Free]:
        """Something came that no peer of this protocol says."""
        return self._stop(Reason.MALFORMED, detail, now)

    def peer_lost(self, detail: str, now: float) -> list[Send | Free]:
        return self._stop(Reason.PEER_LOST, detail, now, reachable=False)

    def cancel(self, now: float) -> list[Send | Free]:
        return self._stop(Reason.CANCELLED, "the source's request was cancelled", now)

    def tick(self, now: float) -> list[Send | Free]:
        """Time passes; call it at least as often as deadlines matter."""
        if self.state is SourceState.ENDED or now < self._until:
            return []
        if self.state is SourceState.OFFERED:
            return self._stop(Reason.TIMEOUT, "the target did not answer the offer", now)
        actions = self._stop(Reason.TIMEOUT, "the lease ran out before the target's end", now)
        return [*actions, *self._end()]

    def _target_ended(self, message: End) -> list[Send | Free]:
        if self.reason is None:
            self.reason, self.detail = message.reason, message.detail
            if message.reason is Reason.COMPLETE and self.announced < self.offer.num_blocks:
                self.reason, self.detail = Reason.MALFORMED, "complete before all blocks were there"
        return self._end()

    def _stop(
        self, reason: Reason, detail: str, now: float, *, reachable: bool = True
    ) -> list[Send | Free]:
        if self.state in (SourceState.DRAINING, SourceState.ENDED):
            return []
        self.reason, self.detail = reason, detail[:MAX_DETAIL]
        end = [Send(End(self.offer.request_id, reason, self.detail))] if reachable else []
        if self.announced == 0:  # the target does not know of a single block
            return [*end, *self._end()]
        self.state = SourceState.DRAINING
        return [*end]

    def _end(self) -> list[Send | Free]:
        if self.state is SourceState.ENDED:
            return []
        self.state = SourceState.ENDED
        return [Free()]
