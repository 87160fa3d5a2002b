"""Estimates against what really comes out, and against the sizes of a large pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trtllm_kvmap.calibrate import estimate as estimate_module
from trtllm_kvmap.calibrate.capture import read, token_table
from trtllm_kvmap.calibrate.config import CalibrationConfig, Weighting
from trtllm_kvmap.calibrate.estimate import CalibrationEstimate, estimate_calibration
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.calibrate.sensitivity import gradients
from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.machine import matmul_rate, say_bytes, say_seconds, total_memory
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.rope import RopeParams

GB = 10**9


def qwen3(name: str, layers: int, heads: int) -> ModelSpec:
    rope = RopeParams(rotary_dim=128)
    return ModelSpec(name, "qwen3", layers, heads, 8, 128, 151_936, 40_960, rope, "bfloat16")


SMALL, LARGE = qwen3("Qwen3-14B", 40, 40), qwen3("Qwen3-32B", 64, 64)


def estimate(config: CalibrationConfig, available: int) -> CalibrationEstimate:
    return estimate_calibration(
        SMALL, LARGE, config, tokens=1_000_000, flops_per_second=1e12, available=available
    )


def test_the_file_is_as_large_as_estimated(
    random_model: Callable[..., LoadedModel], tmp_path: Path
) -> None:
    pair = random_model(layers=4, seed=1), random_model(layers=3, head_dim=32, seed=2)
    for config in (
        CalibrationConfig(),
        CalibrationConfig(joint=True, layers=(0, 2)),
        CalibrationConfig(weighting="attention"),
    ):
        cost = estimate_calibration(
            *(m.spec for m in pair), config, tokens=10, flops_per_second=1e9, available=GB
        )
        moments = calibrate(*pair, [[1] * 9], config, tmp_path / "m")
        held = [t for part in moments.parts for t in part.moments.tensors()]
        held += [part.cost for part in moments.parts if part.cost is not None]
        assert cost.moments_bytes == sum(t.numel() * t.element_size() for t in held)
        assert cost.fits
        assert cost.shard is None
        assert 0 < (tmp_path / "m").stat().st_size - cost.moments_bytes < 120_000


def test_what_reading_on_takes_is_counted() -> None:
    """Weighed rows: beside their moments, queries and shares of attention lie in memory."""
    plain, weighed = (
        estimate(CalibrationConfig(weighting=w, max_tokens=8192), GB)
        for w in ("uniform", "attention")
    )
    beside = [cost.memory_bytes - cost.moments_bytes for cost in (plain, weighed)]
    queries, shares = 4 * 64 * 64 * 128 * 8192 // 4, 4 * 64 * 256 * 8192
    assert beside[1] - beside[0] > queries + shares


@pytest.mark.parametrize("tokens", [128, 512])
def test_what_a_gradient_keeps_is_counted(
    random_model: Callable[..., LoadedModel], tokens: int
) -> None:
    """Sensitivity: everything autograd saves, beside the weights, on the way to a gradient."""
    loaded = random_model(layers=3, heads=8, head_dim=32, seed=1)
    weights = {p.untyped_storage().data_ptr() for p in loaded.model.parameters()}
    saved: dict[int, int] = {}

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            saved[memory.data_ptr()] = memory.nbytes()
        return tensor

    read_on = tokens // 4
    cache = read(loaded, torch.arange(tokens - read_on) % 60)
    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        gradients(loaded, cache, [[5] * read_on])
    uniform, sensitive = (
        estimate_calibration(
            *(loaded.spec,) * 2,
            CalibrationConfig(weighting=weighting, max_tokens=tokens),
            tokens=10,
            flops_per_second=1e9,
            available=GB,
        )
        for weighting in ("uniform", "sensitivity")
    )
    beside = [cost.memory_bytes - cost.moments_bytes for cost in (uniform, sensitive)]
    kept = sum(saved.values())
    assert kept < beside[1] - beside[0] < 2 * kept


def test_a_large_pair_does_not_fit_jointly_and_a_shard_is_named() -> None:
    joint = estimate(CalibrationConfig(joint=True), 64 * GB)
    width, targets = 2 * (40 + 1) * 8 * 128, 2 * 64 * 8 * 128
    assert joint.moments_bytes == pytest.approx(8 * width * (width + targets), rel=1e-4)
    assert joint.moments_bytes > 100 * GB
    assert joint.shard is not None
    assert joint.shard.memory_bytes <= 64 * GB
    # Even one joint gram is 56 GB; keys and values apart fit in bands.
    assert (joint.shard.config.joint, joint.shard.config.scope) == (False, "all")
    text = " ".join(joint.sentences())
    assert "The moments take 144 GB" in text
    assert "more memory than the 64 GB at hand" in text
    assert "What fits: --layers 0 --layers 32; 2 runs, a layer band each" in text


@pytest.mark.parametrize(
    ("available", "config", "runs", "flags"),
    [
        (200, CalibrationConfig(joint=True), 1, ""),
        (100, CalibrationConfig(joint=True), 4, "--joint --layers 0 --layers 16;"),
        (40, CalibrationConfig(), 8, "--layers 0 --layers 8;"),
        (20, CalibrationConfig(), 1, "--scope head; 1 run,"),
        (8, CalibrationConfig(), 4, "--scope head --layers 0 --layers 16; 4 runs"),
        (40, CalibrationConfig(layers=(32, 64)), 4, "--layers 32 --layers 40; 4 runs"),
    ],
)
def test_the_shard_gives_up_as_little_as_fits(
    available: int, config: CalibrationConfig, runs: int, flags: str
) -> None:
    cost = estimate(config, available * GB)
    if not flags:
        assert cost.fits
        return
    assert cost.shard is not None
    assert cost.shard.runs == runs
    assert flags in cost.sentences()[-1]
    again = estimate(cost.shard.config, available * GB)
    assert again.fits
    assert again.memory_bytes == cost.shard.memory_bytes


def test_nothing_fits_a_tiny_machine() -> None:
    cost = estimate(CalibrationConfig(), GB // 10)
    assert cost.shard is None
    assert "No shard of this pair fits" in cost.sentences()[-1]


def test_unequal_heads_are_not_sharded_by_head() -> None:
    other = replace(LARGE, num_kv_heads=4)
    options = {"tokens": 10, "flops_per_second": 1e12, "available": 10 * GB}
    cost = estimate_calibration(SMALL, other, CalibrationConfig(), **options)
    assert cost.shard is None
    with pytest.raises(MismatchError, match="equally many KV heads"):
        estimate_calibration(SMALL, other, CalibrationConfig(scope="head"), **options)


def test_time_goes_with_tokens_and_the_rate() -> None:
    once = estimate(CalibrationConfig(), 200 * GB)
    # 12.6 + 51.5 billion weights by rule of thumb, twice each a token, and the sums.
    assert once.seconds == pytest.approx(1e6 * (2 * 64.1e9 + 14.5e9) / 1e12, rel=0.01)
    assert "1,000,000 tokens takes about 39.7 hours" in " ".join(once.sentences())


@pytest.mark.parametrize(("weighting", "off"), [("sensitivity", 0.1), ("attention", 0.02)])
def test_the_time_of_weighing_is_that_of_its_operations(
    random_model: Callable[..., LoadedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weighting: Weighting,
    off: float,
) -> None:
    """The matmuls of a real run, counted: weighed against uniform as the estimate has it. What
    weighing by attention costs beside them is no matmul, and left out.
    """
    monkeypatch.setattr(estimate_module, "SHARE", 0)
    shape = {"heads": 8, "kv_heads": 1, "head_dim": 32}
    pair = random_model(layers=1, seed=1, **shape), random_model(layers=6, seed=2, **shape)
    documents = [np.random.default_rng(n).integers(1, 60, size=256).tolist() for n in range(2)]
    counted, estimated = [], []
    for each in ("uniform", weighting):
        config = CalibrationConfig(weighting=each, max_tokens=256)
        with FlopCounterMode(display=False) as count:
            calibrate(*pair, documents, config, tmp_path / "m")
        with FlopCounterMode(display=False) as table:
            token_table(pair[1])
        counted.append(count.get_total_flops() - table.get_total_flops())
        cost = estimate_calibration(
            *(m.spec for m in pair), config, tokens=512, flops_per_second=1e9, available=GB
        )
        estimated.append(cost.seconds)
        assert ("the last quarter" in " ".join(cost.sentences())) == (each == weighting)
    assert estimated[1] / estimated[0] == pytest.approx(counted[1] / counted[0], rel=off)


def test_a_share_of_attention_costs_more_than_its_products() -> None:
    """Of the quarter that the target reads: 64 layers of 64 heads look at 1,024 entries."""
    costs = [
        estimate_calibration(
            SMALL,
            replace(LARGE, vocab_size=0),
            CalibrationConfig(weighting=weighting),
            tokens=10**6,
            flops_per_second=1e12,
            available=GB,
        ).seconds
        for weighting in ("attention", "sensitivity")
    ]
    shares, products = 64 * 64 * 1024, 64 * 64 * 128 * 1024
    less = 1000 * shares + 6 * products - 8 * products - 2 * 51.5e9
    assert costs[0] - costs[1] == pytest.approx(1e6 / 4 * less / 1e12, rel=0.01)


def test_the_machine_is_measured() -> None:
    assert matmul_rate(torch.float32, 0.01) > 1e8
    assert total_memory() > 10**8


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 bytes"), (999, "999 bytes"), (6_700_000_000, "6.7 GB"), (1.4e13, "14 TB")],
)
def test_bytes_in_words(count: float, said: str) -> None:
    assert say_bytes(count) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.01, "1 seconds"), (89, "89 seconds"), (600, "10 minutes"), (9000, "2.5 hours")],
)
def test_seconds_in_words(seconds: float, said: str) -> None:
    assert say_seconds(seconds) == said
