"""A prefix cache that knows the truth about every block: what the scheduler's record is held to."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.inject.connector.blocks import Offer
from trtllm_kvmap.inject.connector.identity import HandoffIdentity
from trtllm_kvmap.inject.connector.orders import FailedLoad, LoadOrder
from trtllm_kvmap.inject.connector.scheduler import HandoffScheduler, RequestView
from trtllm_kvmap.inject.connector.status import HandoffStatus

SIZE = 4
SOURCE = Fingerprint("config", "weights", "tokenizer")


def identity(handoff: str = "1", **changes: str) -> HandoffIdentity:
    names = {"tenant": "t", "conversation": "c", "target": "m", "kvmap_digest": "digest"}
    return HandoffIdentity(**{**names, "handoff": handoff, **changes})


class Offers:
    """SourceBlocks for a scheduler alone: nothing is ever fetched."""

    def __init__(self) -> None:
        self.held: dict[str, Offer] = {}

    def put(self, offer: Offer) -> str:
        self.held[offer.identity.salt] = offer
        return offer.identity.salt

    def find(self, salt: str) -> Offer | None:
        return self.held.get(salt)

    def fetch(self, salt: str) -> object:
        raise AssertionError("a scheduler moves nothing")

    def done(self, salt: str) -> None:
        self.held.pop(salt, None)

    def salts(self) -> tuple[str, ...]:
        return tuple(self.held)


@dataclass
class Served:
    """How one request went: what it was offered, the loads, and its last status."""

    matched: int
    orders: list[LoadOrder]
    status: HandoffStatus | None


@dataclass
class TrueEngine:
    """Runs requests one after another. ``blocks`` maps (salt, tokens up to a block's end) to
    whether that block is exact: every token before it and in it was computed by the target, or is
    its own KV.
    """

    scheduler: HandoffScheduler
    blocks: dict[tuple[str | None, tuple[int, ...]], bool] = field(default_factory=dict)

    def hits(self, salt: str | None, tokens: tuple[int, ...]) -> tuple[int, int]:
        """(tokens in the cache, how many of them are exact in truth)."""
        count = exact = 0
        for end in range(SIZE, len(tokens), SIZE):  # the last token is never looked up
            if (salt, tokens[:end]) not in self.blocks:
                break
            count = end
            if self.blocks[salt, tokens[:end]]:
                exact = end
        return count, exact

    def serve(
        self,
        request: RequestView,
        answer: tuple[int, ...] = (),
        *,
        fail: bool = False,
        keep_old: bool = False,
        chunk: int = 100,
        preempt: bool = False,
    ) -> Served:
        """``fail``: the loads fail; ``keep_old``: a block that is cached already is not replaced;
        ``chunk``: blocks that come at once; ``preempt``: everything is taken away once.
        """
        prompt = tuple(request.token_ids)
        count, exact = self.hits(request.salt, prompt)
        matched = self.scheduler.match(request, count)
        needed = -(-len(prompt) // SIZE)
        orders: list[LoadOrder] = []
        for attempt in range(2 if preempt else 1):
            if attempt:
                matched = self.scheduler.match(request, count)
                orders.clear()
            for first in range(0, needed, chunk):
                self.scheduler.allocated(
                    request.request_id, list(range(first, min(first + chunk, needed)))
                )
                orders += self.scheduler.take_orders()
        mapped_from = min(
            (max(o.first, o.sink) for o in orders if o.last > max(o.first, o.sink)),
            default=len(prompt),
        )
        if fail:
            for order in orders:
                self.scheduler.failed(FailedLoad(order.request_id, order.block_ids, "it broke"))
            mapped_from = len(prompt)
        tokens = prompt + answer
        if exact < count:
            true = exact
        else:
            true = len(tokens) if mapped_from >= len(prompt) else mapped_from
        for end in range(SIZE, len(tokens) + 1, SIZE):
            key = (request.salt, tokens[:end])
            if not (keep_old and key in self.blocks):
                self.blocks[key] = end <= true
        status = self.scheduler.finished(request.request_id, tokens)
        return Served(matched, orders, status)
