"""A hand-over plan: four ranges that share out the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.spec.plan import HandoffPlan, RepairCost, chunk_boundaries, plan_handoff

sizes = st.integers(0, 300)


@given(data=st.data(), num_tokens=sizes, first=sizes, repair=sizes, block=st.integers(1, 64))
@settings(deadline=None, max_examples=300)
def test_every_plan_shares_out_the_prompt(
    data: st.DataObject, num_tokens: int, first: int, repair: int, block: int
) -> None:
    spliced = data.draw(st.integers(0, num_tokens))
    plan = plan_handoff(
        num_tokens,
        spliced=spliced,
        first_tokens=first,
        repair_window=repair,
        tokens_per_block=block,
    )
    ranges = [plan.spliced, plan.first, plan.mapped, plan.repaired]
    assert [token for part in ranges for token in part] == list(range(num_tokens))
    # Empty ranges stand in order too: a host may read their ends.
    ends = [0, *(end for part in ranges for end in (part.start, part.stop)), num_tokens]
    assert ends == sorted(ends)
    last = num_tokens - 1
    assert num_tokens == 0 or last in plan.repaired
    held = {*plan.spliced, *plan.first}
    assert all((token in plan.spliced) == (token < spliced) for token in range(last))
    assert all((token in held) == (token < max(first, spliced)) for token in range(last))
    if plan.mapped:
        assert plan.mapped.stop % block == 0
        assert num_tokens - plan.mapped.stop >= max(repair, 1)
        # No whole block more could have been mapped.
        assert num_tokens - plan.mapped.stop < max(repair, 1) + block


def test_the_last_token_is_computed_even_without_repair() -> None:
    plan = plan_handoff(100, repair_window=0)
    assert plan == HandoffPlan(100, range(0), range(0, 1), range(1, 99), range(99, 100))


def test_a_usual_prompt() -> None:
    plan = plan_handoff(1000, spliced=100, first_tokens=4, repair_window=32, tokens_per_block=32)
    assert plan == HandoffPlan(1000, range(100), range(100, 100), range(100, 960), range(960, 1000))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"num_tokens": -1}, "num_tokens must not be negative, got -1"),
        ({"num_tokens": 9, "spliced": -1}, "spliced must not be negative"),
        ({"num_tokens": 9, "first_tokens": -1}, "first_tokens must not be negative"),
        ({"num_tokens": 9, "repair_window": -1}, "repair_window must not be negative"),
        ({"num_tokens": 9, "tokens_per_block": 0}, "tokens_per_block must be at least 1, got 0"),
        ({"num_tokens": 9, "spliced": 10}, "has 9 tokens but 10 are said to be spliced"),
    ],
)
def test_contradictory_counts_are_refused(counts: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_handoff(**counts)


@given(
    data=st.data(), num_tokens=st.integers(1, 80), first=st.integers(0, 9), repair=st.integers(0, 9)
)
@settings(deadline=None, max_examples=200)
def test_selected_tokens_fill_the_budget_best_first(
    data: st.DataObject, num_tokens: int, first: int, repair: int
) -> None:
    plan = plan_handoff(num_tokens, first_tokens=first, repair_window=repair)
    ranked = data.draw(st.lists(st.integers(0, num_tokens - 1), max_size=40))
    budget = data.draw(st.integers(plan.num_computed, num_tokens + 9))
    chosen = plan.with_selected(ranked, budget)
    assert chosen.contiguous == plan
    wanted = []
    for token in ranked:
        if (
            token in plan.mapped
            and token not in wanted
            and plan.num_computed + len(wanted) < budget
        ):
            wanted.append(token)
    assert list(chosen.selected) == sorted(wanted)
    assert chosen.num_computed == len(plan.first) + len(plan.repaired) + len(wanted) <= budget


def test_a_selection_that_cannot_be_is_refused() -> None:
    plan = plan_handoff(100, first_tokens=4, repair_window=32)
    with pytest.raises(InputError, match="Token 100 was selected; the prompt has the tokens 0 to"):
        plan.with_selected([5, 100], 50)
    with pytest.raises(InputError, match="budget is 35 tokens, but the plan computes 36"):
        plan.with_selected([5], 35)


def test_milliseconds_become_tokens() -> None:
    cost = RepairCost(pass_ms=4.0, token_ms=0.25)
    assert [cost.max_computed(ms) for ms in (0.0, 4.0, 4.49, 4.5, 14.1)] == [1, 1, 1, 2, 40]
    for wrong in ((-1.0, 1.0), (1.0, 0.0)):
        with pytest.raises(InputError, match="measure a pass of few and of many"):
            RepairCost(*wrong)


def test_chunk_boundaries_come_heads_first() -> None:
    assert chunk_boundaries(20, 8) == [8, 16]
    assert chunk_boundaries(18, 8, 3) == [8, 16, 9, 17, 10]
    assert chunk_boundaries(3, 1, 2) == [1, 2]
    assert chunk_boundaries(8, 8) == []
    with pytest.raises(InputError, match="tokens_per_chunk must be at least 1"):
        chunk_boundaries(20, 0)
