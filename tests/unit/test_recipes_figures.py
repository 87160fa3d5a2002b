"""The figures that recipes add, by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recipe_case import OWN

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import UnprovenError
from trtllm_kvmap.evaluate.bootstrap import draw
from trtllm_kvmap.evaluate.controls import check_wrong_document
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.inject.hf_cache import view_pool
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.recipes.divergence import teacher_divergence
from trtllm_kvmap.recipes.lowrank_residual import lifted, multiplied_out
from trtllm_kvmap.recipes.pooled_multiturn import failing
from trtllm_kvmap.recipes.run import config_of
from trtllm_kvmap.recipes.steps import ratio_figure
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document


def stopped_by_chance(documents: int, questions: int) -> float:
    """How often the control of the wrong document stops a run in which that document and none at
    all both leave the target guessing among four: share of 1,000 runs.
    """
    rng, counts, runs = np.random.default_rng(0), draw(documents, 2000, 0), 1000
    stopped = 0
    for _ in range(runs):
        guessed = rng.binomial(questions, 0.25, (2, documents)) / (documents * questions)
        known = np.full(len(counts), 1.0), *(counts @ each for each in guessed)
        arms: Any = {
            name: SimpleNamespace(accuracy=accuracy)
            for name, accuracy in zip(
                ("mapped", "wrong_document", "no_context"), known, strict=True
            )
        }
        try:
            check_wrong_document(arms, "mapped", "accuracy")
        except UnprovenError:
            stopped += 1
    return stopped / runs


def test_every_recipe_judges_on_enough_documents_for_its_control() -> None:
    sizes = {(c.report.num_items, c.report.questions) for c in map(config_of, OWN)}
    found = {each: stopped_by_chance(*each) for each in sorted(sizes | {(4, 6), (8, 6)})}
    for (documents, _), share in found.items():
        print(f"{documents} documents: stopped by chance in {share:.1%} of the runs")
    assert max(found[each] for each in sizes) < 0.015
    assert found[4, 6] > 0.015  # too few


def test_a_pair_fails_by_its_loss_or_without_one_by_its_accuracy() -> None:
    kvmap: Any = SimpleNamespace(fitted={"selection": {"target": {"nll": 1.0, "accuracy": 0.9}}})
    row = {"NLL": 1.0 + math.log(1.2), "accuracy": 0.1}
    assert failing(kvmap, row, 1.19)
    assert not failing(kvmap, row, 1.21)
    row = {"NLL": None, "accuracy": 0.75}
    assert failing(kvmap, row, 1.19)
    assert not failing(kvmap, row, 1.21)


def test_a_ratio_is_of_sums_and_its_interval_paired() -> None:
    found = ratio_figure([2.0, 6.0, 10.0], [1.0, 3.0, 5.0])
    assert found == {"value": 2.0, "low": 2.0, "high": 2.0}
    assert ratio_figure([1.0, 9.0], [1.0, 4.0])["value"] == 2.0
    assert ratio_figure([1.0], [0.0])["value"] is None


@pytest.mark.parametrize(("metric", "sign"), [("accuracy", 1), ("nll", -1)])
def test_the_gap_downward_runs_from_the_writer_to_the_reader(metric: str, sign: int) -> None:
    contexts = {"source": [0.8, 1.0], "target": [0.4, 0.6], "mapped": [0.6, 0.7]}
    signed = {name: [sign * v for v in values] for name, values in contexts.items()}
    report: Any = SimpleNamespace(config={"metric": metric}, contexts={"metric": signed})
    # (0.65 - 0.5) / (0.9 - 0.5)
    assert lifted(report)["value"] == pytest.approx(0.375)
    same: Any = SimpleNamespace(
        config={"metric": metric}, contexts={"metric": signed | {"source": signed["target"]}}
    )
    assert lifted(same)["value"] is None  # nothing to close


@pytest.fixture(scope="module")
def small_map(tmp_path_factory: pytest.TempPathFactory) -> tuple[KvMap, LoadedModel, list[int]]:
    """tiny-s onto itself, of rank 8, and a document."""
    model = load_model(model_folder("tiny-s"))
    rng = np.random.default_rng(5)
    texts = [model.tokenise(make_document(rng, 120, 8, 0).text) for _ in range(8)]
    out = tmp_path_factory.mktemp("self") / "m.safetensors"
    moments = calibrate(model, model, texts, CalibrationConfig(), out)
    return fit(moments, FitConfig(scope="pooled", k=2, rank=8)), model, texts[0]


def test_a_low_rank_multiplied_out_is_the_same_map(
    small_map: tuple[KvMap, LoadedModel, list[int]],
) -> None:
    kvmap, model, ids = small_map
    out = multiplied_out(kvmap)
    assert all(group.second is None for group in out.groups)
    cache = prefill(model, ids).cache
    mapped = [
        view_pool(KvBridge(each, source=model, target=model).convert(cache, ids))
        for each in (kvmap, out)
    ]
    views = [pool.keys + pool.values for pool in mapped]
    for ours, theirs in zip(*views, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_the_divergence_from_the_reader_is_none_for_the_reader_itself(
    small_map: tuple[KvMap, LoadedModel, list[int]], tmp_path: Path
) -> None:
    kvmap, model, ids = small_map
    item = Item(tuple(ids[:-20]), continuation=tuple(ids[-20:]))
    judged = config_of("lowrank-residual").judged
    moments = calibrate(model, model, [ids], CalibrationConfig(), tmp_path / "m")
    own = KvBridge(fit(moments, FitConfig(scope="copy")), source=model, target=model)
    assert teacher_divergence(own, model, item, judged) == pytest.approx(0, abs=1e-5)
    # A map of rank 8 changes what is said.
    bridge = KvBridge(kvmap, source=model, target=model)
    found = teacher_divergence(bridge, model, item, judged)
    assert found > 1e-4
