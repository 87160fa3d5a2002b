"""The upgrade makes a cache exact chunk by chunk, tokens already emitted included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from caches import random_tokens, stacked
from handmade_maps import random_map

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.session.held import Held, after_handoff
from trtllm_kvmap.decode.session.upgrade import Upgraded, first_disagreement, upgrade_chunk
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import HfCache, fork, written_lengths
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import plan_handoff


def answered(
    random_model: Callable, emitted: int = 24
) -> tuple[LoadedModel, list[int], Held, range]:
    """A target that has emitted tokens on a badly mapped cache of 100; the last is not read."""
    source, target = random_model(seed=1), random_model(seed=0)
    bridge = KvBridge(random_map(source, target), source=source, target=target)
    ids = random_tokens(100)
    plan = plan_handoff(100, first_tokens=4, repair_window=16)
    handoff = bridge.hand_over(prefill(source, ids).cache, ids, plan)
    held = after_handoff(None, handoff.plan, handoff.cache, handoff.logits)
    cache = fork(held.cache)
    reply = generate(target, cache, handoff.logits, emitted)
    return target, ids + reply, held.read_on(cache), range(100, 100 + emitted)


def native(loaded: LoadedModel, ids: list[int], chunks: list[int]) -> HfCache:
    cache = None
    for chunk in torch.tensor(ids[: sum(chunks)]).split(chunks):
        cache = prefill(loaded, chunk, cache).cache
    return cache


def test_an_upgraded_cache_is_the_native_one(random_model: Callable) -> None:
    target, ids, held, _ = answered(random_model)
    assert (held.exact, held.mapped, held.entries) == (4, (range(4, 84),), 123)
    done = held
    while done.approximate:
        done = upgrade_chunk(target, done, ids, chunk_tokens=32).held
    chunks = [4, 32, 32, 32, 23]
    expected = native(target, ids, chunks)
    assert torch.equal(stacked(done.cache), stacked(expected))
    assert not torch.allclose(stacked(held.cache), stacked(expected), atol=1e-2)
    assert (done.exact, done.mapped, done.mapped_tokens) == (123, (), 0)
    last = prefill(target, ids[100:123], native(target, ids, chunks[:-1])).logits[-1]
    assert torch.equal(done.logits, last)
    # What comes later is native too: the last emitted token is read, and twenty more follow.
    mine = prefill(target, ids[123:], done.cache).logits[-1]
    theirs = prefill(target, ids[123:], expected).logits[-1]
    assert torch.equal(mine, theirs)
    assert generate(target, done.cache, mine, 20) == generate(target, expected, theirs, 20)


def test_tokens_may_be_emitted_between_chunks(random_model: Callable) -> None:
    target, ids, held, _ = answered(random_model)
    chunks = [4]
    while held.approximate:
        before = held.exact
        held = upgrade_chunk(target, held, ids, chunk_tokens=32).held
        chunks.append(held.exact - before)
        if held.entries < 126:
            cache = fork(held.cache)
            step = prefill(target, ids[-1:], cache)
            ids.append(int(step.logits[-1].argmax()))
            held = held.read_on(cache)
    assert sum(chunks) == held.entries == 126
    assert torch.equal(stacked(held.cache), stacked(native(target, ids, chunks)))


def test_a_chunk_changes_only_itself_and_not_what_it_began_with(random_model: Callable) -> None:
    target, ids, held, _ = answered(random_model)
    before = stacked(held.cache)
    done = upgrade_chunk(target, held, ids, chunk_tokens=50)
    assert torch.equal(stacked(held.cache), before)
    after = stacked(done.held.cache)
    assert torch.equal(after[..., :4, :], before[..., :4, :])
    assert torch.equal(after[..., 54:, :], before[..., 54:, :])
    assert not torch.allclose(after[..., 4:54, :], before[..., 4:54, :], atol=1e-2)
    assert (done.held.exact, done.held.mapped, done.chunk) == (54, (range(54, 84),), range(4, 54))
    # The mapped part is read, but what was computed on top of it is approximate still.
    later = upgrade_chunk(target, done.held, ids, chunk_tokens=40).held
    assert (later.exact, later.mapped, later.approximate) == (94, (), 29)


def test_the_first_token_that_reading_exactly_would_not_emit(random_model: Callable) -> None:
    target, ids, held, emitted = answered(random_model)
    logits = prefill(target, ids).logits
    best = logits.argmax(-1).tolist()
    differing = [p for p in emitted if ids[p] != best[p - 1]]
    assert differing, "the map is so bad that the reply cannot be right"
    found = None
    while held.approximate and found is None:
        done = upgrade_chunk(target, held, ids, chunk_tokens=33)
        held, found = done.held, first_disagreement(done, ids, emitted)
    assert found == (differing[0], best[differing[0] - 1])


def test_a_disagreement_is_looked_for_where_the_chunk_can_know(random_model: Callable) -> None:
    target, *_ = answered(random_model)
    logits = torch.eye(8)[[3, 1, 5]]  # after the tokens 10, 11, 12 the model says 3, 1, 5
    done = Upgraded(Held(native(target, [2, 3], [2]), 2), range(10, 13), logits)
    ids = [0] * 10 + [9, 3, 1, 5, 7]
    assert first_disagreement(done, ids, range(15)) is None
    ids[13] = 6
    assert first_disagreement(done, ids, range(15)) == (13, 5)
    assert first_disagreement(done, ids, range(11, 13)) is None
    ids[11] = 6
    assert first_disagreement(done, ids, range(11, 15)) == (11, 3)


def test_lengths_at_which_keys_were_written_stay_known(random_model: Callable) -> None:
    target = random_model("llama", max_positions=64, rope={"rope_type": "dynamic", "factor": 2.0})
    ids = random_tokens(90)
    cache = native(target, ids, [20, 60])
    held = Held(cache, 20, (range(20, 40),))
    done = upgrade_chunk(target, held, ids, chunk_tokens=40).held
    assert written_lengths(done.cache, range(80)) == [20, 60, 80]


def test_mistakes_are_one_sentence(random_model: Callable) -> None:
    target, ids, held, _ = answered(random_model)
    for tokens, state, chunk_tokens in ((ids, held, 0), (ids[:50], held, 8)):
        with pytest.raises(InputError, match="chunk_tokens of at least 1, approximate entries"):
            upgrade_chunk(target, state, tokens, chunk_tokens=chunk_tokens)
    exact = Held(native(target, ids, [10]), 10)
    with pytest.raises(InputError, match="got 128, 0 of them"):
        upgrade_chunk(target, exact, ids)
