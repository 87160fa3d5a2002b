"""What two tokenisations of one conversation share: the part of a cache both models can stand on.

Two models of one family may wrap the same conversation in different chat templates. Their token
ids agree up to the first difference; keys and values up to there speak of the same tokens at the
same positions, and everything after it is computed by the target.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_kvmap.spec.plan import HandoffPlan, plan_handoff


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of equal tokens at the start of both."""
    for index, (here, there) in enumerate(zip(first, second, strict=False)):
        if here != there:
            return index
    return min(len(first), len(second))


def plan_shared_prefix(
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    *,
    spliced: int = 0,
    first_tokens: int = 1,
    repair_window: int = 32,
) -> HandoffPlan:
    """The plan for ``target_ids``, the target's own tokenisation, when the source has read
    ``source_ids``: nothing beyond their common prefix is mapped.
    """
    unshared = len(target_ids) - common_prefix(source_ids, target_ids)
    return plan_handoff(
        len(target_ids),
        spliced=spliced,
        first_tokens=first_tokens,
        repair_window=max(repair_window, unshared),
    )
