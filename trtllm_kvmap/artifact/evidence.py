"""Whether a map's evidence vouches for it: the one definition that whoever loads, lists, verifies
or routes by a map goes by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trtllm_kvmap.errors import UnprovenError

PASSED = "passed"
# What evaluate runs before any figure means anything; evidence names every one of them.
CONTROLS = (
    "reinjection",
    "rope_round_trip",
    "deterministic_bytes",
    "corruption_detected",
    "wrong_document",
)


def require_proven(name: object, evidence: Any) -> None:
    """Raise UnprovenError, which begins with ``name``, unless ``evidence`` proves its map."""
    if why := unproven(evidence):
        raise UnprovenError(
            f"{name} is unproven: {why}, or allow unproven maps (allow_unproven=True)."
        )


def unproven(evidence: Any) -> str:
    """Why a map with this ``evidence`` may not be applied on its word, and what to do; "" for a
    proven one: its controls are there and passed, and the gap it recovered is a number, even a bad
    one.

    Where the source alone is no worse than the target there is no gap. That is a result, and the
    evidence is kept with it, but it shows nothing that a hand-over to the target would gain.
    """
    if flaw := flaw_of(evidence):
        return f"{flaw}; run `trtllm-kvmap evaluate --attach` on it"
    if evidence["gap_recovered"]["value"] is None:
        return (
            f"{no_gap(evidence)}; let the source answer, or evaluate it on what the target does "
            f"better"
        )
    return ""


def flaw_of(evidence: Any) -> str:
    """What keeps ``evidence`` from being that of a sound report, or "": a map's file may hold any
    JSON there.
    """
    if evidence is None:
        return "it carries no evidence, so no held-out report vouches for it"
    controls = evidence.get("controls") if isinstance(evidence, Mapping) else None
    if not isinstance(controls, Mapping):
        return "its evidence names no controls"
    said = dict.fromkeys(CONTROLS) | dict(controls)
    failed = [n if n in CONTROLS else repr(n) for n, verdict in said.items() if verdict != PASSED]
    if failed:
        return f"its evidence does not hold ({', '.join(failed)} not passed)"
    gap = evidence.get("gap_recovered")
    if not isinstance(gap, Mapping) or not {"value", "low", "high"} <= set(gap):
        return "its evidence has no gap recovered with an interval"
    if not all(gap[end] is None or is_number(gap[end]) for end in ("value", "low", "high")):
        return "its evidence has a gap recovered that is no number"
    if gap["value"] is None and not no_gap(evidence):
        return "its evidence has no gap recovered, and its two models alone do not say why"
    return ""


def no_gap(report: Mapping[str, Any]) -> str:
    """Why there is no gap to recover, of the ``config`` and ``arms`` of a report or of evidence;
    "" where the target alone is better than the source alone, or where they do not say.
    """
    try:
        metric = report["config"]["metric"]
        source, target = (report["arms"][name][metric]["value"] for name in ("source", "target"))
    except (LookupError, TypeError):
        return ""
    if metric not in ("accuracy", "nll") or not (is_number(source) and is_number(target)):
        return ""
    if (target < source) if metric == "nll" else (target > source):
        return ""
    return (
        f"its source alone is no worse than its target ({metric} {source:.4g} against "
        f"{target:.4g}), so there is no gap to recover"
    )


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number; True and False are none."""
    try:
        return isinstance(value, (int, float)) and type(value) is not bool and math.isfinite(value)
    except OverflowError:  # an integer beyond what a float holds
        return False
