"""The run over all items and arms, and the contract of report.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from evaluate_cases import ITEMS, QUICK, make_item
from handmade_maps import random_map

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError, MismatchError, UnprovenError
from trtllm_kvmap.evaluate.asked import asked, items_digest
from trtllm_kvmap.evaluate.report.report import Report, evidence
from trtllm_kvmap.evaluate.run import EvaluationConfig, evaluate
from trtllm_kvmap.evaluate.score import Score
from trtllm_kvmap.evaluate.summary import Draws, arm_figures
from trtllm_kvmap.evaluate.tasks.config import TaskConfig
from trtllm_kvmap.evaluate.tasks.items import Item, Question
from trtllm_kvmap.models import LoadedModel


@pytest.fixture(scope="module")
def pair(random_model: Callable) -> tuple[LoadedModel, LoadedModel]:
    return random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)


FIGURE = {"value", "low", "high"}
FIGURES = {
    "accuracy",
    "nll",
    "perplexity",
    "perplexity_ratio",
    "top1_agreement",
    "rollout_agreement",
    "retention",
    "retention_normalised",
    "gap_recovered",
}
ARMS = [
    "target",
    "source",
    "mapped",
    "mapped_repaired_8",
    "mapped_repaired_16",
    "mapped_repaired_32",
    "mapped_repaired_64",
    "copy",
    "repair_only",
    "wrong_document",
    "wrong_document_repaired",
    "no_context",
    "reinjection",
]


@pytest.fixture(scope="module")
def report(pair: tuple[LoadedModel, LoadedModel]) -> Report:
    return evaluate(random_map(*pair, seed=1), *pair, ITEMS, QUICK)


def test_report_json_keeps_its_contract(report: Report) -> None:
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert set(content) == {
        "arms",
        "gap_recovered",
        "retention",
        "retention_normalised",
        "top1_agreement",
        "perplexity_ratio",
        "attention_cosine",
        "kv_error",
        "controls",
        "gates",
        "chance",
        "contexts",
        "latency",
        "diagnosis",
        "config",
        "fingerprints",
        "kvmap",
    }
    assert list(content["arms"]) == ARMS
    for arm in content["arms"].values():
        assert set(arm) == FIGURES | {"attention_cosine", "mapped_share"}
        assert all(set(arm[name]) == FIGURE for name in FIGURES)
    chosen = content["arms"]["mapped_repaired_32"]
    for name in ("gap_recovered", "retention", "retention_normalised"):
        assert content[name] == chosen[name]
    assert content["top1_agreement"] == chosen["top1_agreement"]
    assert content["perplexity_ratio"] == chosen["perplexity_ratio"]
    assert set(content["attention_cosine"]) == {"mean", "worst", "per_layer"}
    assert len(content["attention_cosine"]["per_layer"]) == 3
    assert content["attention_cosine"]["mean"] == chosen["attention_cosine"]
    controls = dict(content["controls"])
    assert controls.pop("wrong_document").startswith("not judged")  # no random map reads
    assert controls == dict.fromkeys(
        ["reinjection", "rope_round_trip", "deterministic_bytes", "corruption_detected"], "passed"
    )
    assert set(content["config"]["versions"]) == {"python", "torch", "transformers", "trtllm_kvmap"}
    assert len(content["config"]["map_digest"]) == 64
    named = ("task", "data", "skip", "seed", "scored_tokens", "questions")
    unknown = ("source", "target", "items_digest", "map_digest", "versions")
    assert content["config"] | dict.fromkeys(unknown) == {
        **dict.fromkeys((*named, *unknown)),
        "arm": "mapped_repaired_32",
        "metric": "accuracy",
        "N": 32,
        "S": 1,
        "rollout_steps": 4,
        "length_normalised": False,
        "resamples": 50,
        "backend": "cpu",
        "num_items": 3,
        "num_questions": 6,
        "context_tokens": {"shortest": 45, "longest": 75, "asked": None},
    }
    assert [gate["name"] for gate in content["gates"]] == [
        "retention",
        "perplexity_ratio",
        "top1_agreement",
    ]
    for gate in content["gates"]:
        assert gate["figure"] == chosen[gate["name"]]
        assert gate["source"] == content["arms"]["source"][gate["name"]]
    assert content["latency"] is content["diagnosis"] is None
    assert set(content["fingerprints"]) == {"source", "target"}
    assert set(content["kvmap"]) == {"scope", "parameters", "fitted"}
    assert Report.from_json(content) == report


def test_contexts_are_paired_and_guessing_has_its_accuracy(report: Report) -> None:
    found = report.contexts
    assert found["tokens"] == [60, 45, 75]
    assert set(found["metric"]) == {"source", "mapped_repaired_32", "target"}
    # Two questions a context: the mean over contexts is the mean over questions.
    for name, values in found["metric"].items():
        assert np.mean(values) == pytest.approx(report.arms[name]["accuracy"]["value"])
    assert report.chance == pytest.approx((1 / 3 + 1 / 2) / 2)  # three choices, and two


def test_native_arms_are_perfect_and_equal(report: Report) -> None:
    target, reinjected = report.arms["target"], report.arms["reinjection"]
    assert target == reinjected
    for name in ("perplexity_ratio", "top1_agreement", "rollout_agreement", "retention"):
        assert target[name] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert target["attention_cosine"] == pytest.approx(1.0)
    assert report.arms["source"]["attention_cosine"] is None
    assert report.arms["mapped"]["mapped_share"] == pytest.approx((180 - 3 * 2) / 180)
    for name in ("copy", "wrong_document"):
        assert report.arms[name]["mapped_share"] == report.arms["mapped"]["mapped_share"]
    assert report.arms["repair_only"]["mapped_share"] == 0.0


def test_the_run_counts_its_items(pair: tuple[LoadedModel, LoadedModel]) -> None:
    seen: list[tuple[int, int]] = []
    evaluate(
        random_map(*pair, seed=1), *pair, ITEMS, QUICK, on_item=lambda *done: seen.append(done)
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_figures_of_arms_by_hand() -> None:
    """Two items; the loss of each arm and its share of the gap worked out on paper."""

    def draws(correct: tuple[int, int], nll: tuple[float, float]) -> Draws:
        scores = [Score(c, 4, 1.0, n, 10, 5, 1, 2) for c, n in zip(correct, nll, strict=True)]
        return Draws(scores, np.array([[1, 1], [2, 0], [0, 2]]))

    source, target = draws((1, 2), (30.0, 20.0)), draws((4, 4), (10.0, 10.0))
    arm = draws((3, 3), (15.0, 10.0))
    got = arm_figures(arm, source, target, "accuracy")
    assert got["accuracy"]["value"] == 0.75
    assert got["gap_recovered"]["value"] == pytest.approx((6 - 3) / (8 - 3))
    assert got["gap_recovered"]["low"] == pytest.approx(0.5, abs=0.02)  # item 2 alone: 1 of 2
    assert got["gap_recovered"]["high"] == pytest.approx(2 / 3, abs=0.02)  # item 1 alone: 2 of 3
    assert got["retention_normalised"]["value"] == pytest.approx(0.5 / 0.75)
    assert got["nll"]["value"] == pytest.approx(1.25)
    assert got["perplexity_ratio"]["value"] == pytest.approx(np.exp(0.25))
    assert got["top1_agreement"]["value"] == 0.5
    assert got["rollout_agreement"]["value"] == 0.5
    by_loss = arm_figures(arm, source, target, "nll")["gap_recovered"]["value"]
    assert by_loss == pytest.approx((2.5 - 1.25) / (2.5 - 1.0))


def test_unequal_shapes_refuse_copy_alone(random_model: Callable) -> None:
    source, target = random_model("qwen3", seed=1), random_model("qwen3", seed=3, kv_heads=1)
    got = evaluate(random_map(source, target), source, target, ITEMS, QUICK)
    refused = [name for name, arm in got.arms.items() if "refused" in arm]
    assert refused == ["copy"]
    assert "equal (KV heads, head_dim)" in got.arms["copy"]["refused"]


def test_one_item_has_no_stranger_and_proves_nothing(
    pair: tuple[LoadedModel, LoadedModel], report: Report
) -> None:
    got = evaluate(random_map(*pair, seed=1), *pair, ITEMS[:1], QUICK)
    assert "at least two" in got.arms["wrong_document"]["refused"]
    assert got.controls["wrong_document"].startswith("not judged")
    with pytest.raises(UnprovenError, match="wrong_document"):
        evidence(got)
    with pytest.raises(UnprovenError, match="reaches zero"):
        evidence(report)
    kept = evidence(replace(report, controls=dict.fromkeys(report.controls, "passed")))
    assert {"source", "target", "no_context"} == set(kept["arms"])
    assert kept["gap_recovered"] == report.gap_recovered
    assert json.loads(json.dumps(kept)) == kept
    assert random_map(*pair, seed=1).with_evidence(kept).evidence == kept


def test_plain_text_is_scored_by_its_loss(pair: tuple[LoadedModel, LoadedModel]) -> None:
    items = [replace(item, questions=()) for item in ITEMS]
    with pytest.raises(InputError, match="use metric=nll"):
        evaluate(random_map(*pair, seed=1), *pair, items, QUICK)
    got = evaluate(random_map(*pair, seed=1), *pair, items, replace(QUICK, metric="nll"))
    assert got.arms["mapped"]["accuracy"] == {"value": None, "low": None, "high": None}
    target = got.arms["target"]["nll"]["value"]
    losses = [
        -torch.log_softmax(prefill(pair[1], item.context + item.continuation).logits, -1)[
            range(len(item.context) - 1, len(item.context) + 6), list(item.continuation)
        ].sum()
        for item in items
    ]
    assert target == pytest.approx(float(sum(losses)) / 21, rel=1e-5)


def test_what_cannot_be_evaluated_is_said(pair: tuple[LoadedModel, LoadedModel]) -> None:
    kvmap = random_map(*pair, seed=1)
    chosen_on = replace(kvmap, fitted={"selected_on": [ITEMS[1].digest]})
    with pytest.raises(InputError, match="helped to choose"):
        evaluate(chosen_on, *pair, ITEMS, QUICK)
    with pytest.raises(InputError, match="no items"):
        evaluate(kvmap, *pair, [], QUICK)
    with pytest.raises(InputError, match="allow 512"):
        evaluate(kvmap, *pair, [make_item(9, 510)], QUICK)
    with pytest.raises(MismatchError):
        evaluate(kvmap, pair[1], pair[0], ITEMS, QUICK)
    questions_only = [replace(item, continuation=()) for item in ITEMS]
    with pytest.raises(InputError, match="use metric=accuracy"):
        evaluate(kvmap, *pair, questions_only, replace(QUICK, metric="nll"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metric": "f1"}, "accuracy or nll"),
        ({"first_tokens": -1}, "first_tokens"),
        ({"repair_window": -1}, "repair_window"),
        ({"rollout_steps": 0}, "rollout_steps"),
        ({"resamples": 0}, "resamples"),
    ],
)
def test_a_config_that_makes_no_sense(options: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        EvaluationConfig(**options)


def test_a_repair_window_of_its_own_becomes_an_arm(pair: tuple[LoadedModel, LoadedModel]) -> None:
    kvmap = random_map(*pair, seed=1)
    got = evaluate(kvmap, *pair, ITEMS, replace(QUICK, repair_window=12))
    assert got.config["arm"] == "mapped_repaired_12"
    assert [n for n in got.arms if n.startswith("mapped")][:3] == [
        "mapped",
        "mapped_repaired_8",
        "mapped_repaired_12",
    ]
    none = evaluate(kvmap, *pair, ITEMS, replace(QUICK, repair_window=0))
    assert (none.config["arm"], none.config["N"]) == ("mapped", 0)
    assert none.gap_recovered == none.arms["mapped"]["gap_recovered"]


def test_the_report_names_items_and_map(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """The digest of the items is of every token id and label."""
    item = Item((1, 2), (Question((3,), ((4,), (5, 6)), 1),), (7, 8))
    said = "[[[1,2],[[[3],[[4],[5,6]],1,[],[]]],[7,8]]]"
    assert items_digest([item]) == hashlib.sha256(said.encode()).hexdigest()
    assert items_digest([replace(item, continuation=(7, 9))]) != items_digest([item])
    task = TaskConfig(num_items=1, skip=4, seed=9, context_tokens=50)
    told = asked([item], task)
    assert told == asdict(task) | {
        "num_questions": 1,
        "context_tokens": {"shortest": 2, "longest": 2, "asked": 50},
        "items_digest": items_digest([item]),
    }
