"""What the front and its two workers say to each other, through pipes of the front's own
children.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_kvmap.exchange.offer import LEASE_SECONDS
from trtllm_kvmap.inject.connector.status import HandoffStatus
from trtllm_kvmap.spec.plan import HandoffPlan


@dataclass(frozen=True, slots=True)
class PairSettings:
    """``source`` and ``target``: model folders or hub ids; ``kvmap``: the map's file.

    ``transport`` of the blocks: nixl, or shared_memory; ``num_blocks`` of ``tokens_per_block``
    tokens in each of the two pools; the target waits ``wait_seconds`` for blocks, which stay leased
    for ``lease_seconds``.
    """

    source: str
    target: str
    kvmap: str
    transport: str = "nixl"
    tokens_per_block: int = 32
    num_blocks: int = 256
    first_tokens: int = 1
    repair_window: int = 32
    wait_seconds: float = 10.0
    lease_seconds: float = LEASE_SECONDS
    allow_unproven: bool = False


@dataclass(frozen=True, slots=True)
class ReadAndOffer:
    """To the source: read these tokens and offer them to the target that listens there.

    ``guarded`` is the target's plan, where the map carries a guard, and ``recall`` whether that
    weighs what the source knows of the prompt (decode.remote.read_to_offer).
    """

    request_id: str
    token_ids: tuple[int, ...]
    address: tuple[str, int]
    guarded: HandoffPlan | None = None
    recall: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """To the target. ``no_blocks``, if not empty, says why it need not wait for any."""

    request_id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    no_blocks: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """To the target: no blocks will come for this request any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Answer:
    """``token_ids`` are the target's greedy reply; ``unlike``, where it is not empty, says that the
    map's guard was set on other hand-overs than this one.
    """

    request_id: str
    token_ids: tuple[int, ...]
    status: HandoffStatus
    unlike: str = ""


@dataclass(frozen=True, slots=True)
class CannotStart:
    """From a worker, in place of being ready; ``message`` is that of a KvMapError."""

    message: str


@dataclass(frozen=True, slots=True)
class Failure:
    """The request itself cannot be answered; ``message`` is that of an InputError."""

    request_id: str
    message: str
