"""Which tokens of a prompt are spliced, mapped and computed: pure arithmetic, the same on every
host.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_kvmap.errors import InputError


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """Half-open token ranges of one hand-over, in order: spliced, first, mapped, repaired; together
    0 .. num_tokens.

    ``spliced`` tokens are held exactly by the target already. ``first`` tokens carry the attention
    sink and are computed by the target (or taken from the map's sink table). ``mapped`` tokens come
    from the source through the map. ``repaired`` tokens, the last ``repair_window``, are computed
    by the target on top of everything before them.
    """

    num_tokens: int
    spliced: range
    first: range
    mapped: range
    repaired: range


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
