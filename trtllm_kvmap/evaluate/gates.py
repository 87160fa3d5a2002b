"""The gates a map must pass: declared before a run, stored with what it found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trtllm_kvmap.errors import InputError

PASS, FAIL, NOT_MEASURED = "pass", "fail", "not measured"


@dataclass(frozen=True, slots=True)
class Gates:
    """Limits for the arm that is judged. The fields are flags of `trtllm-kvmap evaluate`.

    Passing says nothing about the source: a map may pass all of them and be worse than the small
    model alone, which is why a report has the source's own figures beside every gate.
    """

    min_retention: float = field(
        default=0.8, metadata={"help": "gate: accuracy over the target's, at least"}
    )
    max_perplexity_ratio: float = field(
        default=1.25, metadata={"help": "gate: perplexity over the target's, at most"}
    )
    min_top1_agreement: float = field(
        default=0.8, metadata={"help": "gate: likeliest tokens equal to the target's, at least"}
    )

    def __post_init__(self) -> None:
        for name, limit in asdict(self).items():
            if not (math.isfinite(limit) and limit >= 0):
                raise InputError(f"{name} must be zero or a positive number, got {limit}.")


def judge_gates(
    gates: Gates, arm: Mapping[str, Any], source: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """One JSON entry per gate: its ``name``, ``limit`` and ``side`` (at least, at most), the figure
    of the judged ``arm`` and of the ``source`` alone, and the ``verdict``: pass, fail, or not
    measured where the items have no such score. ``clear``: the whole 95 % interval says the same.
    """
    return [
        _judged(name, side, limit, arm[name], source[name])
        for name, side, limit in (
            ("retention", "at least", gates.min_retention),
            ("perplexity_ratio", "at most", gates.max_perplexity_ratio),
            ("top1_agreement", "at least", gates.min_top1_agreement),
        )
    ]


def _judged(
    name: str, side: str, limit: float, figure: Mapping[str, Any], source: Mapping[str, Any]
) -> dict[str, Any]:
    def holds(value: float) -> bool:
        return value >= limit if side == "at least" else value <= limit

    entry = {"name": name, "side": side, "limit": limit, "figure": figure, "source": source}
    if figure["value"] is None:
        return {**entry, "verdict": NOT_MEASURED, "clear": False}
    passed = holds(figure["value"])
    ends = [figure[end] for end in ("low", "high")]
    clear = None not in ends and all(holds(end) == passed for end in ends)
    return {**entry, "verdict": PASS if passed else FAIL, "clear": clear}
