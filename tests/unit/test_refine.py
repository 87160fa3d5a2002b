"""Second terms: what training records is what the map then does, through the real hand-over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.calibrate.capture import capture_kv
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError, MismatchError, NumericsError
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.inject.hf_cache import fork, view_pool
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.refine.config import RefineConfig
from trtllm_kvmap.refine.run import refine
from trtllm_kvmap.rotary import remove_rope

Pair = tuple[LoadedModel, LoadedModel]
RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(1, 60, size=24).tolist() for _ in range(20)]
AFTER = [[RNG.integers(1, 60, size=4).tolist(), [7, 8]] for _ in DOCUMENTS]
HELD_OUT = range(16, 20)
RESIDUAL = RefineConfig(hidden=8, steps=32, learning_rate=3e-3, skip_first=2)
MLP = RefineConfig("mlp", hidden=64, steps=60, learning_rate=3e-3, batch_tokens=128, skip_first=2)


@pytest.fixture(scope="session")
def pair(random_model: Callable[..., LoadedModel]) -> Pair:
    return (
        random_model("qwen3", layers=2, seed=1),
        random_model("qwen3", layers=3, heads=2, head_dim=32, seed=2),
    )


@pytest.fixture(scope="session")
def kvmap(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> KvMap:
    folder = tmp_path_factory.mktemp("refine")
    moments = calibrate(*pair, DOCUMENTS, CalibrationConfig(skip_first=2), folder / "m")
    return fit(moments, FitConfig(n=3, ridge=30.0))  # far too stiff, so that there is much to mend


def kl(kvmap: KvMap, pair: Pair, document: int) -> tuple[float, int]:
    """KL(native || mapped) summed over the continuations of a document, through the bridge."""
    source, target = pair
    ids, total, tokens = DOCUMENTS[document], 0.0, 0
    bridge = KvBridge(kvmap, source=source, target=target)
    mapped = bridge.convert(prefill(source, ids).cache, ids, first_tokens=2)
    native = prefill(target, ids).cache
    for after in AFTER[document]:
        p, q = (
            prefill(target, after, fork(cache)).logits.double().log_softmax(-1)
            for cache in (native, mapped)
        )
        total += float((p.exp() * (p - q)).sum())
        tokens += len(after)
    return total, tokens


def test_a_residual_does_what_its_training_recorded(kvmap: KvMap, pair: Pair) -> None:
    refined = refine(kvmap, *pair, DOCUMENTS, RESIDUAL, continuations=AFTER)
    record = refined.fitted["refined"]
    assert record["scale"] > 0
    for made, scale in ((kvmap, "0.0"), (refined, str(record["scale"]))):
        each = [kl(made, pair, document) for document in HELD_OUT]
        mean = sum(total / tokens for total, tokens in each) / len(each)
        assert record["held_out_kl"][scale] == pytest.approx(mean, rel=1e-3)
    assert record["held_out_kl"][str(record["scale"])] < record["held_out_kl"]["0.0"]


def test_a_residual_leaves_the_matrices_and_the_evidence_behind(kvmap: KvMap, pair: Pair) -> None:
    proven = kvmap.with_evidence({"gap_recovered": 1.0})
    refined = refine(proven, *pair, DOCUMENTS, replace(RESIDUAL, steps=2), continuations=AFTER)
    assert refined.evidence is None
    for one, other in zip(kvmap.groups, refined.groups, strict=True):
        assert replace(other, second=None) == one or torch.equal(other.weight, one.weight)
        assert (other.second is None) == (one.copies or refined.fitted["refined"]["scale"] == 0)


def test_an_mlp_does_what_its_training_recorded(kvmap: KvMap, pair: Pair) -> None:
    source, target = pair
    refined = refine(kvmap, *pair, DOCUMENTS, MLP)
    record = refined.fitted["refined"]
    errors: dict[str, dict[int, list[float]]] = {"base": {}, "refined": {}}
    for name, made in (("base", kvmap), ("refined", refined)):
        bridge = KvBridge(made, source=source, target=target)
        for document in HELD_OUT:
            ids = DOCUMENTS[document]
            cache = bridge.convert(prefill(source, ids).cache, ids, first_tokens=0)
            pool, native = view_pool(cache), capture_kv(target, torch.tensor(ids))
            for number, group in enumerate(made.groups):
                if group.copies:
                    continue
                heads = list(group.heads)
                if group.field == "key":
                    positions = torch.arange(len(ids))
                    rope, length = target.spec.rope, target.rope_length(len(ids))
                    found = remove_rope(pool.keys[group.layer][0], positions, rope, length)
                    wanted = native.keys[group.layer]
                else:
                    found, wanted = pool.values[group.layer][0], native.values[group.layer]
                error = (found[heads, 2:] - wanted[heads, 2:]).double().square().sum()
                errors[name].setdefault(number, []).append(float(error))
    shares = [sum(errors["refined"][n]) / sum(errors["base"][n]) for n in errors["base"]]
    assert record["scale"] > 0
    assert record["held_out_error"][str(record["scale"])] == pytest.approx(
        np.mean(shares), rel=1e-3
    )
    assert np.mean(shares) < 1


def test_a_term_that_does_not_help_is_left_out(kvmap: KvMap, pair: Pair) -> None:
    wild = replace(RESIDUAL, steps=3, learning_rate=100.0)
    refined = refine(kvmap, *pair, DOCUMENTS, wild, continuations=AFTER)
    assert refined.fitted["refined"]["scale"] == 0
    assert all(group.second is None for group in refined.groups)


def test_equal_input_gives_equal_bytes(kvmap: KvMap, pair: Pair, tmp_path: Path) -> None:
    for config, after in ((replace(RESIDUAL, steps=3), AFTER), (replace(MLP, steps=3), None)):
        for name in "ab":
            refine(kvmap, *pair, DOCUMENTS, config, continuations=after).save(tmp_path / name)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_without_continuations_the_last_quarter_is_read(kvmap: KvMap, pair: Pair) -> None:
    config = replace(RESIDUAL, steps=2)
    cut = refine(kvmap, *pair, DOCUMENTS, config)
    apart = refine(
        kvmap,
        *pair,
        [ids[:18] for ids in DOCUMENTS],
        config,
        continuations=[[ids[18:]] for ids in DOCUMENTS],
    )
    assert cut.fitted["refined"]["held_out_kl"] == apart.fitted["refined"]["held_out_kl"]


def test_the_source_may_be_the_teacher(kvmap: KvMap, pair: Pair) -> None:
    config = replace(RESIDUAL, steps=1)
    target, source = (
        refine(kvmap, *pair, DOCUMENTS, replace(config, teacher=teacher), continuations=AFTER)
        for teacher in ("target", "source")
    )
    kls = [m.fitted["refined"]["held_out_kl"]["0.0"] for m in (target, source)]
    p = [prefill(pair[0], [*DOCUMENTS[n], *a]).logits for n in HELD_OUT for a in AFTER[n]]
    assert kls[0] != pytest.approx(kls[1])
    total, tokens = [], []
    bridge = KvBridge(kvmap, source=pair[0], target=pair[1])
    for n in HELD_OUT:
        ids = DOCUMENTS[n]
        mapped = bridge.convert(prefill(pair[0], ids).cache, ids, first_tokens=2)
        here = 0.0
        for after in AFTER[n]:
            taught = p.pop(0)[-len(after) :].double().log_softmax(-1)
            said = prefill(pair[1], after, fork(mapped)).logits.double().log_softmax(-1)
            here += float((taught.exp() * (taught - said)).sum())
        total.append(here)
        tokens.append(sum(map(len, AFTER[n])))
    mean = np.mean([a / b for a, b in zip(total, tokens, strict=True)])
    assert kls[1] == pytest.approx(mean, rel=1e-3)


def test_mistakes_are_named(kvmap: KvMap, pair: Pair) -> None:
    with pytest.raises(MismatchError, match="another source model"):
        refine(kvmap, pair[1], pair[1], DOCUMENTS, MLP)
    with pytest.raises(InputError, match="At least two documents"):
        refine(kvmap, *pair, DOCUMENTS[:1], MLP)
    with pytest.raises(InputError, match=r"too short: \[1\]"):
        refine(kvmap, *pair, [DOCUMENTS[0], [1, 2]], MLP)
    with pytest.raises(InputError, match="trained without continuations"):
        refine(kvmap, *pair, DOCUMENTS, MLP, continuations=AFTER)
    with pytest.raises(InputError, match="continuations for 3"):
        refine(kvmap, *pair, DOCUMENTS, RESIDUAL, continuations=AFTER[:3])
    twice = refine(kvmap, *pair, DOCUMENTS, replace(MLP, steps=5))
    if twice.fitted["refined"]["scale"]:
        with pytest.raises(MismatchError, match="second terms already"):
            refine(twice, *pair, DOCUMENTS, MLP)
    with pytest.raises(NumericsError, match="learning rate"):
        refine(kvmap, *pair, DOCUMENTS, replace(MLP, learning_rate=1e30))
    for options, message in (
        ({"term": "lora"}, "term must be residual or mlp"),
        ({"teacher": "both"}, "teacher must be target or source"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"held_out": 1.0}, "held_out"),
    ):
        with pytest.raises(InputError, match=message):
            RefineConfig(**options)
