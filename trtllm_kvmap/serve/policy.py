"""Who reads a prompt: the seam at which a deployment decides.

A policy sees a request, its tokens and its plan before any model runs, and returns None, the source
reads and the target goes on from mapped KV, or the Outcome with which the target reads the prompt
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trtllm_kvmap.decode.routing.routing import Situation, break_even, route
from trtllm_kvmap.decode.routing.speeds import Speeds, bytes_per_token
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.serve.map_header import MapHeader
from trtllm_kvmap.serve.outcome import Outcome
from trtllm_kvmap.serve.request import CompletionRequest
from trtllm_kvmap.serve.source import Owner
from trtllm_kvmap.spec.plan import HandoffPlan

Policy = Callable[[CompletionRequest, list[int], HandoffPlan], Outcome | None]


def source_reads(
    request: CompletionRequest, token_ids: list[int], plan: HandoffPlan
) -> Outcome | None:
    """Read by the source, answered by the target, wherever a token is left to map."""
    if plan.mapped:
        return None
    return Outcome(
        "fallback_reprefill",
        "short_prompt",
        f"the target computes all {plan.num_tokens} tokens of so short a prompt anyway",
    )


def require_window(speeds: Speeds, repair_window: int) -> None:
    """Raise InputError for speeds of another window: they tell other times, and the evidence would
    be asked about a repair that is not made.
    """
    if speeds.repair_window != repair_window:
        raise InputError(
            f"The speeds were measured with a repair window of {speeds.repair_window} tokens, the "
            f"repository hands over with {repair_window}. Write it with --repair-window "
            f"{speeds.repair_window}, or measure again."
        )


@dataclass(frozen=True, slots=True)
class Routed:
    """Read by the source where the map is sooner than the target's own reading (decode.routing) and
    its evidence vouches for it.

    ``held(token_ids, owner)`` asks the source how many of the tokens it has read in an earlier
    turn; it is asked for requests of a conversation, and may raise.
    """

    speeds: Speeds
    header: MapHeader
    held: Callable[[list[int], Owner], int]

    @staticmethod
    def load(
        path: str | Path,
        header: MapHeader,
        repair_window: int,
        held: Callable[[list[int], Owner], int],
    ) -> Routed:
        """By the speeds in the file ``path``. Raises InputError when they cannot be read, or are
        those of another ``repair_window`` than hand-overs here have.
        """
        speeds = Speeds.load(path)
        require_window(speeds, repair_window)
        return Routed(speeds, header, held)

    def __call__(
        self, request: CompletionRequest, token_ids: list[int], plan: HandoffPlan
    ) -> Outcome | None:
        short = source_reads(request, token_ids, plan)
        if short is not None:
            return short
        owner = request.tenant, request.conversation
        holds = self.held(token_ids, owner) if request.conversation else 0
        situation = Situation(
            plan.num_tokens,
            reply_tokens=1,  # the target gives the reply either way
            direction="up",
            source_holds=holds,
            may_stay=False,
        )
        sizes = bytes_per_token(self.header.source), self.header.target.max_positions
        found = route(
            situation,
            self.speeds,
            self.header.evidence,
            self.header.map_digest,
            bytes_per_token=sizes[0],
            max_positions=sizes[1],
        )
        if found.choice == "map":
            return None
        if found.objection:
            detail = f"the map may not be used: {found.objection}"
            return Outcome("fallback_reprefill", "not_vouched", detail)
        even = break_even(situation, self.speeds, *sizes)
        held = f" ({holds} held by the source)" if holds else ""
        return Outcome(
            "fallback_reprefill",
            "reading_is_faster",
            f"reading again is faster at {plan.num_tokens} tokens{held}: "
            f"{found.first_token['reprefill']:.3g} s, {found.first_token['map']:.3g} s by mapping "
            f"({'no length breaks even' if even is None else f'break-even {even}'})",
        )
