"""Drives the source's side of one exchange over a channel, until its blocks may be freed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.channel import Channel, PeerLostError
from trtllm_kvmap.exchange.checksum import block_checksums
from trtllm_kvmap.exchange.messages import (
    MAX_BLOCKS_PER_MESSAGE,
    MalformedMessageError,
    Offer,
    Reason,
)
from trtllm_kvmap.exchange.source_end import Free, Send, SourceEnd, SourceState

# Announced together: large enough to be worth a transfer, small enough to stay in the cores' cache
# between checksum, copy and checksum. The first ones are smaller, so that the target begins soon.
BATCH_BYTES = 8 << 20
ANSWER_SECONDS = 10.0
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Sent:
    """How it ended for the source; COMPLETE: the target has every block."""

    reason: Reason
    detail: str


def send_blocks(
    channel: Channel,
    offer: Offer,
    pool: BlockPool,
    block_ids: Sequence[int],
    *,
    answer_seconds: float = ANSWER_SECONDS,
    cancelled: Callable[[], bool] = lambda: False,
) -> Sent:
    """Offer ``block_ids`` of ``pool`` (in the order of their tokens) and give them back to it when
    nobody reads them any more: at the target's end, or when the lease runs out. Returns then.

    ``cancelled`` is asked now and then; it ends the exchange, not the lease. Raises InputError, and
    leaves the blocks alone, when their number is not the offer's.
    """
    if len(block_ids) != offer.num_blocks:
        raise InputError(
            f"{offer.num_tokens} tokens lie in {offer.num_blocks} blocks; {len(block_ids)} were "
            f"given."
        )
    end = SourceEnd(offer, answer_seconds=answer_seconds)
    batch = min(max(BATCH_BYTES // pool.block_bytes, 1), MAX_BLOCKS_PER_MESSAGE)
    lost = False
    part: Sequence[int] = ()  # the next blocks, not announced yet, and their checksums
    checksums: tuple[int, ...] = ()

    def act(actions: list[Send | Free]) -> None:
        nonlocal lost
        for action in actions:
            if isinstance(action, Free):
                pool.give_back(block_ids)
                continue
            try:
                if not lost:
                    channel.send(action.message)
            except PeerLostError as error:
                lost = True
                act(end.peer_lost(str(error), time.monotonic()))

    act(end.start(time.monotonic()))
    while end.state is not SourceState.ENDED:
        if cancelled():
            act(end.cancel(time.monotonic()))
        if not part and end.announced < offer.num_blocks:  # also while the target still judges
            size = min(batch, end.announced + 1)
            part = block_ids[end.announced : end.announced + size]
            checksums = block_checksums(offer.checksum, pool.data, part)
        if end.wants_blocks:
            act(end.ready(part, checksums))
            part = ()
        try:
            if lost:
                time.sleep(POLL_SECONDS)
            else:
                message = channel.receive(0 if end.wants_blocks else POLL_SECONDS)
                if message is not None:
                    act(end.received(message, time.monotonic()))
        except PeerLostError as error:
            lost = True
            act(end.peer_lost(str(error), time.monotonic()))
        except MalformedMessageError as error:
            act(end.malformed(str(error), time.monotonic()))
            lost = True  # what follows cannot be told apart any more
        act(end.tick(time.monotonic()))
    channel.close()
    assert end.reason is not None
    return Sent(end.reason, end.detail)
