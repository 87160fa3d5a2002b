"""What a map's evidence vouches for: which hand-overs its report speaks about, and how well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtllm_kvmap.artifact.evidence import flaw_of, is_number, no_gap
from trtllm_kvmap.errors import InputError

Direction = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """What must hold before a map is used, and how long the first token may take.

    ``min_gap_recovered``: the interval of the report's gap recovered must lie above it (up).
    ``max_perplexity_ratio``: the interval of the mapped target's perplexity over its own must lie
    below it. ``trusted_length``: how many times the longest context of the report a prompt may be.
    ``max_seconds``: to the first token; a slower switch is not made.
    """

    min_gap_recovered: float = 0.0
    max_perplexity_ratio: float = 1.25
    trusted_length: float = 4.0
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise InputError(f"max_seconds must be above 0, got {self.max_seconds}.")


def nothing_to_gain(evidence: Mapping[str, Any] | None, map_digest: str | None) -> bool:
    """Whether the report shows the target no better than the source alone."""
    return evidence is not None and not flaw_of(evidence, map_digest) and bool(no_gap(evidence))


def objection_to(
    evidence: Mapping[str, Any] | None,
    map_digest: str | None,
    num_tokens: int,
    repair_window: int,
    direction: Direction,
    policy: RoutingPolicy,
) -> str:
    """Why the evidence does not vouch for a hand-over by the map of ``map_digest``, of
    ``num_tokens`` in this ``direction`` with so many of them repaired, or "".
    """
    flaw = flaw_of(evidence, map_digest)
    if evidence is None or flaw:
        return flaw
    if missing := _unreadable(evidence):
        return f"its evidence is no report that can be judged by ({missing})"
    config = evidence["config"]
    if repair_window < config["N"]:
        return f"its report repairs {config['N']} tokens, this host {repair_window}"
    longest = config["context_tokens"]["longest"]
    if num_tokens > policy.trusted_length * longest:
        return (
            f"its report saw at most {longest} tokens, and {policy.trusted_length:g} times as many "
            f"are trusted"
        )
    gap, ratio = evidence["gap_recovered"], evidence["perplexity_ratio"]
    if direction == "up" and (gap["low"] is None or gap["low"] <= policy.min_gap_recovered):
        return (
            f"its report does not show more than {policy.min_gap_recovered:g} of the gap recovered "
            f"({_interval(gap)})"
        )
    if ratio["value"] is None:
        return "" if direction == "up" else "its report has no perplexity to judge it by"
    if ratio["high"] is None or ratio["high"] > policy.max_perplexity_ratio:
        return (
            f"its report does not show a perplexity below {policy.max_perplexity_ratio:g} times "
            f"the target's own ({_interval(ratio)})"
        )
    return ""


def _unreadable(evidence: Mapping[str, Any]) -> str:
    """What keeps ``evidence`` from being a report of evaluate, or "": a map's file may hold any
    JSON there.
    """
    try:
        config, arms = evidence["config"], evidence["arms"]
        figures = [arms[name][config["metric"]] for name in ("source", "target")]
        figures += [evidence["gap_recovered"], evidence["perplexity_ratio"]]
        bounds = [figure[bound] for figure in figures for bound in ("value", "low", "high")]
        counts = [config["N"], config["context_tokens"]["longest"]]
        for number in (*counts, *(bound for bound in bounds if bound is not None)):
            if not is_number(number):
                raise TypeError(f"{number!r} is no number")
    except (LookupError, TypeError) as error:
        return repr(error)
    return ""


def _interval(figure: Mapping[str, float | None]) -> str:
    if figure["value"] is None:
        return "not measured"
    if figure["low"] is None or figure["high"] is None:
        return f"{figure['value']:.2f}, no interval"
    return f"{figure['value']:.2f}, {figure['low']:.2f} to {figure['high']:.2f}"
