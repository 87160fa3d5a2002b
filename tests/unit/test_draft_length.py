"""What the draft-length policy promises, over every way a request can go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_kvmap.decode.speculation.draft_length import DraftLength
from trtllm_kvmap.errors import InputError


@st.composite
def policies(draw: st.DrawFn) -> DraftLength:
    shortest = draw(st.integers(1, 12))
    return DraftLength(shortest, draw(st.integers(shortest, 40)))


@st.composite
def outcomes(draw: st.DrawFn) -> tuple[DraftLength, int, int, int]:
    """A policy, a length within its bounds, and what became of a block of that length."""
    policy = draw(policies())
    length = draw(st.integers(policy.shortest, policy.longest))
    proposed = draw(st.integers(0, length))
    return policy, length, proposed, draw(st.integers(0, proposed))


@given(outcomes())
def test_one_outcome(case: tuple[DraftLength, int, int, int]) -> None:
    policy, length, proposed, accepted = case
    following = policy.following(length, proposed, accepted)
    assert policy.shortest <= following <= policy.longest
    assert following == policy.following(length, proposed, accepted), "not a function"
    if accepted < proposed or proposed < length:
        assert following <= length, "grown without a whole block accepted"
    else:
        assert following == min(2 * length, policy.longest)
    if accepted * 2 >= proposed:
        assert following >= length, "shrunk although half was accepted"
    else:
        assert following < length or length == policy.shortest
    if accepted < proposed:
        assert following <= policy.following(length, proposed, accepted + 1), "not monotonous"


@given(policies(), st.integers(0, 40))
def test_agreement_reaches_the_longest_block_and_disagreement_the_shortest(
    policy: DraftLength, start: int
) -> None:
    up = down = min(max(start, policy.shortest), policy.longest)
    for _ in range(7):  # 2 ** 6 > 40
        up, down = policy.following(up, up, up), policy.following(down, down, 0)
    assert (up, down) == (policy.longest, policy.shortest)


@given(st.integers(1, 24), st.data())
def test_equal_bounds_are_a_fixed_length(length: int, data: st.DataObject) -> None:
    proposed = data.draw(st.integers(0, length))
    accepted = data.draw(st.integers(0, proposed))
    assert DraftLength(length, length).following(length, proposed, accepted) == length


def test_the_default_is_4_to_24() -> None:
    policy, length, lengths = DraftLength(), 4, []
    for accepted in (4, 8, 16, 24, 3, 12, 0, 0, 1):
        length = policy.following(length, length, accepted)
        lengths.append(length)
    assert lengths == [8, 16, 24, 24, 12, 24, 12, 6, 4]


def test_bounds_and_confidence_are_checked() -> None:
    for bounds in ((0, 4), (5, 4)):
        with pytest.raises(InputError, match="1 <= shortest <= longest"):
            DraftLength(*bounds)
    with pytest.raises(InputError, match=r"probability from 0 to 1, got 1\.5"):
        DraftLength(confidence=1.5)
