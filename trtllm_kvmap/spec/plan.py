"""Which tokens of a prompt are spliced, mapped and computed: pure arithmetic, the same on every
host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trtllm_kvmap.errors import InputError


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """Half-open token ranges of one hand-over, in order: spliced, first, mapped, repaired; together
    0 .. num_tokens.

    ``spliced`` tokens are held exactly by the target already. ``first`` tokens carry the attention
    sink and are computed by the target (or taken from the map's sink table). ``mapped`` tokens come
    from the source through the map. ``repaired`` tokens, the last ``repair_window``, are computed
    by the target on top of everything before them.

    ``selected`` tokens, ascending and inside ``mapped``, are mapped like their neighbours and then
    computed by the target in the same pass as the repaired ones, over their mapped entries. Only a
    host that can compute single tokens in the middle of a prompt can carry them out; every other
    one takes ``contiguous``.
    """

    num_tokens: int
    spliced: range
    first: range
    mapped: range
    repaired: range
    selected: tuple[int, ...] = ()

    @property
    def num_computed(self) -> int:
        """How many tokens the target computes itself."""
        return len(self.first) + len(self.selected) + len(self.repaired)

    @property
    def contiguous(self) -> HandoffPlan:
        """The same plan for a host that can only be offered a prefix: no token is selected."""
        return replace(self, selected=())

    def with_selected(self, ranked: Sequence[int], max_computed: int) -> HandoffPlan:
        """This plan with as many of the mapped tokens in ``ranked``, best first, as leave
        num_computed at ``max_computed`` or below. Tokens that are not mapped are passed over: the
        target has those already.

        Raises InputError for a token outside the prompt, or a budget below what the plan computes
        without any selected token.
        """
        outside = [token for token in ranked if not 0 <= token < self.num_tokens]
        if outside:
            raise InputError(
                f"Token {outside[0]} was selected; the prompt has the tokens 0 to "
                f"{self.num_tokens - 1}."
            )
        room = max_computed - self.contiguous.num_computed
        if room < 0:
            raise InputError(
                f"The budget is {max_computed} tokens, but the plan computes "
                f"{self.contiguous.num_computed} before any is selected; raise the budget, or plan "
                f"with a smaller repair_window."
            )
        mapped = [token for token in dict.fromkeys(ranked) if token in self.mapped]
        return replace(self, selected=tuple(sorted(mapped[:room])))


@dataclass(frozen=True, slots=True)
class RepairCost:
    """What computing n tokens takes on one host at one length, in milliseconds: ``pass_ms`` once,
    and ``token_ms`` for each; measured by whoever knows the host.
    """

    pass_ms: float
    token_ms: float

    def __post_init__(self) -> None:
        if self.pass_ms < 0 or self.token_ms <= 0:
            raise InputError(
                f"A pass costs at least 0 ms and a token more than 0 ms, got {self.pass_ms} and "
                f"{self.token_ms}; measure a pass of few and of many tokens."
            )

    def max_computed(self, budget_ms: float) -> int:
        """The most tokens that ``budget_ms`` pays for, at least 1: the last one is always
        computed.
        """
        return max(int((budget_ms - self.pass_ms) / self.token_ms), 1)


def chunk_boundaries(num_tokens: int, tokens_per_chunk: int, width: int = 1) -> list[int]:
    """The first ``width`` tokens of every chunk but the first, the heads of all chunks before the
    second tokens of any: where pieces of text that were read apart are joined.
    """
    if tokens_per_chunk < 1 or width < 0:
        raise InputError(
            f"tokens_per_chunk must be at least 1 and width not negative, got {tokens_per_chunk} "
            f"and {width}."
        )
    starts = range(tokens_per_chunk, num_tokens, tokens_per_chunk)
    width = min(width, tokens_per_chunk)
    return [s + offset for offset in range(width) for s in starts if s + offset < num_tokens]


def plan_handoff(
    num_tokens: int,
    *,
    spliced: int = 0,
    first_tokens: int = 1,
    repair_window: int = 32,
    tokens_per_block: int = 1,
) -> HandoffPlan:
    """The plan for a prompt of ``num_tokens``.

    ``first_tokens`` and ``repair_window`` count tokens from the two ends of the prompt and give way
    to each other and to ``spliced`` on a short prompt. The last token is always repaired, whatever
    the counts say, even when the target holds it: its logits start the decode. With
    ``tokens_per_block``
    > 1 the mapped span ends on a block boundary (a host that can only offer whole blocks repairs
    the rest). Raises InputError for negative or contradictory counts.
    """
    for name, value in (
        ("num_tokens", num_tokens),
        ("spliced", spliced),
        ("first_tokens", first_tokens),
        ("repair_window", repair_window),
    ):
        if value < 0:
            raise InputError(f"{name} must not be negative, got {value}.")
    if tokens_per_block < 1:
        raise InputError(f"tokens_per_block must be at least 1, got {tokens_per_block}.")
    if spliced > num_tokens:
        raise InputError(
            f"The prompt has {num_tokens} tokens but {spliced} are said to be spliced."
        )
    before_last = max(num_tokens - 1, 0)
    spliced_end = min(spliced, before_last)
    first_end = max(spliced_end, min(first_tokens, before_last))
    mapped_end = max(num_tokens - max(repair_window, 1), 0) // tokens_per_block * tokens_per_block
    mapped_end = max(mapped_end, first_end)
    return HandoffPlan(
        num_tokens=num_tokens,
        spliced=range(0, spliced_end),
        first=range(spliced_end, first_end),
        mapped=range(first_end, mapped_end),
        repaired=range(mapped_end, num_tokens),
    )
