"""A conversation's hot standby: its cache is kept mapped while another model speaks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from caches import random_tokens, stacked
from handmade_maps import copy_map, random_map
from session_case import conversation

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.session.session import Session
from trtllm_kvmap.errors import InputError


def test_a_standby_changes_no_word_and_leaves_only_the_repair(
    random_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def talk(standby: bool) -> tuple[list[int], Session]:
        session = conversation(random_model, copy_map)
        session.add(random_tokens(60))
        said = session.generate(5)
        for to in ("b", "a", "b"):
            if standby:
                session.mirror(to, tokens_per_block=16)
            said += session.generate(40)
            session.add(random_tokens(7, seed=3))
            said += session.generate(3)
            if standby:
                bridge = session._bridge(to)
                monkeypatch.setattr(bridge.mapper, "map_kv", None)
            session.switch(to)
            monkeypatch.undo()
            said += session.generate(5)
        return said, session

    said, plain = talk(standby=False)
    mirrored, session = talk(standby=True)
    assert mirrored == said
    assert session.hops == plain.hops
    for name, held in plain.held.items():
        assert session.held[name].mapped == held.mapped
        assert torch.equal(stacked(session.held[name].cache), stacked(held.cache))


def test_a_standby_ends_with_the_switch(random_model: Callable) -> None:
    def talk(standby: bool) -> Session:
        session = conversation(random_model, copy_map)
        session.add(random_tokens(60))
        session.generate(5)
        if standby:
            session.mirror("b", tokens_per_block=8)
        for to in "bab":
            session.generate(20)
            session.switch(to, repair_window=8)
        return session

    assert torch.equal(stacked(talk(True).held["b"].cache), stacked(talk(False).held["b"].cache))


def test_a_reply_does_not_fail_for_a_standby_that_cannot_follow(random_model: Callable) -> None:
    """The source may write 512 tokens, the target 64: the switch is refused, the reply is not."""
    a, b = random_model(seed=0), random_model(seed=1, max_positions=64)
    session = Session({"a": a, "b": b}, [KvBridge(random_map(a, b), source=a, target=b)])
    session.add(random_tokens(50))
    session.mirror("b", tokens_per_block=8)
    assert len(session.generate(40)) == 40
    with pytest.raises(InputError, match=r"takes 90 positions; .* allows 64"):
        session.switch("b")
    with pytest.raises(InputError, match="allows 64"):
        session.mirror("b")
    assert session.active == "a"


def test_a_standby_forgets_what_an_upgrade_has_replaced(random_model: Callable) -> None:
    """After an upgrade of the active model the standby holds maps of its exact entries."""

    def talk(standby: bool) -> torch.Tensor:
        session = conversation(random_model)
        session.add(random_tokens(80))
        session.generate(4)
        session.switch("b")
        session.held.pop("a")  # so that everything is mapped back
        if standby:
            session.mirror("a")
        session.generate(40)
        while session.upgrade(chunk_tokens=40).approximate:
            session.generate(3)
        return stacked(session.switch("a").cache)

    torch.testing.assert_close(talk(standby=True), talk(standby=False), rtol=0, atol=2e-5)


def test_end_tokens_end_a_reply_with_a_standby_too(random_model: Callable) -> None:
    free = conversation(random_model)
    free.add(random_tokens(50))
    reply = free.generate(30)
    end = reply[20]
    session = conversation(random_model)
    session.add(random_tokens(50))
    session.mirror("b", tokens_per_block=8)
    assert session.generate(30, eos_token_ids=[end]) == reply[: reply.index(end) + 1]


def test_an_interrupted_reply_leaves_no_trace_in_the_standby(
    random_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = conversation(random_model, copy_map)
    session.add(random_tokens(60))
    session.mirror("b", tokens_per_block=8)
    expected = conversation(random_model, copy_map)
    expected.add(random_tokens(60))

    def interrupted(*args: object, **kwargs: object) -> list[int]:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(1)
        return generate(*args, **kwargs)

    calls: list[int] = []
    monkeypatch.setattr("trtllm_kvmap.decode.session.session.generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.generate(40)
    monkeypatch.undo()
    assert session.token_ids == random_tokens(60)
    for talk in (session, expected):  # another text than the reply that was broken off
        talk.add(random_tokens(40, seed=9))
        talk.generate(3)
    # One has read 60 + 40 tokens, the other 100 at once: equal but for rounding.
    mirrored, plain = stacked(session.switch("b").cache), stacked(expected.switch("b").cache)
    torch.testing.assert_close(mirrored, plain, rtol=0, atol=2e-5)
