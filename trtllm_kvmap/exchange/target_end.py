"""The target's side of one exchange, as a state machine without input or output (see source_end).

Of the lease, the target uses the first half to read and leaves the second to reads that are under
way: it counts from before its Accept, the source from after it, so the target is always first to
stop, on whatever clocks. It says End when no read of its own is under way any more, and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from trtllm_kvmap.exchange.messages import MAX_DETAIL, Accept, Blocks, End, Message, Offer, Reason
from trtllm_kvmap.exchange.source_end import Send


@dataclass(frozen=True, slots=True)
class Read:
    """Read these blocks of the source, and check them; then say ``read_done`` or
    ``read_failed``.
    """

    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: Reason
    detail: str


class TargetState(Enum):
    WAITING = "waiting"
    READING = "reading"
    DRAINING = "draining"  # failed, with reads under way
    ENDED = "ended"


class TargetEnd:
    """One exchange, from the wait for its offer to ENDED.

    ``judge`` sees the offer and returns None to accept it. After ENDED, ``reason`` says how it
    ended; only COMPLETE means that every block is here and checked. ``reads`` > 0 then says that
    some transfer did not stop in time: its landing blocks must not be used again before the
    transport is closed.
    """

    def __init__(
        self,
        request_id: str,
        judge: Callable[[Offer], Refusal | None],
        *,
        now: float,
        wait_seconds: float,
    ) -> None:
        self.request_id = request_id
        self.state = TargetState.WAITING
        self.offer: Offer | None = None
        self.reason: Reason | None = None
        self.detail = ""
        self.reads = 0
        self._answer_to = request_id
        self._judge = judge
        self._until = self._patience = now + wait_seconds
        self._drained = 0.0  # when reads under way are given up
        self._asked = 0
        self._checked = 0
        self._seen: set[int] = set()

    def received(self, message: Message, now: float) -> list[Send | Read]:
        if self.state in (TargetState.DRAINING, TargetState.ENDED):
            return []
        if message.request_id != self.request_id:
            self._answer_to = message.request_id
            return self._stop(
                Reason.WRONG_REQUEST,
                f"{message.request_id} was offered, {self.request_id} is awaited",
                now,
            )
        if isinstance(message, End):
            detail = f"the source ended: {message.detail}"
            reason = message.reason
            if reason is Reason.COMPLETE:
                reason, detail = Reason.MALFORMED, "the source cannot complete an exchange"
            return self._stop(reason, detail, now)
        if isinstance(message, Offer) and self.state is TargetState.WAITING:
            return self._judged(message, now)
        if isinstance(message, Blocks) and self.state is TargetState.READING:
            return self._announced(message, now)
        return self.malformed(f"{type(message).__name__} came while {self.state.value}", now)

    def read_done(self, count: int, intact: bool, now: float) -> list[Send | Read]:
        """``count`` blocks have landed; ``intact``: their checksums fit."""
        self.reads -= 1
        if self.state is TargetState.DRAINING:
            return self._drain()
        if self.state is not TargetState.READING:
            return []
        if not intact:
            return self._stop(Reason.CORRUPTED, "a block's checksum does not fit", now)
        self._checked += count
        assert self.offer is not None
        if self._checked == self.offer.num_blocks:
            return self._stop(Reason.COMPLETE, "", now)
        return []

    def read_failed(self, detail: str, now: float) -> list[Send | Read]:
        self.reads -= 1
        if self.state is TargetState.DRAINING:
            return self._drain()
        return self._stop(Reason.TRANSFER_FAILED, detail, now)

    def malformed(self, detail: str, now: float) -> list[Send | Read]:
        return self._stop(Reason.MALFORMED, detail, now)

    def peer_lost(self, detail: str, now: float) -> list[Send | Read]:
        return self._stop(Reason.PEER_LOST, detail, now)

    def cancel(self, now: float) -> list[Send | Read]:
        return self._stop(Reason.CANCELLED, "the target's request was cancelled", now)

    def tick(self, now: float) -> list[Send | Read]:
        if self.state is TargetState.DRAINING and now >= self._drained:
            self.state = TargetState.ENDED  # without an End: the source waits for its lease
            return []
        if self.state in (TargetState.WAITING, TargetState.READING) and now >= self._until:
            what = "no offer came" if self.offer is None else "the blocks did not come"
            return self._stop(Reason.TIMEOUT, f"{what} in time", now)
        return []

    def _judged(self, offer: Offer, now: float) -> list[Send | Read]:
        self.offer = offer
        refusal = self._judge(offer)
        if refusal is not None:
            return self._stop(refusal.reason, refusal.detail, now)
        self.state = TargetState.READING
        lease = offer.lease_ms / 1000
        self._until, self._drained = min(self._patience, now + lease / 2), now + lease
        return [Send(Accept(self.request_id))]

    def _announced(self, message: Blocks, now: float) -> list[Send | Read]:
        assert self.offer is not None
        ids, count = set(message.block_ids), len(message.block_ids)
        wrong = (
            message.first != self._asked
            or message.first + count > self.offer.num_blocks
            or len(ids) != count
            or bool(ids & self._seen)
            or max(ids) >= self.offer.layout.num_blocks
        )
        if wrong:
            return self.malformed(
                f"{count} blocks from {message.first} on were announced, ids up to {max(ids)}; "
                f"block {self._asked} of {self.offer.num_blocks} is next, and each id of "
                f"{self.offer.layout.num_blocks} may come once",
                now,
            )
        self._asked += count
        self._seen |= ids
        self.reads += 1
        return [Read(message)]

    def _stop(self, reason: Reason, detail: str, now: float) -> list[Send | Read]:
        if self.state in (TargetState.DRAINING, TargetState.ENDED):
            return []
        self.reason, self.detail = reason, detail[:MAX_DETAIL]
        self.state = TargetState.DRAINING
        return self._drain()

    def _drain(self) -> list[Send | Read]:
        if self.reads:
            return []
        self.state = TargetState.ENDED
        assert self.reason is not None
        return [Send(End(self._answer_to, self.reason, self.detail))]
