"""What a source knows of a prompt, what of it a target recalls, and the guard that weighs it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from caches import random_tokens, stacked
from handmade_maps import copy_map, random_map

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.decode.guard.guarded import hand_over_guarded
from trtllm_kvmap.decode.guard.recall import (
    ASKED,
    DOUBT,
    GAIN,
    LEAD,
    SINKS,
    SURE,
    Known,
    ask_source,
    losses_again,
    shortfall,
)
from trtllm_kvmap.decode.guard.signals import Signals, measure_signals
from trtllm_kvmap.decode.prefill import prefill, token_losses
from trtllm_kvmap.decode.select_tokens import rank_by_attention
from trtllm_kvmap.errors import FormatError
from trtllm_kvmap.inject.hf_cache import HfCache, fork
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import NAMES, filler_words


@pytest.fixture(scope="module")
def reader() -> LoadedModel:
    """A trained model: a random one knows nothing of what it has read."""
    return load_model(model_folder("tiny-s"))


@pytest.fixture(scope="module")
def prompt(reader: LoadedModel) -> torch.Tensor:
    """Who stands after whom, one fact said twice, between sentences about nothing."""
    rng = np.random.default_rng(0)
    told = list(pairwise(NAMES[:15]))
    words = ["<bos>", *filler_words(rng)]
    for name, after in [*told, told[3]]:
        words += ["so", "first", "after", name, after, *filler_words(rng)]
    for _ in range(4):
        words += filler_words(rng)
    return torch.tensor(reader.tokenise(" ".join(words)))


def nats(
    model: LoadedModel, cache: HfCache, ids: list[int], token: int, positions: range | None = None
) -> float:
    """What ``token`` costs after ``ids``, which are read on top of ``cache``, in float64."""
    where = None if positions is None else torch.tensor(positions)
    read = prefill(model, ids, fork(cache), positions=where)
    return -float(torch.log_softmax(read.logits[-1].double(), -1)[token])


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_every_token_is_asked_for_alone(architecture: str, random_model: Callable) -> None:
    loaded, ids = random_model(architecture), torch.tensor(random_tokens(60))
    cache = prefill(loaded, ids).cache
    before, asked = stacked(cache), torch.tensor([50, 4, 23, 24, 4])
    rows: list[torch.Size] = []
    head = loaded.model.get_output_embeddings()
    for held in (cache, fork(cache, SINKS)):
        hook = head.register_forward_hook(lambda _m, _i, logits: rows.append(logits.shape[:-1]))
        found = losses_again(loaded, held, ids, asked)
        hook.remove()
        expected = [
            nats(loaded, held, ids[t - LEAD : t].tolist(), int(ids[t]), range(60, 60 + LEAD))
            for t in asked.tolist()
        ]
        np.testing.assert_allclose(found, expected, atol=1e-4)
    assert rows == [(1, 5)] * 2, "logits of the end of each lead alone"
    assert torch.equal(stacked(cache), before)
    assert losses_again(loaded, cache, ids, asked[:0]).shape == (0,)


def test_a_source_names_what_it_knows_by_the_prompt_alone(
    reader: LoadedModel, prompt: torch.Tensor
) -> None:
    ids, end = prompt.tolist(), len(prompt)
    plan = plan_handoff(end, first_tokens=4, repair_window=16)
    read = prefill(reader, prompt)
    own = token_losses(read.logits[-16:], prompt[-16:])
    known = ask_source(reader, read.cache, prompt, plan, own)

    bare, expected, pairs = fork(read.cache, SINKS), [], set()
    for token in rank_by_attention(reader, read.cache, prompt, plan):
        if token < LEAD or (ids[token - 1], ids[token]) in pairs:
            continue
        pairs.add((ids[token - 1], ids[token]))
        lead, where = ids[token - LEAD : token], range(end, end + LEAD)
        behind, without = (nats(reader, c, lead, ids[token], where) for c in (read.cache, bare))
        if behind <= SURE and without - behind >= GAIN:
            expected.append((token, behind))
    assert 10 <= len(expected) <= ASKED, "the names are known"
    assert known.asked.tolist() == [token for token, _ in expected]
    np.testing.assert_allclose(known.asked_losses, [loss for _, loss in expected], atol=1e-4)
    # The last tokens are about nothing: none of them is known by the prompt.
    assert known.judged_losses.shape == own.shape
    assert bool(known.judged_losses.isnan().all())


def test_judged_tokens_are_known_by_the_prompt_too(
    reader: LoadedModel, prompt: torch.Tensor
) -> None:
    """The prompt ends with a fact said again; the source is sure of the name, and not without."""
    said = reader.tokenise("so first after " + " ".join(NAMES[5:7]), add_special_tokens=False)
    ids = torch.cat([prompt, torch.tensor(said)])
    plan = plan_handoff(len(ids), repair_window=6)
    read = prefill(reader, ids)
    own = token_losses(read.logits[-6:], ids[-6:])
    known = ask_source(reader, read.cache, ids, plan, own)
    assert known.judged_losses.isnan().tolist() == [True] * 4 + [False]
    assert float(known.judged_losses[-1]) == pytest.approx(float(own[-1]))


def test_nothing_is_asked_where_there_is_no_room(reader: LoadedModel, prompt: torch.Tensor) -> None:
    """Nor where a longer sequence would change the frequencies under the keys that are there."""
    end, spec = len(prompt), reader.spec
    stretched = replace(spec.rope, kind="dynamic", factor=2.0, original_length=4096)
    cases = (
        (replace(spec, max_positions=end + LEAD), True),
        (replace(spec, max_positions=end + LEAD - 1), False),
        (replace(spec, rope=stretched), False),
    )
    read = prefill(reader, prompt)
    own = token_losses(read.logits[-8:], prompt[-8:])
    plan = plan_handoff(end, repair_window=8)
    for each, asked in cases:
        limited = replace(reader, spec=each)
        assert bool(len(ask_source(limited, read.cache, prompt, plan, own).asked)) == asked
        wrong = Known(torch.arange(20, 50), torch.zeros(30).double(), own * math.nan)
        assert bool(shortfall(limited, read.cache, prompt, wrong, own)) == asked


def test_the_shortfall_is_that_of_the_formula(random_model: Callable) -> None:
    loaded, ids = random_model(), torch.tensor(random_tokens(60))
    cache = prefill(loaded, ids).cache
    asked, none = torch.tensor([10, 33]), math.nan
    theirs = torch.tensor([0.1, 0.2], dtype=torch.float64)
    known = Known(asked, theirs, torch.tensor([none, 0.05, none, 9.0], dtype=torch.float64))
    judged = torch.tensor([7.0, 1.3, none, 0.01], dtype=torch.float64)
    again = losses_again(loaded, cache, ids, asked).tolist()
    pairs = [(0.1, again[0]), (0.2, again[1]), (0.05, 1.3), (9.0, 0.01)]
    lost = [max(math.exp(-s) - math.exp(-t), 0) for s, t in pairs]
    assert lost[-1] == 0, "what the target knows better does not pay for the rest"
    found = shortfall(loaded, cache, ids, known, judged)
    assert found == pytest.approx(sum(lost) / (4 + DOUBT), abs=1e-6)
    spoilt = shortfall(loaded, cache, ids, known, judged * none)
    assert math.isnan(spoilt), "a loss that is no number must not look like recall"
    unknown = Known(asked[:0], theirs[:0], torch.full((4,), none, dtype=torch.float64))
    assert shortfall(loaded, cache, ids, unknown, judged) == 0


def test_a_spoilt_map_is_seen_where_the_last_tokens_show_nothing(
    reader: LoadedModel, prompt: torch.Tensor
) -> None:
    """The prompt ends with words that need none of it; only what is asked again tells."""
    plan = plan_handoff(len(prompt), first_tokens=4, repair_window=16)
    read = prefill(reader, prompt)
    cache, own = read.cache, token_losses(read.logits[-16:], prompt[-16:])
    known = ask_source(reader, cache, prompt, plan, own)
    found = {}
    for make in (copy_map, random_map):
        bridge = KvBridge(make(reader, reader), source=reader, target=reader)
        made = bridge.hand_over(cache, prompt, plan)
        found[make] = measure_signals(bridge, cache, prompt, made, recall=True).recall
        for said in ((), (own, known)):  # nobody weighs it
            assert measure_signals(bridge, cache, prompt, made, *said).recall is None
    assert found[copy_map] == pytest.approx(0, abs=1e-4)
    assert 0.6 < found[random_map] < 1


def test_where_the_recall_is_measured_its_guard_decides() -> None:
    recalling = Guard((0.0, 0.0, 0.0, 0.0, 10.0), 0.0, 1.0, {})
    guard = Guard((1.0, 0.0, 0.0, 0.0), 0.0, 1.0, {}, recalling)
    signals = Signals(2.0, 2.0, 1.0, (0.5,))
    assert guard.judge(signals) == (2.0, False)
    assert guard.judge(replace(signals, recall=0.05)) == (0.5, True)
    assert guard.judge(replace(signals, recall=0.2)) == (2.0, False)
    assert not guard.judge(replace(signals, recall=math.nan)).applied, "no number must not stand"
    assert replace(guard, recalling=None).judge(replace(signals, recall=0.05)) == (2.0, False)


def test_a_guard_with_recall_travels_as_json() -> None:
    guard = Guard((0.5, 1.0), 3.0, 0.125, {"cases": 7}, Guard((1.0,) * 3, 0.0, 0.0, {}))
    entry = json.loads(json.dumps(guard.to_json()))
    assert Guard.from_json(entry) == guard
    assert Guard.from_json({k: v for k, v in entry.items() if k != "recalling"}).recalling is None
    for broken in ({**entry, "recalling": {"weights": [1]}}, {**entry, "forest": 1}, [1], "guard"):
        with pytest.raises(FormatError, match="set it again with `trtllm-kvmap guard`"):
            Guard.from_json(broken)


def test_asking_again_leaves_the_hand_over_as_the_bridge_made_it(
    reader: LoadedModel, prompt: torch.Tensor
) -> None:
    bridge = KvBridge(random_map(reader, reader), source=reader, target=reader)
    plan = plan_handoff(len(prompt), first_tokens=4, repair_window=16)
    cache = prefill(reader, prompt).cache
    before = stacked(cache)
    for limit, status in ((9.0, "applied"), (0.1, "fallback_reprefill")):
        recalling = Guard((*[0.0] * 9, 1.0), 0.0, limit, {})
        guard = Guard((math.nan,) * 9, 0.0, 0.0, {}, recalling)
        found = hand_over_guarded(bridge, guard, cache, prompt, plan)
        assert (found.status, found.score) == (status, found.signals.recall)  # type: ignore[union-attr]
        if status == "applied":
            alone = bridge.hand_over(cache, prompt, plan, keep_logits=64)
            assert torch.equal(stacked(found.handoff.cache), stacked(alone.cache))
            assert torch.equal(found.handoff.logits, alone.logits)
    assert torch.equal(stacked(cache), before)
