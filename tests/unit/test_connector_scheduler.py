"""The scheduler's half: the formula, the orders, the salt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from connector_engine import SIZE, SOURCE, Offers, TrueEngine, identity
from scheduler_case import PROMPT, make, map_with_sinks, offered, running

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.connector.blocks import Offer
from trtllm_kvmap.inject.connector.orders import FailedLoad
from trtllm_kvmap.inject.connector.scheduler import RequestView


@pytest.fixture(scope="module")
def kvmap(random_model: Callable) -> KvMap:
    """Knows the sinks of prompts that begin 7, 7, 7."""
    return map_with_sinks(random_model)


@pytest.mark.parametrize("window", [0, 1, 3, 4, 5, 29, 30, 40])
@pytest.mark.parametrize("computed", [0, 4, 12, 28])
def test_matched_tokens_follow_the_formula(window: int, computed: int, kvmap: KvMap) -> None:
    offers = Offers()
    scheduler = make(kvmap, offers, window=window)
    salt = offered(offers, PROMPT)
    # The last token is always the target's, so a window of 0 is one of 1.
    formula = max(0, (30 - max(window, 1)) // SIZE * SIZE - computed)
    assert scheduler.match(RequestView("r", PROMPT, salt), computed) == formula


@pytest.mark.parametrize("read", [0, 3, 4, 11, 30])
def test_no_more_is_matched_than_the_source_has_read(read: int, kvmap: KvMap) -> None:
    offers = Offers()
    scheduler = make(kvmap, offers)
    salt = offered(offers, (*PROMPT[:read], 99, 99, 99, 99))
    assert scheduler.match(RequestView("r", PROMPT, salt), 0) == min(read // SIZE * SIZE, 24)
    status = scheduler.status("r")
    assert (status.state == "applied") == (read >= SIZE), status


def test_orders_follow_the_blocks_as_they_come(kvmap: KvMap) -> None:
    """Blocks in three calls, one of them -1; each token is ordered once, with all blocks so far."""
    offers = Offers()
    scheduler = make(kvmap, offers)
    prompt = (7, 7, 7, *PROMPT)
    salt = offered(offers, prompt, exact=1)
    assert scheduler.match(RequestView("r", prompt, salt), 4) == 24
    scheduler.allocated("r", [5])
    assert scheduler.take_orders() == ()  # the block of what is computed already
    scheduler.allocated("r", [9, -1])
    (first,) = scheduler.take_orders()
    assert (first.first, first.last, first.table.block_ids) == (4, 12, (5, 9, -1))
    assert first.block_ids == (9,)
    assert (first.spliced, first.sink, first.token_ids) == (1, 2, prompt[:12])
    assert scheduler.take_orders() == ()
    scheduler.allocated("r", [3, 2, 1, 0, 8, 6])
    (second,) = scheduler.take_orders()
    assert (second.first, second.last, second.block_ids) == (12, 28, (3, 2, 1, 0))
    assert scheduler.take_orders() == ()


def test_counts_say_where_every_token_came_from(kvmap: KvMap) -> None:
    offers = Offers()
    engine = TrueEngine(make(kvmap, offers, first=3))
    prompt = (7, 7, *PROMPT)
    salt = offered(offers, prompt)
    status = engine.serve(RequestView("r", prompt, salt)).status
    counts = (status.sink, status.sink_missed, status.mapped, status.matched, status.computed)
    assert counts == (2, 1, 26, 28, 4)
    assert not offers.held, "the source's blocks are still held"
    # What was mapped is found again by the same hand-over, and by nobody else.
    again = engine.serve(RequestView("s", prompt, salt, handoff=salt)).status
    assert (again.state, again.already_exact, again.already_approximate) == ("applied", 0, 28)
    other = engine.serve(RequestView("t", prompt, None))
    assert (other.matched, other.status) == (0, None)


def test_an_exact_prefix_is_counted_as_exact(kvmap: KvMap) -> None:
    offers = Offers()
    engine = TrueEngine(make(kvmap, offers))
    salt = identity().salt
    first = engine.serve(RequestView("a", PROMPT[:9], salt, handoff=salt), answer=(1, 2, 3, 4))
    assert first.status.state == "fallback_reprefill"
    turn = (*PROMPT[:9], 1, 2, 3, 4, *PROMPT)
    offered(offers, turn)
    second = engine.serve(RequestView("b", turn, salt))
    assert (second.status.already_exact, second.status.already_approximate) == (12, 0)
    assert (second.status.mapped, second.orders[0].first) == (28, 12)
    third = engine.serve(RequestView("c", (*turn, 5, 5), salt, handoff=salt))
    assert (third.status.already_exact, third.status.already_approximate) == (12, 28 + 4 - 4)


@pytest.mark.parametrize(
    ("salt", "handoff", "words"),
    [(None, "own", "send HandoffIdentity.salt"), ("x", "own", "send HandoffIdentity.salt")],
)
def test_the_salt_must_be_the_hand_overs(
    salt: str | None, handoff: str, words: str, kvmap: KvMap
) -> None:
    offers = Offers()
    engine = TrueEngine(make(kvmap, offers))
    own = offered(offers, PROMPT)
    served = engine.serve(RequestView("r", PROMPT, salt, handoff=own))
    assert (served.matched, served.orders, served.status.state) == (0, [], "unsupported")
    assert words in served.status.reason
    assert own in offers.held, "the hand-over was not used, and is still to be asked for"


@pytest.mark.parametrize(
    ("offer", "words"),
    [
        (Offer(identity(kvmap_digest="other"), PROMPT, SOURCE), "another map"),
        (Offer(identity(), PROMPT, Fingerprint("c", "other", "t")), "another source"),
    ],
)
def test_an_offer_that_does_not_fit_is_unsupported(offer: Offer, words: str, kvmap: KvMap) -> None:
    offers = Offers()
    scheduler = make(kvmap, offers)
    assert scheduler.match(RequestView("r", PROMPT, offers.put(offer)), 0) == 0
    status = scheduler.status("r")
    assert status.state == "unsupported"
    assert words in status.reason


def test_a_plan_stays_when_the_request_was_preempted(kvmap: KvMap) -> None:
    offers = Offers()
    scheduler = make(kvmap, offers)
    salt = offered(offers, PROMPT)
    view = RequestView("r", PROMPT, salt)
    # No room yet: asked again, with another number of tokens in the cache.
    assert (scheduler.match(view, 0), scheduler.match(view, 8)) == (24, 16)
    scheduler.allocated("r", range(8))
    (before,) = scheduler.take_orders()
    assert (before.first, before.last) == (8, 24)
    assert scheduler.match(view, 12) == 12
    assert scheduler.status("r").already_approximate == 8, "counts are those of the first start"
    scheduler.allocated("r", [20, 21, 22, 23, 24, 25, 26, 27])
    (after,) = scheduler.take_orders()
    assert (after.first, after.last, after.block_ids) == (12, 24, (23, 24, 25))


def test_failed_and_declined_loads_leave_the_target_its_own(kvmap: KvMap) -> None:
    offers = Offers()
    scheduler = make(kvmap, offers)
    salt = offered(offers, PROMPT)
    for end in ("failed", "declined"):
        scheduler.match(RequestView(end, PROMPT, salt), 0)
        scheduler.allocated(end, range(8))
    scheduler.declined("declined", "the engine reads no cache")
    (order,) = scheduler.take_orders()
    scheduler.failed(FailedLoad("failed", order.block_ids, "the source is gone"))
    for end, reason in (("failed", "gone"), ("declined", "reads no cache")):
        status = scheduler.status(end)
        assert (status.state, status.matched, status.computed) == ("fallback_reprefill", 0, 30)
        assert reason in status.reason
        assert scheduler.match(RequestView(end, PROMPT, salt), 0) == 0
    scheduler.failed(FailedLoad("unknown", (), ""))  # it was cancelled meanwhile
    assert scheduler.finished("failed", PROMPT) is not None
    assert salt in offers.held, "the other request may still need it"
    assert scheduler.finished("declined", PROMPT) is not None
    assert not offers.held
    assert scheduler.finished("declined", PROMPT) is None


def test_a_request_that_was_offered_nothing_cannot_decline(kvmap: KvMap) -> None:
    offers = Offers()
    scheduler = make(kvmap, offers)
    salt = offered(offers, PROMPT)
    assert running(scheduler, "first", salt)
    scheduler.finished("first", PROMPT)
    for name, own in (("continues", salt), ("unsupported", None)):
        scheduler.match(RequestView(name, PROMPT, own, handoff=salt), 28)
        before = scheduler.status(name)
        scheduler.declined(name, "the engine reads no cache")
        scheduler.failed(FailedLoad(name, (), "gone") if own is None else FailedLoad("x", (), ""))
        assert scheduler.status(name) == before
        assert before.state == ("applied" if own else "unsupported")


def test_bad_counts_are_refused(kvmap: KvMap) -> None:
    for counts in ({"window": -1}, {"first": -1}):
        with pytest.raises(InputError, match="must not be negative"):
            make(kvmap, Offers(), **counts)
