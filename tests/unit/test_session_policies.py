"""What a conversation promises about budget and guard, over a hundred turns."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from caches import random_tokens, stacked
from handmade_maps import copy_map, random_map
from session_case import Figures, conversation, native

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.decode.guard.guarded import hop_guard
from trtllm_kvmap.decode.session.session import Session
from trtllm_kvmap.decode.session.session_file import save_session
from trtllm_kvmap.decode.session.upgrade import Upgrade
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import fork
from trtllm_kvmap.rotary import applying_rows


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
