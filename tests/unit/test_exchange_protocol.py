"""The two state machines against every order of events, without sockets, clocks or memory.

The model of the world here: a wire in each direction that keeps order, may be cut at any time, and
delivers when it likes; two clocks that run at one pace from different zeros; transfers that end
when they like. What must hold is stated on what the machines did, not on their own state.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from exchange_cases import make_pool, offer_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trtllm_kvmap.exchange.in_process import InProcessTransport
from trtllm_kvmap.exchange.messages import Accept, Blocks, End, Message, Reason
from trtllm_kvmap.exchange.source_end import Free, Send, SourceEnd, SourceState
from trtllm_kvmap.exchange.target_end import Read, Refusal, TargetEnd, TargetState

OFFER = offer_of(make_pool(9), InProcessTransport(), lease_seconds=8.0)
BLOCK_IDS = (6, 0, 3, 8, 1)
ANSWER_SECONDS, WAIT_SECONDS = 5.0, 20.0
AHEAD = 1000.0  # the target's clock, ahead of the source's


class Exchange(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.source = SourceEnd(OFFER, answer_seconds=ANSWER_SECONDS)
        self.target = TargetEnd(
            "r1", lambda offer: self.refusal, now=AHEAD, wait_seconds=WAIT_SECONDS
        )
        self.refusal: Refusal | None = None
        self.to_target: list[Message] = []
        self.to_source: list[Message] = []
        self.cut = False
        self.reading: dict[int, int] = {}  # transfers under way: first block -> how many
        self.read = 0  # blocks read and found intact
        self.frees = 0
        self.freed_at = 0.0
        self.ends_from_target = 0
        self.do_source(self.source.start(self.now))

    def do_source(self, actions: list[Send | Free]) -> None:
        for action in actions:
            if isinstance(action, Free):
                self.frees += 1
                self.freed_at = self.now
                # The heart of it: at this moment nobody reads, or the lease is over.
                assert not self.reading or self.now >= self.lease_end
            elif not self.cut:
                self.to_target.append(action.message)

    def do_target(self, actions: list[Send | Read]) -> None:
        for action in actions:
            if isinstance(action, Read):
                # No read begins of blocks that were freed, whatever the wire had delayed.
                assert not self.frees
                assert self.now < self.lease_end
                self.reading[action.blocks.first] = len(action.blocks.block_ids)
                continue
            if isinstance(action.message, Accept):
                self.accepted = self.now
            if isinstance(action.message, End):
                self.ends_from_target += 1
                assert not self.reading, "an End while something is read"
            if not self.cut:
                self.to_source.append(action.message)

    accepted = float("inf")

    @property
    def lease_end(self) -> float:
        """Of the target's lease: from its Accept on, which is before the source's."""
        return self.accepted + OFFER.lease_ms / 1000

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.9, 4.1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.do_target(self.target.tick(AHEAD + self.now))
        self.do_source(self.source.tick(self.now))

    @precondition(lambda self: self.to_target and not self.cut)
    @rule()
    def the_target_hears(self) -> None:
        self.do_target(self.target.received(self.to_target.pop(0), AHEAD + self.now))

    @precondition(lambda self: self.to_source and not self.cut)
    @rule()
    def the_source_hears(self) -> None:
        self.do_source(self.source.received(self.to_source.pop(0), self.now))

    @precondition(lambda self: self.source.wants_blocks)
    @rule(count=st.integers(1, 5))
    def blocks_are_ready(self, count: int) -> None:
        ids = BLOCK_IDS[self.source.announced : self.source.announced + count]
        self.do_source(self.source.ready(ids, [7] * len(ids)))

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), how=st.sampled_from(["intact", "intact", "intact", "corrupt", "failed"]))
    def a_transfer_ends(self, data: st.DataObject, how: str) -> None:
        first = data.draw(st.sampled_from(sorted(self.reading)))
        count = self.reading.pop(first)
        if how == "failed":
            self.do_target(self.target.read_failed("broken", AHEAD + self.now))
            return
        self.read += count if how == "intact" else 0
        self.do_target(self.target.read_done(count, how == "intact", AHEAD + self.now))

    @precondition(lambda self: self.target.state is TargetState.WAITING)
    @rule()
    def the_target_has_no_room(self) -> None:
        self.refusal = Refusal(Reason.NO_MEMORY, "full")

    @rule()
    def the_target_is_cancelled(self) -> None:
        self.do_target(self.target.cancel(AHEAD + self.now))

    @rule()
    def the_source_is_cancelled(self) -> None:
        self.do_source(self.source.cancel(self.now))

    @rule()
    def the_wire_is_cut(self) -> None:
        self.cut = True
        self.do_target(self.target.peer_lost("cut", AHEAD + self.now))
        self.do_source(self.source.peer_lost("cut", self.now))

    @rule(
        message=st.sampled_from(
            [
                OFFER,
                replace(OFFER, request_id="other"),
                Accept("r1"),
                Accept("other"),
                Blocks("r1", 0, (6, 6), (7, 7)),
                Blocks("r1", 0, (9,), (7,)),
                Blocks("r1", 4, (1, 2), (7, 7)),
                End("r1", Reason.CANCELLED, ""),
                End("r1", Reason.COMPLETE, ""),
            ]
        )
    )
    def the_target_hears_nonsense(self, message: Message) -> None:
        """Whatever it is told, it completes only what was read. (The source of such messages is not
        ours, so the rest of this run says nothing about the source's blocks.)
        """
        other = TargetEnd("r1", lambda offer: None, now=0.0, wait_seconds=WAIT_SECONDS)
        for known in self.heard:
            other.received(known, 1.0)
        other.received(message, 1.0)
        assert other.reason is not Reason.COMPLETE

    heard: tuple[Message, ...] = (OFFER, Blocks("r1", 0, (6, 0), (7, 7)))

    @invariant()
    def freed_once_and_only_in_the_end(self) -> None:
        assert self.frees == (self.source.state is SourceState.ENDED)

    @invariant()
    def complete_means_that_every_block_was_read(self) -> None:
        if self.target.reason is Reason.COMPLETE:
            assert self.read == OFFER.num_blocks
        if self.source.reason is Reason.COMPLETE:
            assert self.target.reason is Reason.COMPLETE

    @invariant()
    def one_end_at_most(self) -> None:
        assert self.ends_from_target <= 1

    def teardown(self) -> None:
        """However it went: when time passes, both sides end and the blocks are free."""
        for _ in range(3):
            self.time_passes(WAIT_SECONDS)
        assert self.target.state is TargetState.ENDED
        assert self.source.state is SourceState.ENDED
        assert self.target.reason is not None
        assert self.source.reason is not None


Exchange.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestEveryOrderOfEvents = Exchange.TestCase


def reading_target() -> TargetEnd:
    target = TargetEnd("r1", lambda offer: None, now=0.0, wait_seconds=WAIT_SECONDS)
    assert target.received(OFFER, 0.0) == [Send(Accept("r1"))]
    return target


def test_the_course_of_an_exchange_where_nothing_goes_wrong() -> None:
    source, target = SourceEnd(OFFER, answer_seconds=ANSWER_SECONDS), reading_target()
    assert source.start(0.0) == [Send(OFFER)]
    assert not source.wants_blocks
    assert source.received(Accept("r1"), 1.0) == []
    (sent,) = source.ready(BLOCK_IDS[:2], (7, 8))
    first = Blocks("r1", 0, (6, 0), (7, 8))
    assert sent == Send(first)
    (rest,) = source.ready(BLOCK_IDS[2:], (9, 10, 11))
    assert not source.wants_blocks
    assert target.received(first, 1.0) == [Read(first)]
    assert target.received(rest.message, 1.0) == [Read(rest.message)]
    assert target.read_done(3, True, 2.0) == []
    end = End("r1", Reason.COMPLETE, "")
    assert target.read_done(2, True, 2.0) == [Send(end)]
    assert source.received(end, 3.0) == [Free()]
    assert source.reason is target.reason is Reason.COMPLETE


def test_a_block_is_read_once() -> None:
    target = reading_target()
    target.received(Blocks("r1", 0, (6,), (7,)), 1.0)
    target.read_done(1, True, 1.0)
    (end,) = target.received(Blocks("r1", 1, (6,), (7,)), 1.0)
    assert end.message.reason is Reason.MALFORMED


def test_complete_before_all_blocks_were_there_is_no_completion() -> None:
    source = SourceEnd(OFFER, answer_seconds=ANSWER_SECONDS)
    source.start(0.0)
    source.received(Accept("r1"), 1.0)
    source.ready(BLOCK_IDS[:4], (7,) * 4)
    assert source.received(End("r1", Reason.COMPLETE, ""), 2.0) == [Free()]
    assert source.reason is Reason.MALFORMED


def test_a_dead_target_keeps_its_blocks_until_the_lease_is_over() -> None:
    source = SourceEnd(OFFER, answer_seconds=ANSWER_SECONDS)
    source.start(0.0)
    source.received(Accept("r1"), 1.0)
    source.ready(BLOCK_IDS[:1], (7,))
    assert source.peer_lost("closed", 2.0) == []
    assert source.tick(8.9) == []
    assert source.tick(9.0) == [Free()]
    assert source.reason is Reason.PEER_LOST


def test_a_target_that_knows_no_block_holds_none() -> None:
    source = SourceEnd(OFFER, answer_seconds=ANSWER_SECONDS)
    source.start(0.0)
    source.received(Accept("r1"), 1.0)
    assert source.peer_lost("closed", 2.0) == [Free()]


def test_a_cancelled_source_waits_for_the_targets_end() -> None:
    source, target = SourceEnd(OFFER, answer_seconds=ANSWER_SECONDS), reading_target()
    source.start(0.0)
    source.received(Accept("r1"), 1.0)
    (blocks,) = source.ready(BLOCK_IDS[:1], (7,))
    target.received(blocks.message, 1.0)
    (end,) = source.cancel(2.0)
    assert target.received(end.message, 2.0) == []  # a transfer is under way
    (answer,) = target.read_done(1, True, 3.0)
    assert (target.reason, answer.message.reason) == (Reason.CANCELLED, Reason.CANCELLED)
    assert source.received(answer.message, 3.0) == [Free()]


def test_the_target_stops_at_half_of_the_lease() -> None:
    target = reading_target()
    assert target.tick(3.9) == []
    (end,) = target.tick(4.0)
    assert end.message.reason is Reason.TIMEOUT


@pytest.mark.parametrize(
    "blocks",
    [
        Blocks("r1", 1, (6,), (7,)),
        Blocks("r1", 0, (6, 6), (7, 7)),
        Blocks("r1", 0, (9,), (7,)),
        Blocks("r1", 0, (0, 1, 2, 3, 4, 5), (7,) * 6),
    ],
    ids=["not the next", "one id twice", "outside the pool", "more than offered"],
)
def test_blocks_that_were_not_offered_are_not_read(blocks: Blocks) -> None:
    target = reading_target()
    (end,) = target.received(blocks, 1.0)
    assert end.message.reason is Reason.MALFORMED
