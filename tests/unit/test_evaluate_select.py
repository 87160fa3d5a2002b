"""Choosing among candidate maps by the target's own loss, from moments of the models themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluate_cases import QUICK, make_item
from fit_rows import Rows

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.evaluate.run import evaluate
from trtllm_kvmap.evaluate.select import select
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.inject.hf_cache import view_pool
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.rotary import remove_rope
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.spec.slices import FIELDS, Slice

ITEMS = [make_item(seed) for seed in (20, 21, 22, 23)]
CONFIG = replace(QUICK, repair_window=2)


def rows_of(source: LoadedModel, target: LoadedModel, tokens: int = 400) -> Rows:
    """Pre-RoPE keys and values of both models over one random text."""
    token_ids = make_item(99, tokens).context
    values = {}
    for origin, loaded in (("source", source), ("target", target)):
        pool = view_pool(prefill(loaded, token_ids).cache)
        for field in FIELDS:
            for layer, view in enumerate(pool.field(field)[0]):
                content = view[0].double()
                if field == "key":
                    content = remove_rope(content, torch.arange(tokens), loaded.spec.rope)
                for head in range(loaded.spec.num_kv_heads):
                    values[Slice(origin, field, layer, head)] = content[head].numpy()
    return Rows(source.spec, target.spec, values)


def moments_of(source: LoadedModel, target: LoadedModel) -> MomentSet:
    return replace(
        rows_of(source, target).moment_set(),
        source_fingerprint=source.fingerprint,
        target_fingerprint=target.fingerprint,
        token_table=None,
        sinks=(),
    )


@pytest.fixture(scope="module")
def pair(random_model: Callable) -> tuple[LoadedModel, LoadedModel]:
    return random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)


@pytest.fixture(scope="module")
def moments(pair: tuple[LoadedModel, LoadedModel]) -> MomentSet:
    return moments_of(*pair)


CANDIDATES = [
    FitConfig("copy"),
    FitConfig("slice", n=4, ridge=1e4, own_slices=False),  # so large a ridge maps to the mean
    FitConfig("slice", n=4, ridge=1e-2, own_slices=False),
    FitConfig("head", k=9),
]


def loss_by_hand(kvmap: KvMap, source: LoadedModel, target: LoadedModel) -> float:
    bridge = KvBridge(kvmap, source=source, target=target)
    total, count = 0.0, 0
    for item in ITEMS:
        read = prefill(source, item.context)
        plan = plan_handoff(len(item.context), first_tokens=1, repair_window=2)
        handed = bridge.hand_over(read.cache, item.context, plan)
        logits = prefill(target, item.continuation[:-1], handed.cache).logits
        log_probs = torch.log_softmax(torch.cat([handed.logits[None], logits]), -1)
        total -= float(log_probs[range(len(item.continuation)), list(item.continuation)].sum())
        count += len(item.continuation)
    return total / count


def test_the_lowest_loss_of_the_target_wins(
    pair: tuple[LoadedModel, LoadedModel], moments: MomentSet, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    best, table = select(
        moments, CANDIDATES, *pair, ITEMS, CONFIG, on_candidate=lambda *done: seen.append(done)
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    losses = [loss_by_hand(fit(moments, c), *pair) for c in CANDIDATES[:3]]
    assert [row["nll"] for row in table] == [*map(pytest.approx, losses), None]
    winner = int(np.argmin(losses))
    assert [row["chosen"] for row in table] == [i == winner for i in range(4)]
    assert "at most 2" in table[3]["refused"]
    assert best.groups[0].slices == fit(moments, CANDIDATES[winner]).groups[0].slices
    assert table[winner]["parameters"] == best.num_parameters
    assert [row["config"]["scope"] for row in table] == ["copy", "slice", "slice", "head"]
    kept = best.fitted
    assert kept["candidates"] == table
    assert kept["config"] == table[winner]["config"]
    assert kept["selection"]["items"] == 4
    for row in (*table[:3], kept["selection"]["source"], kept["selection"]["target"]):
        low, high = row["intervals"]["nll"]
        assert low < row["nll"] < high
    assert table[3]["intervals"] is None
    assert kept["selection"]["target"]["nll"] != kept["selection"]["source"]["nll"]
    cosine = kept["attention_cosine"]
    assert len(cosine["per_layer"]) == 3
    assert cosine["worst"] == min(cosine["per_layer"])
    assert cosine["mean"] == pytest.approx(sum(cosine["per_layer"]) / 3)
    best.save(tmp_path / "map")
    assert KvMap.load(tmp_path / "map", allow_unproven=True).fitted == json.loads(json.dumps(kept))


def test_order_does_not_choose(pair: tuple[LoadedModel, LoadedModel], moments: MomentSet) -> None:
    first, table = select(moments, CANDIDATES[:3], *pair, ITEMS, CONFIG)
    second, turned = select(moments, CANDIDATES[2::-1], *pair, ITEMS, CONFIG)
    assert table == turned[::-1]
    assert first.fitted["config"] == second.fitted["config"]


def test_without_continuations_the_accuracy_chooses(
    pair: tuple[LoadedModel, LoadedModel], moments: MomentSet
) -> None:
    items = [replace(item, continuation=()) for item in ITEMS]
    _, table = select(moments, CANDIDATES[:3], *pair, items, CONFIG)
    assert all(row["nll"] is None for row in table)
    chosen = [row["accuracy"] for row in table if row["chosen"]]
    assert chosen == [max(row["accuracy"] for row in table)]


def test_by_cosine_the_attention_outputs_choose_whatever_the_loss(
    pair: tuple[LoadedModel, LoadedModel], moments: MomentSet
) -> None:
    best, table = select(moments, CANDIDATES[:3], *pair, ITEMS, CONFIG, choose_by="cosine")
    cosines = [row["attention_cosine"] for row in table]
    winner = int(np.argmax(cosines))
    assert winner != int(np.argmin([row["nll"] for row in table]))  # else this shows nothing
    assert [row["chosen"] for row in table] == [i == winner for i in range(3)]
    assert best.fitted["config"] == table[winner]["config"]
    assert best.fitted["attention_cosine"]["mean"] == max(cosines)
    assert best.fitted["selection"]["chosen_by"] == "cosine"


def test_the_report_may_not_use_the_items_of_the_selection(
    pair: tuple[LoadedModel, LoadedModel], moments: MomentSet
) -> None:
    best, table = select(moments, CANDIDATES[:2], *pair, ITEMS, CONFIG)
    with pytest.raises(InputError, match="helped to choose"):
        evaluate(best, *pair, [make_item(77), ITEMS[2]], CONFIG)
    report = evaluate(best, *pair, [make_item(77), make_item(78)], CONFIG)
    assert report.kvmap["fitted"]["candidates"] == table


def test_a_pair_that_no_candidate_suits(
    pair: tuple[LoadedModel, LoadedModel], moments: MomentSet
) -> None:
    with pytest.raises(MismatchError, match="None of the 1 candidates"):
        select(moments, [FitConfig("head", k=9)], *pair, ITEMS, CONFIG)
    with pytest.raises(InputError, match="no candidates"):
        select(moments, [], *pair, ITEMS, CONFIG)
