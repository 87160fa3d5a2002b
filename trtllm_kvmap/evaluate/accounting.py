"""What a request costs a pool of devices: seconds in use, and seconds kept from others.

Phases are counted by the devices that they occupy: a prefill and a decode occupy one, a transfer
and a map the sender and the receiver. *Active* is the sum over devices of the time in use;
*reserved* holds every device that takes part from the first phase to the last, idle or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one request, phase by phase. What does not happen is 0: a model that keeps its
    own request has ``source_prefill`` and ``decode`` alone.
    """

    source_prefill: float = 0.0
    transfer: float = 0.0
    map: float = 0.0
    target_prefill: float = 0.0
    repair: float = 0.0
    decode: float = 0.0


class Compute(NamedTuple):
    """Device-seconds of one request, and the seconds it takes."""

    active: float
    reserved: float
    elapsed: float


def compute_of(phases: Phases, devices: int) -> Compute:
    """``devices``: 1 for a request that stays with its model, 2 for one that changes models."""
    once = phases.source_prefill + phases.target_prefill + phases.repair + phases.decode
    both = phases.transfer + phases.map
    return Compute(once + 2 * both, devices * (once + both), once + both)


def saving(split: Compute, native: Compute) -> float:
    """The share of the native request's active device-seconds that the split one does not use;
    negative when it uses more.
    """
    return 1 - split.active / native.active
