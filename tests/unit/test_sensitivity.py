"""Rows weighed by what the target makes of them: gradients against finite differences, weights and
sums against their formulas.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.calibrate.capture import capture_kv, read
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.calibrate.sensitivity import gradients, row_weights
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.inject.hf_cache import make_cache, view_pool
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.rotary import apply_rope

DOCUMENTS = [np.random.default_rng(n).integers(1, 60, size=n).tolist() for n in (14, 30, 23)]
AFTER = [[[5, 6]], [[7, 8, 9], [3]], [[11, 12]]]
WEIGHED = CalibrationConfig(weighting="sensitivity", skip_first=2, ess_floor=0.3, joint=True)


@pytest.fixture(scope="session")
def pair(random_model: Callable[..., LoadedModel]) -> tuple[LoadedModel, LoadedModel]:
    return random_model("qwen3", layers=2, seed=1), random_model("llama", layers=2, seed=2)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_gradients_are_those_of_finite_differences(
    random_model: Callable[..., LoadedModel], architecture: str
) -> None:
    loaded = random_model(architecture, layers=2, seed=3)
    ids, after = torch.tensor(DOCUMENTS[0]), [5, 9, 2]
    (found,) = gradients(loaded, read(loaded, ids), [after])
    kv, positions = capture_kv(loaded, ids), torch.arange(len(ids))
    rope, length = loaded.spec.rope, loaded.rope_length(len(ids))

    def read_after(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        cache = make_cache(loaded.spec, len(ids))
        pool = view_pool(cache)
        for layer in range(loaded.spec.num_layers):
            pool.keys[layer][0] = apply_rope(keys[layer], positions, rope, length)
            pool.values[layer][0] = values[layer]
        return prefill(loaded, after, cache).logits.double().log_softmax(-1)

    native = read_after(kv.keys, kv.values)
    generator = torch.Generator().manual_seed(zlib.crc32(repr((len(ids), after)).encode()))
    drawn = torch.multinomial(native.float().exp(), 1, generator=generator)
    step = 1e-2
    for field in ("keys", "values"):
        gradient = getattr(found, field)
        direction = gradient / gradient.norm()
        losses = []
        for sign in (1, -1):
            moved = {"keys": kv.keys, "values": kv.values}
            moved[field] = moved[field] + sign * step * direction
            losses.append(float(-read_after(**moved).gather(1, drawn).sum()))
        slope = (losses[0] - losses[1]) / (2 * step)
        assert slope == pytest.approx(float(gradient.norm()), rel=0.02)


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=40),
    st.floats(0.01, 1.0),
)
def test_weights_keep_their_mean_and_their_effective_sample_size(
    squares: list[float], floor: float
) -> None:
    weights = row_weights(torch.tensor(squares), floor).double()
    assert float(weights.mean()) == pytest.approx(1, rel=1e-4)
    effective = float(weights.sum() ** 2 / weights.square().sum())
    assert effective >= floor * len(squares) * (1 - 1e-3)
    order = np.argsort(squares, kind="stable")
    assert bool((weights[order].diff() >= -1e-5).all()), "more dependence, less weight"


def test_weights_that_need_no_floor_stay_as_they_are() -> None:
    squares = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(row_weights(squares, 0.1), squares / 2)
    assert torch.equal(row_weights(torch.zeros(3), 0.1), torch.ones(3))


def test_moments_are_weighted_sums(pair: tuple[LoadedModel, LoadedModel], tmp_path: Path) -> None:
    source, target = pair
    moments = calibrate(*pair, DOCUMENTS, WEIGHED, tmp_path / "m", continuations=AFTER)
    assert [(p.targets[0].field, p.targets[0].layer) for p in moments.parts] == [
        (field, layer) for field in ("key", "value") for layer in (0, 1)
    ]
    for part in moments.parts:
        field, layer = part.targets[0].field, part.targets[0].layer
        gram = cross = metric = square = 0.0
        for document, after in zip(DOCUMENTS, AFTER, strict=True):
            ids = torch.tensor(document)
            kv = {"source": capture_kv(source, ids), "target": capture_kv(target, ids)}
            slopes = [
                getattr(g, field + "s")[layer] for g in gradients(target, read(target, ids), after)
            ]
            squares = sum(g.square().sum((0, 2)) for g in slopes)[2:]
            w = row_weights(squares, 0.3).double().numpy()
            columns = {
                side: np.concatenate(
                    [
                        getattr(kv[s.origin], s.field + "s")[s.layer, s.head].numpy()[2:]
                        for s in each
                    ],
                    axis=1,
                ).astype(np.float64)
                for side, each in (("x", part.slices), ("y", part.targets))
            }
            gram = gram + np.einsum("t,ta,tb->ab", w, columns["x"], columns["x"])
            cross = cross + np.einsum("t,ta,tb->ab", w, columns["x"], columns["y"])
            square = square + (w[:, None] * columns["y"] ** 2).sum(0)
            metric = metric + sum(np.einsum("hta,htb->hab", g[:, 2:], g[:, 2:]) for g in slopes)
        found = part.moments
        np.testing.assert_allclose(found.gram, gram, rtol=1e-4, atol=1e-5 * abs(gram).max())
        np.testing.assert_allclose(found.cross, cross, rtol=1e-4, atol=1e-5 * abs(cross).max())
        np.testing.assert_allclose(part.metric, metric, rtol=1e-4, atol=1e-5 * abs(metric).max())
        np.testing.assert_allclose(found.target_square, square, rtol=1e-4)
        assert found.count == sum(len(d) - 2 for d in DOCUMENTS)


def test_without_continuations_the_last_quarter_is_read(
    pair: tuple[LoadedModel, LoadedModel], tmp_path: Path
) -> None:
    cuts = [3 * len(d) // 4 for d in DOCUMENTS]
    cut = calibrate(*pair, DOCUMENTS, WEIGHED, tmp_path / "a")
    given_apart = calibrate(
        *pair,
        [d[:c] for d, c in zip(DOCUMENTS, cuts, strict=True)],
        WEIGHED,
        tmp_path / "b",
        continuations=[[d[c:]] for d, c in zip(DOCUMENTS, cuts, strict=True)],
    )
    for one, other in zip(cut.parts, given_apart.parts, strict=True):
        assert all(map(torch.equal, one.moments.tensors(), other.moments.tensors()))
        assert torch.equal(one.metric, other.metric)


def test_the_file_keeps_the_metric_and_files_of_one_weighting_add(
    pair: tuple[LoadedModel, LoadedModel], tmp_path: Path
) -> None:
    made = calibrate(*pair, DOCUMENTS, WEIGHED, tmp_path / "m")
    loaded = MomentSet.load(tmp_path / "m")
    both = made + loaded
    for one, other, total in zip(made.parts, loaded.parts, both.parts, strict=True):
        assert torch.equal(one.metric, other.metric)
        assert torch.equal(total.metric, 2 * one.metric)
    config = CalibrationConfig(weighting="sensitivity", skip_first=2, joint=True, scope="head")
    with pytest.raises(MismatchError, match="different columns"):
        made + calibrate(*pair, DOCUMENTS, config, tmp_path / "n")


@pytest.mark.parametrize(
    ("config", "after", "message"),
    [
        (CalibrationConfig(), AFTER, "only with weighting sensitivity"),
        (WEIGHED, AFTER[:2], "continuations for 2"),
        (WEIGHED, [*AFTER[:2], []], "at least one continuation"),
        (WEIGHED, [*AFTER[:2], [[]]], "at least one token"),
        (WEIGHED, [*AFTER[:2], [[1] * 100_000]], "reads at most"),
    ],
)
def test_what_cannot_be_weighed_is_refused(
    pair: tuple[LoadedModel, LoadedModel],
    tmp_path: Path,
    config: CalibrationConfig,
    after: list[list[list[int]]],
    message: str,
) -> None:
    with pytest.raises(InputError, match=message):
        calibrate(*pair, DOCUMENTS, config, tmp_path / "m", continuations=after)
    assert not list(tmp_path.iterdir())


def test_bad_options_are_named() -> None:
    with pytest.raises(InputError, match="weighting must be uniform or sensitivity"):
        CalibrationConfig(weighting="attention")
    with pytest.raises(InputError, match="ess_floor"):
        CalibrationConfig(ess_floor=0)
