"""An upgraded conversation goes on as the model alone; a draft changes no word."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from caches import random_tokens, stacked
from handmade_maps import copy_map
from session_case import conversation, native

from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.session.session import Session
from trtllm_kvmap.decode.session.upgrade import Upgrade
from trtllm_kvmap.errors import InputError


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
