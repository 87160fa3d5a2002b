"""A conversation that goes from model to model and back."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from caches import random_tokens
from handmade_maps import copy_map
from streams import require_equal_streams
from tokenizers.processors import TemplateProcessing

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.session.session import Session
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import view_pool
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import plan_handoff


def bridges_between(*models: LoadedModel) -> list[KvBridge]:
    return [
        KvBridge(copy_map(source, target), source=source, target=target)
        for source in models
        for target in models
        if source is not target
    ]


def test_one_model_alone_is_plain_generation(random_model: Callable) -> None:
    loaded = random_model()
    session = Session({"a": loaded}, [])
    session.add("<bos> after anna ben near")
    session.add("so first after anna")
    assert (
        session.token_ids
        == loaded.tokenizer("<bos> after anna ben near so first after anna").input_ids
    )
    prompt = list(session.token_ids)
    reply = session.generate(10) + session.generate(10)
    native = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
    seen = prefill(loaded, native[0]).logits[len(prompt) - 1 : -1]
    require_equal_streams(reply, native[0, len(prompt) :].tolist(), seen)
    assert session.token_ids == prompt + reply


def test_only_the_first_text_gets_the_tokenizers_own_tokens(random_model: Callable) -> None:
    """A tokenizer that puts <bos> before every text must not put it into the middle."""
    loaded = random_model()
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    session = Session({"a": LoadedModel("a", loaded.model, tokenizer, loaded.spec)}, [])
    session.add("after anna ben near")
    session.add("so first after anna")
    text = "<bos> after anna ben near so first after anna"
    assert session.token_ids == loaded.tokenizer(text).input_ids


def test_a_conversation_with_itself_through_an_identity_map_loses_nothing(
    random_model: Callable,
) -> None:
    """Three switches between two names of one model; the stream is the model's own."""
    loaded = random_model()
    bridge = KvBridge(copy_map(loaded, loaded), source=loaded, target=loaded)
    session = Session({"a": loaded, "b": loaded}, [bridge])
    session.add(random_tokens(60))
    reply = []
    for to in ("b", "a", "b"):
        reply += session.generate(20)
        session.switch(to, repair_window=8)
    reply += session.generate(20)
    assert session.active == "b"
    native = loaded.model.generate(
        torch.tensor([random_tokens(60)]), max_new_tokens=80, do_sample=False
    )
    seen = prefill(loaded, native[0]).logits[59:-1]
    require_equal_streams(reply, native[0, 60:].tolist(), seen)


def test_a_switch_is_the_handover_put_together_by_hand(random_model: Callable) -> None:
    first, second = random_model(seed=0), random_model(seed=1)
    there, back = bridges_between(first, second)
    session = Session({"a": first, "b": second}, [there, back])
    session.add(random_tokens(60))
    start = session.generate(12)
    handoff = session.switch("b")
    middle = session.generate(15)
    session.add(random_tokens(5, seed=7))
    returned = session.switch("a", repair_window=16)
    end = session.generate(8)

    a_read = prefill(first, random_tokens(60), logits_to_keep=1)
    a_cache = a_read.cache
    assert start == generate(first, a_cache, a_read.logits[-1], 12)
    said = random_tokens(60) + start
    by_hand = there.hand_over(a_cache, said, plan_handoff(72))
    assert handoff.plan == plan_handoff(72, first_tokens=1, repair_window=32)
    assert middle == generate(second, by_hand.cache, by_hand.logits, 15)
    said += middle + random_tokens(5, seed=7)
    # a holds its first 71 tokens exactly; b has not read its own last token nor the five after it.
    plan = plan_handoff(92, spliced=71, repair_window=16)
    assert returned.plan == plan
    again = back.hand_over(by_hand.cache, said, plan, a_cache)
    assert end == generate(first, again.cache, again.logits, 8)
    assert session.token_ids == said + end
    pool = view_pool(returned.cache)
    for layer, keys in enumerate(view_pool(a_cache).keys):
        assert torch.equal(pool.keys[layer][:, :, :71], keys)


def test_what_a_model_holds_is_kept_and_only_the_rest_is_mapped(random_model: Callable) -> None:
    """b was handed tokens 1 to 39 mapped, so from token 1 on it is approximate for good; what it
    has is kept all the same, and no token is ever mapped to it twice.
    """
    first, second = random_model(seed=0), random_model(seed=1)
    session = Session({"a": first, "b": second}, bridges_between(first, second))
    session.add(random_tokens(60))
    session.generate(12)
    assert session.switch("b").plan.mapped == range(1, 40)
    session.generate(15)
    back = session.switch("a", repair_window=4)
    assert (back.plan.spliced, back.plan.mapped) == (range(0, 71), range(71, 83))
    exact = [keys[:, :, :71].clone() for keys in view_pool(back.cache).keys]
    session.generate(10)
    before = [keys.clone() for keys in view_pool(session.held["b"].cache).keys]
    again = session.switch("b", repair_window=4)
    assert (again.plan.spliced, again.plan.mapped) == (range(0, 86), range(86, 93))
    for here, there in zip(view_pool(again.cache).keys, before, strict=True):
        assert torch.equal(here[:, :, :86], there)
    assert session.held["b"].mapped == (range(1, 40), range(86, 93))
    assert (session.held["b"].exact, session.held["a"].exact) == (1, 71)
    session.generate(10)
    final = session.switch("a", repair_window=4)
    for here, there in zip(view_pool(final.cache).keys, exact, strict=True):
        assert torch.equal(here[:, :, :71], there)
    assert [(hop.kept, hop.exact, hop.mapped) for hop in session.hops] == [
        (0, 0, 39),
        (71, 71, 12),
        (86, 1, 7),
        (96, 71, 7),
    ]


def test_the_target_reads_what_the_source_has_not(random_model: Callable) -> None:
    first, second = random_model(seed=0), random_model(seed=1)
    session = Session({"a": first, "b": second}, bridges_between(first, second))
    session.add(random_tokens(30))
    handoff = session.switch("b", repair_window=4)  # a has read nothing: b reads all of it
    assert not handoff.plan.mapped
    read = Session({"a": first, "b": second}, bridges_between(first, second))
    read.add(random_tokens(30))
    read.read()  # and once a has read it, all but the window is mapped
    assert read.switch("b", repair_window=4).plan.mapped == range(1, 26)
    torch.testing.assert_close(
        handoff.logits, prefill(second, random_tokens(30)).logits[-1], rtol=0, atol=2e-5
    )
    session.generate(4)
    # All b has is exact now, so nothing is lost on the way to a and back.
    assert (session.held["b"].exact, session.held["b"].mapped) == (33, ())
    session.switch("a", repair_window=4)
    assert session.switch("b", repair_window=4).plan.spliced == range(0, 33)


def test_an_interrupted_reply_leaves_the_conversation_as_it_was(
    random_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = random_model()
    session = Session({"a": loaded}, [])
    session.add(random_tokens(30))
    expected = Session({"a": loaded}, [])
    expected.add(random_tokens(30))
    calls, forward = [], loaded.model.forward

    @functools.wraps(forward)
    def interrupted(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(loaded.model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.generate(10)
    monkeypatch.undo()
    assert session.token_ids == random_tokens(30)
    assert session.generate(10) == expected.generate(10)


def test_mistakes_are_one_sentence_and_change_nothing(random_model: Callable) -> None:
    first, second = random_model(seed=0), random_model(seed=1)
    there, _ = bridges_between(first, second)
    with pytest.raises(InputError, match="at least one model"):
        Session({}, [])
    with pytest.raises(InputError, match=r"none of the conversation's models \(a\)"):
        Session({"a": first}, [there])
    session = Session({"a": first, "b": second}, [there])
    with pytest.raises(InputError, match="conversation is empty"):
        session.switch("b")
    for ask in (session.read, lambda: session.generate(3)):
        with pytest.raises(InputError, match="conversation is empty"):
            ask()
    session.add(random_tokens(40))
    with pytest.raises(InputError, match="no model 'c' in this conversation; there are a, b"):
        session.switch("c")
    with pytest.raises(InputError, match="a is the active model already"):
        session.switch("a")
    session.generate(3)
    session.switch("b")
    with pytest.raises(InputError, match="No bridge leads from b to a"):
        session.switch("a")
    with pytest.raises(InputError, match="allows 512"):
        session.generate(500)
    assert (session.active, len(session.token_ids)) == ("b", 43)
    nameless = LoadedModel(first.name, first.model, None, first.spec)
    with pytest.raises(
        InputError, match="has no tokenizer, so it cannot read text; give token ids"
    ):
        Session({"a": nameless}, []).add("anna")
