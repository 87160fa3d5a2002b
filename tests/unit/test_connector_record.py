"""Which of a conversation's blocks the connector takes for exact: never one that stands on mapped
tokens, whatever failed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from connector_engine import Offers, TrueEngine, identity
from hypothesis import given
from hypothesis import strategies as st
from scheduler_case import PROMPT, make, map_with_sinks, offered, running

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.inject.connector.orders import FailedLoad
from trtllm_kvmap.inject.connector.scheduler import HandoffScheduler, RequestView


@pytest.fixture(scope="module")
def kvmap(random_model: Callable) -> KvMap:
    """Knows the sinks of prompts that begin 7, 7, 7."""
    return map_with_sinks(random_model)


def exact_now(scheduler: HandoffScheduler, salt: str, computed: int) -> int:
    """How many of ``computed`` tokens a new request would be told are exact."""
    scheduler.match(RequestView("new", PROMPT, salt, handoff=salt), computed)
    return scheduler.finished("new", PROMPT[:1]).already_exact


def test_blocks_are_approximate_from_the_moment_they_are_ordered(kvmap: KvMap) -> None:
    """They were exact once, and were evicted since."""
    offers = Offers()
    scheduler = make(kvmap, offers)
    salt = identity().salt
    running(scheduler, "exact", salt)
    scheduler.finished("exact", PROMPT)
    assert exact_now(scheduler, salt, 28) == 28
    offered(offers, PROMPT)
    assert running(scheduler, "mapped", salt)
    assert exact_now(scheduler, salt, 28) == 0


def test_blocks_of_which_nothing_is_known_stay_approximate(kvmap: KvMap) -> None:
    """The record was forgotten; the engine's cache was not."""
    scheduler, salt = make(kvmap, Offers()), identity().salt
    running(scheduler, "goes on", salt, computed=12)
    scheduler.finished("goes on", PROMPT)
    assert exact_now(scheduler, salt, 28) == 0


def test_a_failure_does_not_make_older_blocks_exact(kvmap: KvMap) -> None:
    offers = Offers()
    scheduler = make(kvmap, offers, window=12)
    salt = offered(offers, PROMPT)
    assert running(scheduler, "first", salt)
    scheduler.finished("first", PROMPT)
    offered(offers, PROMPT)
    (order,) = running(scheduler, "second", salt, computed=8)
    scheduler.failed(FailedLoad("second", order.block_ids, "gone"))
    scheduler.finished("second", PROMPT)
    assert exact_now(scheduler, salt, 28) == 0


def test_a_failure_beside_a_load_that_held_makes_nothing_exact(kvmap: KvMap) -> None:
    """Two requests of one hand-over: the engine may keep the blocks of either."""
    offers = Offers()
    scheduler = make(kvmap, offers)
    salt = offered(offers, PROMPT)
    assert running(scheduler, "held", salt)
    (order,) = running(scheduler, "lost", salt)
    scheduler.failed(FailedLoad("lost", order.block_ids, "gone"))
    scheduler.finished("lost", PROMPT)
    assert exact_now(scheduler, salt, 28) == 0


def test_a_failure_alone_leaves_exact_blocks(kvmap: KvMap) -> None:
    offers = Offers()
    scheduler = make(kvmap, offers)
    salt = offered(offers, PROMPT)
    (order,) = running(scheduler, "lost", salt)
    scheduler.failed(FailedLoad("lost", order.block_ids, "gone"))
    scheduler.finished("lost", PROMPT)
    assert exact_now(scheduler, salt, 28) == 28


def test_a_failure_leaves_what_an_older_request_computed_on_mapped_tokens(kvmap: KvMap) -> None:
    """Blocks behind the failed one, of an earlier turn, whose own first block was evicted."""
    offers = Offers()
    engine = TrueEngine(make(kvmap, offers, first=0))
    salt = offered(offers, PROMPT[:4])
    engine.serve(RequestView("older", PROMPT[:9], salt))
    del engine.blocks[salt, PROMPT[:4]]
    offered(offers, PROMPT[:4])
    engine.serve(RequestView("lost", PROMPT[:9], salt), fail=True, keep_old=True)
    assert engine.hits(salt, PROMPT[:9]) == (8, 4)
    assert exact_now(engine.scheduler, salt, 8) <= 4


def test_a_load_before_the_failed_one_stands(kvmap: KvMap) -> None:
    offers = Offers()
    scheduler = make(kvmap, offers, first=0)
    salt = offered(offers, PROMPT)
    scheduler.match(RequestView("r", PROMPT, salt), 0)
    scheduler.allocated("r", [0, 1])
    (held,) = scheduler.take_orders()
    scheduler.allocated("r", [2, 3, 4, 5, 6, 7])
    (lost,) = scheduler.take_orders()
    scheduler.failed(FailedLoad("r", lost.block_ids, "gone"))
    status = scheduler.status("r")
    assert status is not None
    assert (status.state, status.mapped) == ("fallback_reprefill", held.last)
    scheduler.finished("r", PROMPT)
    assert exact_now(scheduler, salt, 28) == 0


TURNS = st.lists(
    st.fixed_dictionaries(
        {
            "conversation": st.integers(0, 1),
            "offer": st.sampled_from([True, True, False]),
            "read": st.integers(0, 60),
            "exact": st.integers(0, 9),
            "grow": st.integers(1, 12),
            "restart": st.booleans(),
            "answer": st.integers(0, 9),
            "salted": st.sampled_from([True, True, True, False]),
            "fail": st.booleans(),
            "keep_old": st.booleans(),
            "chunk": st.integers(1, 3),
            "preempt": st.booleans(),
            "evict": st.integers(0, 3),
        }
    ),
    max_size=12,
)


@given(TURNS)
def test_the_record_never_claims_what_is_not_exact(kvmap: KvMap, turns: list[dict]) -> None:
    """Any order of hand-overs, failures, preemptions and evictions over two conversations."""
    offers = Offers()
    engine = TrueEngine(make(kvmap, offers))
    texts = {0: (7, 7, 7), 1: (7, 7, 7)}
    for number, turn in enumerate(turns):
        talk = turn["conversation"]
        text = (7, 7, 7) if turn["restart"] else texts[talk]
        text = (*text, *(50 + i for i in range(turn["grow"])))
        salt = identity(str(talk)).salt
        if turn["offer"]:
            read = text[: turn["read"]]
            offered(offers, read, str(talk), min(turn["exact"], len(read)))
        for victim in sorted(engine.blocks, key=repr)[: turn["evict"]]:
            del engine.blocks[victim]
        view = RequestView(str(number), text, salt if turn["salted"] else None, handoff=salt)
        count, exact = engine.hits(view.salt, text)
        served = engine.serve(
            view,
            tuple(60 + i for i in range(turn["answer"])),
            fail=turn["fail"],
            keep_old=turn["keep_old"],
            chunk=turn["chunk"],
            preempt=turn["preempt"],
        )
        status = served.status
        assert status.already_exact <= exact
        assert status.already_exact + status.already_approximate == count
        assert status.computed >= 1
        if not turn["salted"]:
            assert (status.state, served.orders) == ("unsupported", [])
            assert status.already_exact == count == exact, "a mapped block answered without a salt"
        covered = [token for o in served.orders for token in range(o.first, o.last)]
        assert covered == list(range(count, count + served.matched))
        texts[talk] = (*text, *(60 + i for i in range(turn["answer"])))
