"""Two models taking turns: every turn's score held to one pass over the whole conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from handmade_maps import copy_map, random_map

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.alternation import _Answer, _drift, alternate, table
from trtllm_kvmap.evaluate.bootstrap import draw
from trtllm_kvmap.evaluate.tasks.conversations import Conversation, Turn
from trtllm_kvmap.models import LoadedModel


def conversation(seed: int, turns: int) -> Conversation:
    rng = np.random.default_rng(seed)

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(2, 60, count).tolist())

    return Conversation(some(50), tuple(Turn(some(4), some(1 + i % 3)) for i in range(turns)))


TALKS = [conversation(0, 4), conversation(1, 3), conversation(2, 4)]


def whole(model: LoadedModel, talk: Conversation, turn: int) -> float:
    """Nats of the right answer of ``turn`` (from 0), from one pass over everything before it."""
    before = [*talk.opening]
    for earlier in talk.turns[:turn]:
        before += [*earlier.asked, *earlier.answer]
    before += talk.turns[turn].asked
    answer = talk.turns[turn].answer
    logits = prefill(model, [*before, *answer]).logits[len(before) - 1 : -1]
    chosen = torch.log_softmax(logits.double(), -1)[range(len(answer)), list(answer)]
    return -float(chosen.sum())


def mean_whole(model: LoadedModel, turn: int) -> float:
    talks = [talk for talk in TALKS if len(talk.turns) > turn]
    return sum(whole(model, t, turn) for t in talks) / sum(len(t.turns[turn].answer) for t in talks)


def bridges(source: LoadedModel, target: LoadedModel, make: Callable) -> tuple[KvBridge, KvBridge]:
    there = KvBridge(make(source, target), source=source, target=target)
    return there, KvBridge(make(target, source), source=target, target=source)


def test_each_model_alone_is_what_one_pass_gives(random_model: Callable) -> None:
    source, target = random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)
    found = alternate(*bridges(source, target, random_map), TALKS, repair_window=4, resamples=50)
    assert [row.conversations for row in found.turns] == [3, 3, 3, 2]
    assert [row.answered_by for row in found.turns] == ["source", "target"] * 2
    for turn, row in enumerate(found.turns):
        assert row.source_nll["value"] == pytest.approx(mean_whole(source, turn), rel=1e-4)
        assert row.target_nll["value"] == pytest.approx(mean_whole(target, turn), rel=1e-4)
        gap = row.nll["value"] - row.native_nll["value"]
        assert row.gap["value"] == pytest.approx(gap, abs=1e-9)
    first, second, third, fourth = found.turns
    assert first.gap["value"] == 0.0  # nothing has been handed over yet
    assert (first.mapped_tokens, first.exact) == (0, first.native_exact)
    assert abs(second.gap["value"]) > 1e-3
    assert second.mapped_tokens > 40
    assert fourth.mapped_tokens >= second.mapped_tokens
    assert 0 < third.mapped_tokens < second.mapped_tokens  # what it had read stays its own
    json.dumps(found.to_json(), allow_nan=False)
    assert len(list(table(found).columns[0].cells)) == 4


def test_what_is_mapped_is_counted_by_hand(random_model: Callable) -> None:
    source, target = random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)
    found = alternate(*bridges(source, target, random_map), TALKS[:1], repair_window=2, resamples=5)
    # Turn 2: opening, question 1, answer 1, without the first and the last two. Turn 4 adds
    # question 3 and its answer of three tokens, again without the last two: answers are read.
    there = 50 + 4 + 1 - 1 - 2
    counted = [0, there, 4 + 2 - 2, there + 4 + 3 - 2]
    assert [row.mapped_tokens for row in found.turns] == counted


def test_an_exact_map_loses_nothing_in_any_turn(random_model: Callable) -> None:
    model = random_model("qwen3", seed=1)
    twin = replace(model)  # the same weights, another object
    found = alternate(*bridges(model, twin, copy_map), TALKS, repair_window=4, resamples=50)
    for row in found.turns:
        assert row.gap["value"] == pytest.approx(0, abs=1e-5)
        assert row.exact == row.native_exact


def test_drift_is_the_slope_of_the_gap_over_turns() -> None:
    gaps = {0: [0.0, 1.0, 0.5, 1.5, 0.25, 2.5], 1: [0.0, 0.5, 0.0, 2.0]}
    scored = [
        {
            "alternating": [_Answer(2 * (1 + gap), 2, False) for gap in each],
            "source": [_Answer(2.0, 2, False)] * len(each),
            "target": [_Answer(2.0, 2, False)] * len(each),
        }
        for each in gaps.values()
    ]
    counts = draw(2, 10, 0)
    points = {
        "target": ([1, 3, 5, 1, 3], [1.0, 1.5, 2.5, 0.5, 2.0]),
        "source": ([0, 2, 4, 0, 2], [0.0, 0.5, 0.25, 0.0, 0.0]),
    }
    for name, (turns, values) in points.items():
        slope = np.polyfit(turns, values, 1)[0]
        assert _drift(name, scored, counts)["value"] == pytest.approx(slope)


def test_bridges_must_be_each_others_way_back(random_model: Callable) -> None:
    source, target = random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)
    there, back = bridges(source, target, random_map)
    with pytest.raises(InputError, match="lead back"):
        alternate(there, there, TALKS)
    with pytest.raises(InputError, match="no conversations"):
        alternate(there, back, [])
