"""What is counted, in Prometheus form. The host gives a way to make counters: Triton's custom
metrics, which its /metrics endpoint serves beside its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trtllm_kvmap.serve.outcome import STATES
from trtllm_kvmap.serve.target import Event

PLAIN = {
    "kvmap_map_ms_total": "Milliseconds the target spent mapping source KV",
    "kvmap_repair_ms_total": "Milliseconds the target spent computing the last tokens itself",
    "kvmap_tokens_prompt_total": "Prompt tokens of answered requests",
    "kvmap_tokens_completion_total": "Tokens the target generated",
    "kvmap_tokens_mapped_total": "Prompt tokens that came from mapped KV",
    "kvmap_tokens_repaired_total": "Prompt tokens that the target computed on mapped KV",
    "kvmap_bytes_moved_total": "Bytes of source KV that were handed to the target",
    "kvmap_errors_total": "Requests that ended in an error",
}
REQUESTS, FALLBACKS = "kvmap_requests_total", "kvmap_fallbacks_total"
TRAFFIC = "kvmap_traffic_total"
ALL = {
    **PLAIN,
    REQUESTS: "Answered requests by kv_status",
    FALLBACKS: "Answered requests that nothing was mapped for, by reason",
    TRAFFIC: "Answered requests that might be counted for calibration, by what became of them",
}


class Counter(Protocol):
    def increment(self, value: float) -> None: ...


class Family(Protocol):
    """A named counter that may have labels."""

    def __call__(self, labels: dict[str, str]) -> Counter: ...


class Counters:
    """Every counter of the pipeline. ``make(name, description)`` makes a family."""

    def __init__(self, make: Callable[[str, str], Family]) -> None:
        # Triton deletes a counter's family with the object that stands for it: all are kept.
        self._families = {name: make(name, text) for name, text in ALL.items()}
        self._plain = {name: self._families[name]({}) for name in PLAIN}
        requests = self._families[REQUESTS]
        self._requests = {status: requests({"kv_status": status}) for status in STATES}
        self._labelled: dict[tuple[str, str], Counter] = {}

    def count(self, event: Event) -> None:
        """Count an answered request by its last event."""
        outcome = event.outcome
        self._requests[outcome.status].increment(1)
        if outcome.status != "applied":
            self._count_by(FALLBACKS, "reason", outcome.reason)
        if event.traffic:
            self._count_by(TRAFFIC, "taken", event.traffic)
        for step in ("map", "repair"):
            self._plain[f"kvmap_{step}_ms_total"].increment(event.milliseconds.get(step, 0.0))
        for kind, number in event.tokens.items():
            self._plain[f"kvmap_tokens_{kind}_total"].increment(number)
        self._plain["kvmap_bytes_moved_total"].increment(event.bytes_moved)

    def count_error(self) -> None:
        self._plain["kvmap_errors_total"].increment(1)

    def _count_by(self, family: str, label: str, value: str) -> None:
        """Count with a label whose values are not known beforehand."""
        if (family, value) not in self._labelled:
            self._labelled[family, value] = self._families[family]({label: value})
        self._labelled[family, value].increment(1)
