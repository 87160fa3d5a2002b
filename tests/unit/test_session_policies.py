"""What a conversation promises about standby, upgrade, budget and guard."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from caches import random_tokens, stacked
from handmade_maps import copy_map, random_map

from trtllm_kvmap.decode.bridge import Handoff, KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.decode.guard.guarded import hop_guard
from trtllm_kvmap.decode.hop import Verdict
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.session.session import Session
from trtllm_kvmap.decode.session.session_file import save_session
from trtllm_kvmap.decode.session.upgrade import Upgrade
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import HfCache, fork
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.rotary import applying_rows


def conversation(
    random_model: Callable, make_map: Callable = random_map, **options: object
) -> Session:
    a, b = random_model(seed=0), random_model(seed=1)
    bridges = [KvBridge(make_map(x, y), source=x, target=y) for x, y in ((a, b), (b, a))]
    return Session({"a": a, "b": b}, bridges, **options)


def native(loaded: LoadedModel, ids: list[int], chunks: list[int]) -> HfCache:
    cache = None
    for chunk in torch.tensor(ids[: sum(chunks)]).split(chunks):
        cache = prefill(loaded, chunk, cache).cache
    return cache


# --- Standby -------------------------------------------------------------------------------------


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


# --- Upgrade -------------------------------------------------------------------------------------


def test_an_upgraded_conversation_goes_on_as_the_model_alone(random_model: Callable) -> None:
    session = conversation(random_model)
    session.add(random_tokens(70))
    session.generate(4)
    session.switch("b", first_tokens=4, repair_window=16)
    session.generate(20)
    left = [session.upgrade(chunk_tokens=30).approximate for _ in range(4)]
    assert left == [59, 29, 0, 0], "93 entries, of which 4 were exact"
    cache = native(session.models["b"], session.token_ids, [4, 30, 30, 29])
    assert torch.equal(stacked(session.held["b"].cache), stacked(cache))
    last = prefill(session.models["b"], session.token_ids[-1:], cache, logits_to_keep=1)
    assert session.generate(20) == generate(session.models["b"], cache, last.logits[-1], 20)
    assert session.held["b"].exact == session.held["b"].entries


def test_a_reply_is_taken_back_to_what_the_model_alone_says(random_model: Callable) -> None:
    session = conversation(random_model)
    session.add(random_tokens(70))
    session.generate(2)
    session.switch("b", repair_window=4)
    asked = len(session.token_ids)
    emitted = session.generate(10) + session.generate(14)
    loaded = session.models["b"]
    alone = loaded.model.generate(
        torch.tensor([session.token_ids[:asked]]), max_new_tokens=24, do_sample=False
    )[0, asked:].tolist()
    assert emitted != alone, "the map is so bad that the reply cannot be right"
    withdrawn: tuple[int, ...] = ()
    while (done := session.upgrade(chunk_tokens=9, verify=True)).approximate:
        withdrawn += done.withdrawn
    withdrawn += done.withdrawn
    same = next(i for i, (x, y) in enumerate(zip(emitted, alone, strict=True)) if x != y)
    assert withdrawn == tuple(emitted[same:])
    assert session.token_ids[asked:] == alone[: same + 1]
    assert {name: held.entries for name, held in session.held.items()} == {
        "a": 71,
        "b": len(session.token_ids) - 1,
    }
    session.generate(24 - same - 1)
    assert session.token_ids[asked:] == alone
    assert session.upgrade(verify=True) == Upgrade(0)


def test_an_answered_reply_is_not_taken_back(random_model: Callable) -> None:
    session = conversation(random_model)
    session.add(random_tokens(70))
    session.generate(2)
    session.switch("b")
    session.generate(20)
    session.add(random_tokens(5, seed=4))
    said = list(session.token_ids)
    while session.upgrade(verify=True).approximate:
        pass
    assert session.token_ids == said


# --- Drafts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("standby", [False, True])
def test_a_draft_changes_no_word_and_has_read_them_too(
    random_model: Callable, standby: bool
) -> None:
    """The model left behind proposes; afterwards both hold all but the last word, each as it reads
    it, and nothing is left to map when the conversation turns back.
    """

    def talk(draft: str | None) -> Session:
        session = conversation(random_model)
        session.add(random_tokens(70))
        session.generate(4)
        session.switch("b", repair_window=8)
        session.add(random_tokens(5, seed=2))  # which the model left behind has not read
        if standby:
            session.mirror("a", tokens_per_block=8)
        session.generate(30, draft=draft)
        session.generate(9, draft=draft)
        return session

    plain, drafted = talk(None), talk("a")
    assert drafted.token_ids == plain.token_ids
    assert len(drafted.reply) == 39
    verifier, helper = drafted.held["b"], drafted.held["a"]
    assert (verifier.entries, helper.entries) == (117, 117)
    assert (verifier.exact, verifier.mapped) == (plain.held["b"].exact, plain.held["b"].mapped)
    torch.testing.assert_close(
        stacked(verifier.cache), stacked(plain.held["b"].cache), rtol=0, atol=2e-5
    )
    assert (helper.exact, helper.mapped) == (117, ())
    own = native(drafted.models["a"], drafted.token_ids, [117])
    torch.testing.assert_close(stacked(helper.cache), stacked(own), rtol=0, atol=2e-5)
    for session in (plain, drafted):
        session.switch("a")
    assert [session.hops[-1].mapped for session in (plain, drafted)] == [118 - 73 - 32, 0]
    assert drafted.generate(5) == generate(
        drafted.models["a"],
        own,
        prefill(drafted.models["a"], drafted.token_ids[117:118], own).logits[-1],
        5,
    )


def test_a_drafted_reply_ends_where_a_plain_one_does(random_model: Callable) -> None:
    def talk(draft: str | None, **options: object) -> list[int]:
        session = conversation(random_model, copy_map)
        session.add(random_tokens(50))
        session.read()
        session.switch("b")
        return session.generate(30, draft=draft, **options)

    reply = talk("a")
    assert reply == talk(None)
    end = reply[20]
    assert talk("a", eos_token_ids=[end]) == reply[: reply.index(end) + 1]


def test_a_draft_that_cannot_be_is_refused(random_model: Callable) -> None:
    session = conversation(random_model)
    session.add(random_tokens(50))
    for name, sentence in (("b", "b is the active model"), ("c", "no model 'c'")):
        session.active = "b"
        with pytest.raises(InputError, match=sentence):
            session.generate(5, draft=name)
    short = random_model(seed=5, max_positions=60)
    session = Session({"a": session.models["a"], "short": short}, [])
    session.add(random_tokens(50))
    with pytest.raises(InputError, match="60"):
        session.generate(20, draft="short")
    assert (session.held, len(session.token_ids)) == ({}, 50)


# --- Budget and guard ----------------------------------------------------------------------------


def test_beyond_the_budget_the_target_reads_for_real(random_model: Callable) -> None:
    session = conversation(random_model, max_mapped_tokens=60)
    session.add(random_tokens(80))
    session.generate(4)
    session.switch("b")
    assert (session.hops[-1].outcome, session.mapped_tokens) == ("applied", 51)
    session.generate(40)
    session.switch("a", repair_window=8)
    hop = session.hops[-1]
    assert (hop.outcome, hop.kept, hop.exact, hop.mapped) == ("fallback_reprefill", 83, 83, 0)
    assert hop.reason == "84 mapped tokens would exceed the budget of 60"
    assert (session.held["a"].exact, session.mapped_tokens) == (124, 51)
    cache = native(session.models["a"], session.token_ids, [80, 1, 1, 1, 41])
    assert torch.equal(stacked(session.held["a"].cache), stacked(cache))
    # b keeps its 51 and may not be given more than 9.
    session.generate(20)
    session.switch("b", repair_window=8)
    assert session.hops[-1].outcome == "fallback_reprefill"
    assert (session.held["b"].exact, session.mapped_tokens) == (144, 0)


class Figures:
    """A guard that reads its figures from a list and keeps what it was shown."""

    def __init__(self, *drifts: float) -> None:
        self.drifts, self.shown = list(drifts), []

    def __call__(
        self, bridge: KvBridge, source_cache: HfCache, token_ids: Sequence[int], handoff: Handoff
    ) -> Verdict:
        self.shown.append((bridge.target.spec, len(token_ids), handoff.plan.mapped))
        drift = self.drifts.pop(0)
        return Verdict(drift, drift <= 1.0)


def test_a_guard_that_objects_makes_the_target_read(random_model: Callable) -> None:
    guard = Figures(0.25, 3.5)
    session = conversation(random_model, guard=guard)
    session.add(random_tokens(80))
    session.generate(4)
    session.switch("b")
    session.generate(40)
    session.switch("a", repair_window=8)
    assert [mapped for *_, mapped in guard.shown] == [range(1, 52), range(83, 116)]
    assert [(hop.outcome, hop.drift) for hop in session.hops] == [
        ("applied", 0.25),
        ("fallback_reprefill", 3.5),
    ]
    assert session.hops[-1].reason == "the guard measured a drift of 3.5"
    assert (session.held["a"].exact, session.held["a"].mapped) == (124, ())
    cache = native(session.models["a"], session.token_ids, [80, 1, 1, 1, 41])
    assert torch.equal(stacked(session.held["a"].cache), stacked(cache))


def test_a_figure_that_is_no_number_is_an_objection_and_can_be_saved(
    random_model: Callable, tmp_path: Path
) -> None:
    session = conversation(random_model, guard=Figures(float("nan")))
    session.add(random_tokens(80))
    session.read()
    session.switch("b")
    hop = session.hops[-1]
    assert (hop.outcome, hop.drift, "nan" in hop.reason) == ("fallback_reprefill", None, True)
    save_session(session, tmp_path / "s")


def test_the_guard_of_a_map_judges_the_switches_of_a_conversation(random_model: Callable) -> None:
    """By the loss of known tokens alone: a model handed over to itself stands, another falls."""
    guard = Guard(weights=(1.0, *[0.0] * 6), bias=0.0, limit=0.5, measured={})
    a, b = random_model(seed=0), random_model(seed=1)
    for standby in (False, True):
        for make_map, target, outcome in ((copy_map, a, "applied"), (random_map, b, "fallback")):
            bridge = KvBridge(make_map(a, target), source=a, target=target)
            session = Session({"a": a, "b": target}, [bridge], guard=hop_guard(guard))
            session.add(random_tokens(80))
            reply = session.generate(30)
            if standby:
                session.mirror("b")
            # What a says is likely to a; the other model has no reason to think so.
            session.switch("b", repair_window=16)
            assert session.hops[-1].outcome.startswith(outcome)
            assert abs(session.hops[-1].drift) < 1e-3 or target is b
            assert len(reply) == 30


# --- A long conversation -------------------------------------------------------------------------


def tensor_bytes() -> int:
    """The memory of all tensors that are alive, each storage once."""
    gc.collect()
    alive = [found for found in gc.get_objects() if type(found) is torch.Tensor]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}.values()
    )


def hundred_turns(session: Session) -> None:
    """Switch, say two words and answer with two, a hundred times; every token may cost each model
    one entry, however often the conversation turns.
    """
    session.add(random_tokens(40))
    session.generate(2)
    per_entry = sum(m.spec.kv_bytes_per_token(4) for m in session.models.values())
    sizes, lengths = [], []
    rope = session.models["a"].spec.rope  # b's as well
    for size in (64, 128, 256, 512):  # tables of angles have a fixed size from here on
        for dtype in (torch.float32, torch.float64):
            applying_rows(torch.tensor([size - 1]), rope, size, dtype)
    for turn in range(100):
        session.switch("ba"[turn % 2], repair_window=2)
        session.add(random_tokens(2, seed=turn))
        session.generate(2)
        if turn in (1, 99):
            sizes.append(tensor_bytes())
            lengths.append(len(session.token_ids))
    grown = (sizes[1] - sizes[0]) / per_entry
    print(f"grown by {grown:.1f} entries a model for {lengths[1] - lengths[0]} tokens")
    assert grown <= lengths[1] - lengths[0] + 4
    assert len(session.hops) == 100
    for name, held in session.held.items():
        ends = [end for m in held.mapped for end in (m.start, m.stop)]
        assert ends == sorted(ends), f"a token was mapped to {name} twice"


def test_a_hundred_turns_grow_by_the_caches_alone(random_model: Callable) -> None:
    bound, drifts = 1.0, [0.1, 0.1, 2.0, 0.1] * 25
    session = conversation(random_model, guard=Figures(*drifts))
    hundred_turns(session)
    drifted = [hop for hop in session.hops if hop.drift > bound]
    assert len(drifted) == 25
    assert all(hop.outcome == "fallback_reprefill" for hop in drifted)


def test_a_hundred_turns_under_a_guard_that_measures(random_model: Callable) -> None:
    """Losses, drift and recall of every hop; by the loss gap about half are taken back."""
    recalling = Guard((1.0, *[0.0] * 6, 1.0), bias=0.0, limit=1.8, measured={})
    guard = Guard((1.0, *[0.0] * 6), bias=0.0, limit=1.8, measured={}, recalling=recalling)
    session = conversation(random_model, guard=hop_guard(guard))
    hundred_turns(session)
    # Two repaired tokens that are one word twice have no spread to measure drift by: no figure.
    drifted = [hop.drift is None or hop.drift >= guard.limit for hop in session.hops]
    assert [hop.outcome == "fallback_reprefill" for hop in session.hops] == drifted
    assert 10 < sum(drifted) < 90
    assert sum(hop.drift is not None for hop in session.hops) > 90


def test_a_returning_model_has_its_own_cache_bit_for_bit_after_many_turns(
    random_model: Callable,
) -> None:
    session = conversation(random_model)
    session.add(random_tokens(60))
    session.generate(10)
    own = stacked(fork(session.held["a"].cache))
    for turn in range(20):
        session.switch("ba"[turn % 2], repair_window=2)
        session.generate(3)
    assert session.held["a"].exact == 69
    assert torch.equal(stacked(session.held["a"].cache)[..., :69, :], own)


def test_mistakes_leave_the_conversation_as_it_was(random_model: Callable) -> None:
    session = conversation(random_model)
    with pytest.raises(InputError, match="no model 'c'"):
        session.mirror("c")
    assert session.upgrade() == Upgrade(0)
    session.add(random_tokens(80))
    session.mirror("b", first_tokens=4)
    session.generate(3)
    with pytest.raises(InputError, match="Plan with spliced=0 and first_tokens=4"):
        session.switch("b", first_tokens=1)
    assert (session.active, session.hops) == ("a", [])
    session.switch("b", first_tokens=4)
