"""What background calibration may have of one conversation, and when it must stand still."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from trtllm_kvmap.calibrate.traffic import TrafficMoments
from trtllm_kvmap.decode.bridge import KvBridge

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Counted:
    """One conversation's part in ``traffic``: the tokens before the first that was added without
    consent. What comes later is not counted either, for it tells of what came before.
    """

    def __init__(self, traffic: TrafficMoments | None) -> None:
        self.traffic = traffic
        self._name = secrets.token_hex(8)
        self._end: int | None = None

    def added(self, begin: int, consent: bool) -> None:
        """Tokens from ``begin`` on joined the conversation."""
        if not consent and self._end is None:
            self._end = begin

    def handed_over(self, bridge: KvBridge, token_ids: Sequence[int]) -> None:
        """Offer the conversation if traffic is of the two models that ``bridge`` joins."""
        traffic = self.traffic
        if traffic is None or traffic.source is not bridge.source:
            return
        if traffic.target is bridge.target:
            traffic.offer(token_ids[: self._end], self._name)

    def answering(self) -> AbstractContextManager[None]:
        return nullcontext() if self.traffic is None else self.traffic.answering()


class HasCounted(Protocol):
    counted: Counted


Owner = TypeVar("Owner", bound=HasCounted)


def undisturbed(
    method: Callable[Concatenate[Owner, Given], Result],
) -> Callable[Concatenate[Owner, Given], Result]:
    """Counting in the background stands still while ``method`` runs."""

    @wraps(method)
    def run(owner: Any, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with owner.counted.answering():
            return method(owner, *args, **kwargs)

    return run
