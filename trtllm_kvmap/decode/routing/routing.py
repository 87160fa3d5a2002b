"""Whether a conversation changes models through the map, by reading again, or not at all.

Pure arithmetic on measured speeds and on the evidence that a map carries: no model runs, and equal
input gives an equal route.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from trtllm_kvmap.decode.routing.speeds import Speeds
from trtllm_kvmap.decode.routing.vouched import (
    Direction,
    RoutingPolicy,
    nothing_to_gain,
    objection_to,
)
from trtllm_kvmap.errors import InputError

Choice = Literal["map", "reprefill", "stay"]


@dataclass(frozen=True, slots=True)
class Situation:
    """A conversation of ``num_tokens``, and ``reply_tokens`` still to come. The source has read the
    first ``source_holds`` of it (None: all), and has to read the rest before it can be mapped.

    ``up``: the target is wanted for what it says. ``down``: it is wanted because it says it sooner;
    None takes up when the target decodes more slowly. With ``mirrored`` the target's cache is
    mapped already (session.mirror) and a switch costs the repair. ``may_stay`` is False where only
    the target answers, so that staying is no choice.
    """

    num_tokens: int
    reply_tokens: int = 64
    direction: Direction | None = None
    mirrored: bool = False
    source_holds: int | None = None
    may_stay: bool = True

    def __post_init__(self) -> None:
        for name in ("num_tokens", "reply_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.source_holds is not None and self.source_holds < 0:
            raise InputError(f"source_holds must not be negative, got {self.source_holds}.")
        if self.direction not in (None, "up", "down"):
            raise InputError(f"direction must be up or down, got {self.direction!r}.")


@dataclass(frozen=True, slots=True)
class Route:
    """``choice``, and the sentence that says why.

    ``first_token`` and ``whole_reply`` are seconds by choice. ``break_even_tokens`` is the shortest
    prompt from which on the map is always sooner than reading again, up to the target's limit
    (None: no such length); ``break_even_reply`` the shortest reply that ends sooner with the switch
    than without (None: none does). Where staying is no choice, neither is looked for and both are
    None; break_even finds the first. ``objection`` is what keeps the map from being used, or "".
    """

    choice: Choice
    reason: str
    direction: Direction
    first_token: dict[Choice, float]
    whole_reply: dict[Choice, float]
    break_even_tokens: int | None
    break_even_reply: int | None
    objection: str


def route(
    situation: Situation,
    speeds: Speeds,
    evidence: Mapping[str, Any] | None,
    map_digest: str | None,
    *,
    bytes_per_token: int,
    max_positions: int,
    policy: RoutingPolicy | None = None,
) -> Route:
    """The cheapest way whose quality is vouched for.

    ``evidence`` is KvMap.evidence and ``map_digest`` the digest that it must name (read_map and
    MapHeader give both from a file), ``bytes_per_token`` what the source's cache takes (see
    speeds.bytes_per_token), ``max_positions`` the target's limit. Upward the map and reading again
    compete for the earlier first token, and staying is chosen only when both take longer than
    allowed or the report shows nothing to gain; downward all three compete for the earlier end of
    the reply. Raises InputError for a conversation beyond the target's limit.
    """
    policy = policy or RoutingPolicy()
    count = situation.num_tokens
    if count + situation.reply_tokens > max_positions:
        raise InputError(
            f"The conversation has {count} tokens and {situation.reply_tokens} more to come; the "
            f"target reads at most {max_positions}. Shorten it, or stay with the source."
        )
    slower = speeds.target_decode < speeds.source_decode
    direction: Direction = situation.direction or ("up" if slower else "down")
    first: dict[Choice, float] = {
        "map": float(_mapped_seconds(speeds, count, bytes_per_token, situation)),
        "reprefill": float(speeds.target_prefill.seconds(count)),
        "stay": float(_unread_seconds(speeds, count, situation)) + 1 / speeds.source_decode,
    }
    rates = dict.fromkeys(first, speeds.target_decode) | {"stay": speeds.source_decode}
    whole = {name: s + (situation.reply_tokens - 1) / rates[name] for name, s in first.items()}
    objection = objection_to(
        evidence, map_digest, situation.num_tokens, speeds.repair_window, direction, policy
    )
    allowed: list[Choice] = ["reprefill"] if objection else ["map", "reprefill"]
    switch = min(allowed, key=lambda name: first[name])
    hopeless = nothing_to_gain(evidence, map_digest)
    choice, reason = _decide(situation, policy, direction, hopeless, switch, first, whole)
    if objection and choice != "map":
        reason += f" The map may not be used: {objection}."
    tokens = reply = None
    if situation.may_stay:
        tokens = break_even(situation, speeds, bytes_per_token, max_positions)
        reply = _break_even_reply(first[switch], first["stay"], speeds, max_positions)
    return Route(
        choice=choice,
        reason=reason,
        direction=direction,
        first_token=first,
        whole_reply=whole,
        break_even_tokens=tokens,
        break_even_reply=reply,
        objection=objection,
    )


def break_even(
    situation: Situation, speeds: Speeds, bytes_per_token: int, max_positions: int
) -> int | None:
    """Route.break_even_tokens. Every length is looked at, which takes long for a long limit, and of
    ``situation`` only source_holds and mirrored matter: what was found is kept.
    """
    alike = replace(situation, num_tokens=1, reply_tokens=1, direction=None, may_stay=True)
    return _break_even(alike, speeds, bytes_per_token, max_positions)


@lru_cache(maxsize=64)
def _break_even(
    situation: Situation, speeds: Speeds, bytes_per_token: int, max_positions: int
) -> int | None:
    lengths = np.arange(speeds.repair_window + 1, max_positions + 1)  # shorter ones map nothing
    mapped = _mapped_seconds(speeds, lengths, bytes_per_token, situation)
    slower = np.flatnonzero(mapped >= speeds.target_prefill.seconds(lengths))
    first = slower[-1] + 1 if len(slower) else 0
    return int(lengths[first]) if first < len(lengths) else None


def _decide(
    situation: Situation,
    policy: RoutingPolicy,
    direction: Direction,
    hopeless: bool,
    switch: Choice,
    first: Mapping[Choice, float],
    whole: Mapping[Choice, float],
) -> tuple[Choice, str]:
    verb = "mapping" if switch == "map" else "reading again"
    if situation.may_stay and direction == "up" and hopeless:
        return "stay", "The report shows the target no better than the source."
    limit = policy.max_seconds if situation.may_stay else None
    if limit is not None and first[switch] > limit:
        return "stay", (
            f"The first token would take {first[switch]:.3g} s by {verb}, and at most "
            f"{limit:.3g} s are allowed."
        )
    reply = situation.reply_tokens
    if situation.may_stay and direction == "down" and whole["stay"] <= whole[switch]:
        return "stay", (
            f"A reply of {reply} tokens ends after {whole['stay']:.3g} s with the source, after "
            f"{whole[switch]:.3g} s by {verb}."
        )
    if direction == "down":
        return switch, (
            f"A reply of {reply} tokens ends after {whole[switch]:.3g} s by {verb}, after "
            f"{whole['stay']:.3g} s with the source."
        )
    if switch == "map":
        return switch, (
            f"The target's first token takes {first['map']:.3g} s by mapping, "
            f"{first['reprefill']:.3g} s by reading again."
        )
    return switch, (
        f"The target reads all {situation.num_tokens} tokens in {first['reprefill']:.3g} s; "
        f"mapping would take {first['map']:.3g} s."
    )


def _mapped_seconds(
    speeds: Speeds, tokens: np.ndarray | int, bytes_per_token: int, situation: Situation
) -> np.ndarray:
    """To the target's first token; its logits come with the repair."""
    repair = speeds.repair.seconds(tokens)
    if situation.mirrored:
        return repair
    mapped = np.maximum(np.asarray(tokens) - speeds.repair_window, 0)
    sent = speeds.transfer(mapped, bytes_per_token)
    read = _unread_seconds(speeds, mapped, situation)
    return np.asarray(read + sent + speeds.map.seconds(mapped) + repair)


def _unread_seconds(speeds: Speeds, tokens: np.ndarray | int, situation: Situation) -> np.ndarray:
    """Until the source has read ``tokens``. What lies behind the part that it holds takes at least
    as long as it would alone, and at least what the whole takes longer than that part.
    """
    holds = situation.source_holds
    if holds is None:
        return np.zeros(np.shape(tokens))
    unread = np.maximum(np.asarray(tokens) - holds, 0)
    alone = speeds.source_prefill.seconds(unread)
    longer = speeds.source_prefill.seconds(tokens) - speeds.source_prefill.seconds(holds)
    return np.where(unread > 0, np.maximum(alone, longer), 0.0)


def _break_even_reply(
    switched: float, stayed: float, speeds: Speeds, max_positions: int
) -> int | None:
    """``switched`` and ``stayed`` are seconds to the first token."""
    replies = np.arange(1, max_positions + 1)
    after = (replies - 1) / speeds.target_decode
    sooner = np.flatnonzero(switched + after < stayed + (replies - 1) / speeds.source_decode)
    return int(replies[sooner[0]]) if len(sooner) else None
