"""Moments against plain sums over all tokens; checkpoints, resuming, shards, refusals."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentPart, MomentSet
from trtllm_kvmap.calibrate import run as run_module
from trtllm_kvmap.calibrate.accumulate import PartSums
from trtllm_kvmap.calibrate.capture import CapturedKv, HeldCache, capture_kv, captured
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.parts import plan_parts
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.errors import FormatError, InputError, MismatchError
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.slices import Slice
from trtllm_kvmap.tiny.documents import VOCABULARY

Pair = tuple[LoadedModel, LoadedModel]
VOCAB = len(VOCABULARY)
DOCUMENTS = [
    np.random.default_rng(seed).integers(1, VOCAB, size=length).tolist()
    for seed, length in enumerate([30, 7, 5, 64, 12, 21, 40])
]


@pytest.fixture(scope="session")
def pair(random_model: Callable[..., LoadedModel]) -> Pair:
    """Unequal layers and head_dim, equal KV heads."""
    return (
        random_model("qwen3", layers=2, seed=1),
        random_model("qwen3", layers=3, heads=2, head_dim=32, seed=2),
    )


def rows(pair: Pair, slices: Sequence[Slice], skip_first: int) -> np.ndarray:
    """The columns of ``slices`` for every counted token of DOCUMENTS, float64 [tokens, columns]."""
    stacked = []
    for document in DOCUMENTS:
        source, target = (capture_kv(loaded, torch.tensor(document)) for loaded in pair)
        kv = {"source": source, "target": target}
        columns = [
            (kv[s.origin].keys if s.field == "key" else kv[s.origin].values)[s.layer, s.head]
            for s in slices
        ]
        stacked.append(torch.cat(columns, dim=1)[skip_first:])
    return torch.cat(stacked).double().numpy()


def assert_moments(part: MomentPart, x: np.ndarray, y: np.ndarray) -> None:
    expected = (x.T @ x, x.T @ y, x.sum(0), y.sum(0), (y * y).sum(0))
    for tensor, reference in zip(part.moments.tensors(), expected, strict=True):
        assert tensor.dtype == torch.float64
        np.testing.assert_allclose(tensor, reference, rtol=1e-5, atol=1e-6 * abs(reference).max())
    assert part.moments.count == len(x)
    assert torch.equal(part.moments.gram, part.moments.gram.T)


@pytest.mark.parametrize(
    "config",
    [
        CalibrationConfig(),
        CalibrationConfig(joint=True, skip_first=0),
        CalibrationConfig(scope="head", layers=(1, 3)),
        CalibrationConfig(scope="head", joint=True),
    ],
    ids=["default", "joint", "head-band", "head-joint"],
)
def test_moments_are_the_sums_over_all_tokens(
    pair: Pair, config: CalibrationConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtllm_kvmap.calibrate.accumulate.ROWS", 48)  # several blocks, one partial
    moments = calibrate(*pair, DOCUMENTS, config, tmp_path / "m")
    assert len(moments.parts) == (1 if config.joint else 2) * (2 if config.scope == "head" else 1)
    for part in moments.parts:
        heads = {s.head for s in (*part.slices, *part.targets)}
        assert len(heads) == (1 if config.scope == "head" else 2)
        x, y = (rows(pair, s, config.skip_first) for s in (part.slices, part.targets))
        assert_moments(part, x, y)
    seen = [t for part in moments.parts for t in part.targets]
    band = range(*(config.layers or (0, 3)))
    assert sorted(seen) == [
        Slice("target", field, layer, head)
        for field in ("key", "value")
        for layer in band
        for head in (0, 1)
    ]
    loaded = MomentSet.load(tmp_path / "m")
    assert loaded.record == moments.record
    assert loaded.record["documents"] == len(DOCUMENTS)
    assert loaded.record["tokens"] == sum(len(d) - config.skip_first for d in DOCUMENTS)
    assert loaded.token_table is not None
    assert not list(tmp_path.glob("*.partial*"))


def test_the_default_columns_are_layer_major_with_the_targets_own_layer_behind(pair: Pair) -> None:
    keys, values = plan_parts(pair[0].spec, pair[1].spec, CalibrationConfig())
    for field, plan in (("key", keys), ("value", values)):
        assert plan.slices == (
            *(Slice("source", field, layer, head) for layer in (0, 1) for head in (0, 1)),
            *(Slice("target", field, 0, head) for head in (0, 1)),
        )
        assert (plan.width, plan.target_width) == (4 * 16 + 2 * 32, 6 * 32)


def test_large_means_do_not_eat_the_variation(pair: Pair) -> None:
    generator = torch.Generator().manual_seed(0)
    plan = plan_parts(pair[0].spec, pair[1].spec, CalibrationConfig())[0]
    sums, seen = PartSums(plan), []
    for _ in range(4):
        kvs = []
        for loaded in pair:
            layers, heads, width = loaded.spec.kv_shape
            noise = torch.randn(layers, heads, 50, width, generator=generator)
            kvs.append(CapturedKv(500 + noise, noise))
        sums.add(*kvs, 4)
        seen.append(kvs)
    x = torch.cat(
        [
            torch.cat(
                [
                    (source if s.origin == "source" else target).keys[s.layer, s.head, 4:]
                    for s in plan.slices
                ],
                dim=1,
            )
            for source, target in seen
        ]
    ).double()
    moments = sums.part().moments
    centred = moments.gram - torch.outer(moments.source_sum, moments.source_sum) / moments.count
    expected = (x - x.mean(0)).T @ (x - x.mean(0))
    # float32 sums of squares of 500 would be off by about 0.1 here.
    torch.testing.assert_close(centred, expected, rtol=0, atol=1e-3)


class KilledError(Exception):
    pass


def calibrate_until(pair: Pair, stop: int, config: CalibrationConfig, out: Path, **options) -> None:
    def on_document(done: int, total: int) -> None:
        if done == stop:
            raise KilledError

    with pytest.raises(KilledError):
        calibrate(*pair, DOCUMENTS, config, out, on_document=on_document, **options)


def test_resuming_after_a_kill_ends_with_the_same_bytes(pair: Pair, tmp_path: Path) -> None:
    config = CalibrationConfig(checkpoint_every=2)
    calibrate(*pair, DOCUMENTS, config, tmp_path / "whole")
    out, calls = tmp_path / "killed", []
    calibrate_until(pair, 3, config, out)
    calibrate_until(pair, 5, config, out, resume=True)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["killed.partial", "whole"]
    calibrate(
        *pair, DOCUMENTS, config, out, resume=True, on_document=lambda *call: calls.append(call)
    )
    assert calls == [(5, 7), (6, 7), (7, 7)]  # the last checkpoint was after document 4
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()
    assert not list(tmp_path.glob("*.partial*"))


def test_resume_without_a_checkpoint_starts_at_the_beginning(pair: Pair, tmp_path: Path) -> None:
    config, calls = CalibrationConfig(), []
    calibrate_until(pair, 3, config, tmp_path / "m")
    assert not list(tmp_path.iterdir())
    calibrate(
        *pair,
        DOCUMENTS,
        config,
        tmp_path / "m",
        resume=True,
        on_document=lambda *call: calls.append(call),
    )
    assert calls[0] == (1, 7)


def test_another_run_is_not_resumed(pair: Pair, random_model, tmp_path: Path) -> None:
    config, out = CalibrationConfig(checkpoint_every=2), tmp_path / "m"
    calibrate_until(pair, 3, config, out)
    partial = (tmp_path / "m.partial").read_bytes()
    other = random_model("qwen3", layers=2, seed=9)
    changed = [*DOCUMENTS[:-1], [*DOCUMENTS[-1][:-1], 1]]
    for models, documents, asked, what in (
        (pair, changed, config, "text"),
        (pair, DOCUMENTS, replace(config, skip_first=3), "config"),
        ((other, pair[1]), DOCUMENTS, config, "the source model"),
        ((pair[0], replace(pair[1])), DOCUMENTS, replace(config, layers=(0, 1)), "config"),
    ):
        with pytest.raises(MismatchError, match=rf"another calibration \({what} differ"):
            calibrate(*models, documents, asked, out, resume=True)
    assert (tmp_path / "m.partial").read_bytes() == partial
    (tmp_path / "m.partial").write_bytes(partial[:-1])
    with pytest.raises(FormatError):
        calibrate(*pair, DOCUMENTS, config, out, resume=True)


def test_two_calibrations_add_up_to_one(pair: Pair, tmp_path: Path) -> None:
    config = CalibrationConfig()
    whole = calibrate(*pair, DOCUMENTS, config, tmp_path / "whole")
    first, second = (
        calibrate(*pair, part, config, tmp_path / "half") for part in (DOCUMENTS[:3], DOCUMENTS[3:])
    )
    total = first + second
    for a, b in zip(total.parts, whole.parts, strict=True):
        for x, y in zip(a.moments.tensors(), b.moments.tensors(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-12 * float(y.abs().max()))
    assert (total.record["documents"], total.record["tokens"]) == (7, whole.record["tokens"])
    assert total.record["text"] == first.record["text"] + second.record["text"]


@pytest.mark.parametrize("other", ["uniform", "sensitivity"])
def test_calibrations_that_weigh_otherwise_do_not_add_up(
    pair: Pair, tmp_path: Path, other: str
) -> None:
    first, second = (
        calibrate(*pair, DOCUMENTS[:2], CalibrationConfig(weighting=weighting), tmp_path / "half")
        for weighting in ("attention", other)
    )
    with pytest.raises(MismatchError, match=f"by attention and {other}"):
        first + second


def test_memory_holds_one_document(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every captured document is gone before the next one is read."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def watched(loaded: LoadedModel, cache: HeldCache) -> CapturedKv:
        others = alive[:-1] if loaded is pair[1] else alive  # the source has just read this one
        assert [ref() for ref in others if ref() is not None] == []
        kv = captured(loaded, cache)
        alive.append(weakref.ref(kv.keys))
        return kv

    monkeypatch.setattr(run_module, "captured", watched)
    calibrate(*pair, DOCUMENTS, CalibrationConfig(), tmp_path / "m")
    assert len(alive) == 2 * len(DOCUMENTS)


@pytest.mark.parametrize("length", [1, 4, 20])
def test_a_sink_serves_every_prefix_that_a_prompt_shares(
    pair: Pair, tmp_path: Path, length: int
) -> None:
    head = [1, *range(10, 29)][:length]
    documents = [[*head, 40, 41, 42, 43, 44], [*head, 50, 51, 52, 53]]
    moments = calibrate(*pair, documents, CalibrationConfig(), tmp_path / "m")
    moments.save(tmp_path / "n")
    kvmap = fit(MomentSet.load(tmp_path / "n"), FitConfig(n=2, ridge=0.1))
    kvmap.save(tmp_path / "map")
    kvmap = KvMap.load(tmp_path / "map", allow_unproven=True)
    stored = head[:16]
    assert [entry.token_ids for entry in kvmap.sinks] == [tuple(stored)]
    for shared in range(1, len(stored) + 1):
        prompt = torch.tensor([*stored[:shared], 60, 61, 62])
        entry = kvmap.sink_for(prompt.tolist())
        assert entry is not None
        assert entry.token_ids == tuple(stored[:shared])
        with torch.no_grad():
            out = pair[1].model(input_ids=prompt[None], use_cache=True)
        for layer, kept in enumerate(out[pair[1].cache_argument].layers):
            for mine, theirs in ((entry.keys, kept.keys), (entry.values, kept.values)):
                assert mine[layer].shape == (2, shared, 32)
                torch.testing.assert_close(mine[layer], theirs[0, :, :shared], rtol=1e-4, atol=1e-5)
    assert kvmap.sink_for([5, *stored]) is None
    assert kvmap.sink_for([]) is None
    assert len(kvmap.sink_for(stored[:1]).token_ids) == 1


def test_the_longest_shared_prefix_of_several_sinks_is_served(pair: Pair, tmp_path: Path) -> None:
    documents = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]
    moments = calibrate(*pair, documents, CalibrationConfig(), tmp_path / "m")
    entry = moments.sinks[0]
    other = replace(entry.first(3), token_ids=(1, 9, 9))
    kvmap = fit(replace(moments, sinks=(other, entry)), FitConfig(n=1, ridge=0.1, own_slices=False))
    served = kvmap.sink_for([1, 2, 7])
    assert served is not None
    assert served.token_ids == (1, 2)
    assert torch.equal(served.keys, entry.keys[:, :, :2])


def test_documents_without_a_shared_first_token_leave_no_sink(pair: Pair, tmp_path: Path) -> None:
    documents = [[1, *range(20, 30)], [2, *range(20, 30)]]
    assert calibrate(*pair, documents, CalibrationConfig(), tmp_path / "m").sinks == ()


@pytest.mark.parametrize(
    ("documents", "config", "reason"),
    [
        ([], {}, "no document"),
        ([[1, 2, 3, 4]], {}, "Document 0 has 4 tokens; 5 to 512"),
        ([[1] * 9, [1] * 513], {}, "Document 1 has 513 tokens"),
        ([[1] * 9], {"max_tokens": 8}, "Document 0 has 9 tokens; 5 to 8"),
        ([[1] * 9 + [VOCAB]], {}, f"ids from 1 to {VOCAB}; both models know 0 to {VOCAB - 1}"),
        ([[1] * 9], {"layers": (1, 4)}, "layers 1 to 4"),
        ([[1] * 9], {"layers": (2, 2)}, "first target layer"),
        ([[1] * 9], {"layers": (1,)}, "first target layer"),
        ([[1] * 9], {"scope": "slice"}, "scope must be all or head"),
        ([[1] * 9], {"skip_first": -1}, "skip_first must be at least 0"),
        ([[1] * 9], {"checkpoint_every": 0}, "checkpoint_every must be at least 1"),
        ([[1] * 9], {"max_tokens": 5}, "max_tokens must leave"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    pair: Pair, tmp_path: Path, documents, config, reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        calibrate(*pair, documents, CalibrationConfig(**config), tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_pairs_that_do_not_fit_are_refused(pair: Pair, random_model, tmp_path: Path) -> None:
    stranger = random_model("qwen3", words=["<pad>", "<bos>", "x", "y"])
    wide = random_model("qwen3", heads=4, kv_heads=4, seed=3)
    for target, config, reason in (
        (stranger, CalibrationConfig(), "different tokenizers"),
        (wide, CalibrationConfig(scope="head"), "equally many KV heads"),
    ):
        with pytest.raises(MismatchError, match=reason):
            calibrate(pair[0], target, [[1] * 9], config, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_a_fit_of_calibrated_moments_maps_a_model_to_itself(
    random_model: Callable[..., LoadedModel], tmp_path: Path
) -> None:
    loaded = random_model("qwen3", layers=2, seed=1)
    generator = torch.Generator().manual_seed(0)
    documents = torch.randint(1, VOCAB, (20, 60), generator=generator).tolist()
    moments = calibrate(loaded, loaded, documents, CalibrationConfig(), tmp_path / "m")
    for scope, options in (("copy", {}), ("head", {"k": 1}), ("slice", {"n": 1})):
        kvmap = fit(moments, FitConfig(scope=scope, ridge=1e-6, **options))
        for field in ("key", "value"):
            assert kvmap.fitted["r2"][field]["worst"] == pytest.approx(1.0, abs=1e-6)
        for group in kvmap.groups:
            assert group.slices[0].layer == group.layer
