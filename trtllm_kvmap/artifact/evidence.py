"""Whether a map's evidence vouches for it: the one definition that whoever loads, lists, verifies
or routes by a map goes by.
"""

from __future__ import annotations

import math
import re
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
DIGEST = re.compile(r"[0-9a-f]{64}")


def require_proven(name: object, evidence: Any, map_digest: Any) -> None:
    """Raise UnprovenError, which begins with ``name``, unless ``evidence`` proves its map."""
    if why := unproven(evidence, map_digest):
        raise UnprovenError(
            f"{name} is unproven: {why}, or allow unproven maps (allow_unproven=True)."
        )


def unproven(evidence: Any, map_digest: Any) -> str:
    """Why a map with this ``evidence`` may not be applied on its word, and what to do; "" for a
    proven one: its controls are there and passed, the gap it recovered is a number, even a bad one,
    and the map it names is this one, of ``map_digest`` (KvMap.map_digest; in the header of a file).

    Where the source alone is no worse than the target there is no gap. That is a result, and the
    evidence is kept with it, but it shows nothing that a hand-over to the target would gain.
    """
    if flaw := flaw_of(evidence, map_digest):
        return f"{flaw}; run `trtllm-kvmap evaluate --attach` on it"
    if evidence["gap_recovered"]["value"] is None:
        return (
            f"{no_gap(evidence)}; let the source answer, or evaluate it on what the target does "
            f"better"
        )
    return ""


def flaw_of(evidence: Any, map_digest: Any) -> str:
    """What keeps ``evidence`` from being that of a sound report of this map, or "": a map's file
    may hold any JSON for both.
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
    return _other_map(evidence, map_digest)


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


def _other_map(evidence: Mapping[str, Any], map_digest: Any) -> str:
    config = evidence.get("config")
    named: Any = config.get("map_digest") if isinstance(config, Mapping) else None
    if not _is_digest(named):
        return "its evidence does not name the map that was evaluated (map_digest)"
    if not _is_digest(map_digest):
        return "its file does not say which map it is (map_digest), as earlier releases wrote it"
    if named != map_digest:
        return f"its evidence is of another map ({named[:12]}, and this one is {map_digest[:12]})"
    return ""


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and DIGEST.fullmatch(value) is not None


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number; True and False are none."""
    try:
        return isinstance(value, (int, float)) and type(value) is not bool and math.isfinite(value)
    except OverflowError:  # an integer beyond what a float holds
        return False
