"""A conversation goes through a file and on, bit for bit; what cannot be is refused whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import random_tokens, stacked
from handmade_maps import random_map

from trtllm_kvmap.artifact.container import read_container, write_container
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.session.session import Session
from trtllm_kvmap.decode.session.session_file import KIND, load_session, save_session
from trtllm_kvmap.errors import FormatError, MismatchError
from trtllm_kvmap.inject.hf_cache import recorded_passes

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def conversation(random_model: Callable, **options: Any) -> Session:
    """Turned twice, so that one model holds mapped, approximate and exact entries."""
    a, b = random_model(seed=0, **options), random_model(seed=1)
    bridges = [KvBridge(random_map(x, y), source=x, target=y) for x, y in ((a, b), (b, a))]
    session = Session({"a": a, "b": b}, bridges)
    session.add(random_tokens(60))
    session.generate(5)
    session.switch("b", repair_window=8)
    session.generate(7)
    session.switch("a", repair_window=4)
    session.generate(3)
    return session


@pytest.mark.parametrize("rope", [{}, DYNAMIC], ids=["default", "dynamic"])
def test_a_loaded_conversation_goes_on_as_the_saved_one(
    rope: dict, random_model: Callable, tmp_path: Path
) -> None:
    options = {"architecture": "llama", "rope": rope, "max_positions": 512} if rope else {}
    session = conversation(random_model, **options)
    path = tmp_path / "talk.session.safetensors"
    digest = save_session(session, path)
    assert digest == save_session(session, tmp_path / "again"), "equal input, equal bytes"
    loaded = load_session(path, session.models, session.bridges)
    for part in ("token_ids", "active", "reply", "hops", "mapped_tokens"):
        assert getattr(loaded, part) == getattr(session, part), part
    for name, held in session.held.items():
        other = loaded.held[name]
        assert torch.equal(stacked(other.cache), stacked(held.cache))
        assert (other.exact, other.mapped) == (held.exact, held.mapped)
        assert recorded_passes(other.cache) == recorded_passes(held.cache)
    for talk in (session, loaded):
        talk.add(random_tokens(4, seed=8))
        talk.generate(6)
        talk.switch("b", repair_window=4)
        talk.generate(6)
        talk.upgrade(chunk_tokens=40, verify=True)
        talk.generate(6)
    assert loaded.token_ids == session.token_ids
    for name, held in session.held.items():
        assert torch.equal(stacked(loaded.held[name].cache), stacked(held.cache))


def test_logits_after_a_switch_are_kept(random_model: Callable, tmp_path: Path) -> None:
    session = conversation(random_model)
    session.switch("b")
    save_session(session, tmp_path / "s")
    loaded = load_session(tmp_path / "s", session.models, session.bridges)
    assert torch.equal(loaded.held["b"].logits, session.held["b"].logits)
    assert loaded.generate(9) == session.generate(9)


def test_an_empty_conversation_is_one_too(random_model: Callable, tmp_path: Path) -> None:
    session = Session({"a": random_model()}, [])
    save_session(session, tmp_path / "s")
    assert load_session(tmp_path / "s", session.models, []).token_ids == []


def test_other_models_are_refused(random_model: Callable, tmp_path: Path) -> None:
    session = conversation(random_model)
    save_session(session, tmp_path / "s")
    a, b, other = random_model(seed=0), random_model(seed=1), random_model(seed=2)
    with pytest.raises(MismatchError, match=r"'b' of the conversation is another .* weights"):
        load_session(tmp_path / "s", {"a": a, "b": other}, [])
    with pytest.raises(MismatchError, match="a model 'b', and none of that name was given"):
        load_session(tmp_path / "s", {"a": a}, [])
    assert load_session(tmp_path / "s", {"a": a, "b": b, "c": other}, []).active == "a"


def first_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensors[name][:1] for name in ("a.keys", "a.values")}


# What is done to the content c, its cache h of model a, and the tensors t.
WRONG: dict[str, Callable[[dict, dict, dict], Any]] = {
    "an entry too many": lambda c, h, t: c.update(more=1),
    "an entry too few": lambda c, h, t: c.pop("reply"),
    "an unknown active model": lambda c, h, t: c.update(active="c"),
    "a token outside the vocabulary": lambda c, h, t: c["token_ids"].append(10**6),
    "a token that is no number": lambda c, h, t: c["token_ids"].append(True),
    "a reply outside": lambda c, h, t: c.update(reply=[5, 10**6]),
    "no such outcome": lambda c, h, t: c["hops"][0].update(outcome="fine"),
    "a switch that says too much": lambda c, h, t: c["hops"][0].update(more=1),
    "a switch of half tokens": lambda c, h, t: c["hops"][0].update(mapped=0.5),
    "mapped and exact": lambda c, h, t: h.update(exact=h["mapped"][0][0] + 1),
    "half an exact entry": lambda c, h, t: h.update(exact=3.5),
    "mapped beyond the end": lambda c, h, t: h.update(mapped=[[70, 10**6]]),
    "mapped nothing": lambda c, h, t: h.update(mapped=[[65, 65]]),
    "mapped words": lambda c, h, t: h.update(mapped=["ab"]),
    "a pass beyond the end": lambda c, h, t: h.update(passes=[[0, 10**9, 5]]),
    "a cache that says too much": lambda c, h, t: h.update(more=1),
    "caches in a list": lambda c, h, t: c.update(held=[1]),
    "keys without values": lambda c, h, t: t.pop("a.values"),
    "a tensor of nothing": lambda c, h, t: t.update({"c.keys": torch.zeros(1)}),
    "fewer keys": lambda c, h, t: t.update({"a.keys": t["a.keys"][:, :, :-1]}),
    "fewer layers": lambda c, h, t: t.update(first_layer(t)),
    "another dtype": lambda c, h, t: t.update({"a.keys": t["a.keys"].half()}),
    "no number": lambda c, h, t: t["a.values"].view(-1)[5].fill_(float("nan")),
    "more entries than tokens": lambda c, h, t: c.update(token_ids=[5] * 20, reply=[0, 0]),
    "logits of another vocabulary": lambda c, h, t: t.update({"a.logits": torch.zeros(3)}),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_is_refused(what: str, random_model: Callable, tmp_path: Path) -> None:
    """With a digest that holds: whoever wrote it, the numbers must make sense."""
    session = conversation(random_model)
    save_session(session, tmp_path / "s")
    content, tensors = read_container(tmp_path / "s", KIND, 1)
    WRONG[what](content, content["held"]["a"], tensors)
    write_container(tmp_path / "wrong", KIND, 1, content, tensors)
    with pytest.raises(FormatError, match=r"is no whole session \(.+\)\. Save the session again"):
        load_session(tmp_path / "wrong", session.models, session.bridges)


def test_a_damaged_file_and_another_kind_are_refused(
    random_model: Callable, tmp_path: Path
) -> None:
    session = conversation(random_model)
    save_session(session, tmp_path / "s")
    damaged = bytearray((tmp_path / "s").read_bytes())
    damaged[-5] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    with pytest.raises(FormatError, match="does not match its digest"):
        load_session(tmp_path / "damaged", session.models, session.bridges)
    write_container(tmp_path / "kvmap", "kvmap", 1, {}, {})
    with pytest.raises(FormatError, match="is a 'kvmap' file; a 'session' file is needed"):
        load_session(tmp_path / "kvmap", session.models, session.bridges)
