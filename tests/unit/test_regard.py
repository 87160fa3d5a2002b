"""Rows weighed by what the target makes of them, and what errors cost: from the formulas."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trtllm_kvmap.artifact.container import read_container, write_container
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.calibrate.capture import (
    Attention,
    attention_given,
    capture_kv,
    output_projection,
    read,
)
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.regard import projections, regard, row_weights, turned_back
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.calibrate.sensitivity import gradients
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import FormatError, InputError, MismatchError, UnavailableError
from trtllm_kvmap.evaluate.probe import attention_outputs
from trtllm_kvmap.inject.hf_cache import fork
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.rotary import apply_rope, applying_rows
from trtllm_kvmap.spec.rope import RopeParams

DOCUMENTS = [np.random.default_rng(n).integers(1, 60, size=n).tolist() for n in (14, 30, 23)]
AFTER = [[[5, 6]], [[7, 8, 9], [3]], [[11, 12]]]
WEIGHED = CalibrationConfig(weighting="sensitivity", skip_first=2, ess_floor=0.3, joint=True)
GROUP = 2  # query heads to a KV head in the random models


@pytest.fixture(scope="session")
def pair(random_model: Callable[..., LoadedModel]) -> tuple[LoadedModel, LoadedModel]:
    return random_model("qwen3", layers=2, seed=1), random_model("llama", layers=2, seed=2)


def given_to(loaded: LoadedModel, document: list[int], after: list[int]) -> list[Attention]:
    with attention_given(loaded) as given:
        prefill(loaded, after, fork(read(loaded, torch.tensor(document))))
    return given[-loaded.spec.num_layers :]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral"])
def test_what_attention_is_given_makes_what_it_returns(
    random_model: Callable[..., LoadedModel], architecture: str
) -> None:
    """Shares of attention times values through the output projection are the layer's output."""
    loaded = random_model(architecture, layers=2, seed=3)
    cache = fork(read(loaded, torch.tensor(DOCUMENTS[0])))
    with attention_outputs(loaded) as outputs, attention_given(loaded) as given:
        prefill(loaded, [5, 9, 2], cache)
    assert len(given) == len(outputs) == 2
    for layer, (attention, output) in enumerate(zip(given, outputs, strict=True)):
        shares = attention.shares()
        heads = shares @ cache.layers[layer].values[0]
        rows = heads.view(-1, 3, heads.shape[-1]).transpose(0, 1).flatten(1)
        torch.testing.assert_close(rows @ output_projection(loaded, layer).T, output[0])


def test_a_long_continuation_is_regarded_piece_by_piece(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares are queries times entries: no more queries at a time than QUERIES, same result."""
    loaded, after = pair[1], [[5, 9, 2, 7, 11, 3, 8], [4, 4]]
    cache, projected = read(loaded, torch.tensor(DOCUMENTS[0])), projections(loaded)
    whole = regard(loaded, cache, after, "attention", projected)
    shares, held = Attention.shares, []
    monkeypatch.setattr(Attention, "shares", lambda self: held.append(self) or shares(self))
    monkeypatch.setattr("trtllm_kvmap.calibrate.regard.QUERIES", 3)
    pieces = regard(loaded, cache, after, "attention", projected)
    assert max(each.queries.shape[1] for each in held) == 3
    for field, rows in whole.rows.items():
        torch.testing.assert_close(pieces.rows[field], rows)


def test_weighing_by_attention_computes_no_logits(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    loaded, calls = pair[1], []
    head = loaded.model.lm_head.register_forward_hook(lambda *given: calls.append(given))
    cache, projected = read(loaded, torch.tensor(DOCUMENTS[0])), projections(loaded)
    try:
        for weighting, logits in (("attention", 0), ("sensitivity", 1)):
            regard(loaded, cache, [[5, 9]], weighting, projected)
            assert len(calls) == logits
    finally:
        head.remove()


def test_the_model_is_left_as_it_was(random_model: Callable[..., LoadedModel]) -> None:
    loaded = random_model("qwen3", layers=2, seed=3)
    loaded.model.set_attn_implementation("eager")
    try:
        with pytest.raises(InputError), attention_given(loaded) as given:
            prefill(loaded, [5, 10_000])
        assert not given
        assert loaded.model.config._attn_implementation == "eager"
    finally:
        loaded.model.set_attn_implementation("sdpa")
    prefill(loaded, [5, 9, 2])
    assert not given, "nothing is taken after the block"
    other = random_model("llama", layers=2, seed=2)
    with attention_given(loaded) as given:
        prefill(other, [5, 9, 2])
    assert not given, "another model's attention is not this one's"


def test_the_attention_that_a_host_put_into_the_table_stays_there(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    usual, calls = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def of_the_host(*given: Any, **more: Any) -> Any:
        calls.append(given)
        return usual(*given, **more)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = of_the_host
    try:
        with attention_given(pair[0]) as given:
            prefill(pair[0], [5, 9, 2])
        assert len(given) == len(calls) == 2, "it runs inside the block as well"
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is of_the_host
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    with attention_given(pair[0]):
        pass
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is usual


def test_two_threads_take_turns(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """The table of attention functions is the process's: a second thread that came in between would
    lose its place there when the first one leaves.
    """
    entered, left, counts = threading.Event(), threading.Event(), []

    def other() -> None:
        with attention_given(pair[1]) as given:
            entered.set()
            left.wait(5)
            prefill(pair[1], [5, 9, 2])
            counts.append(len(given))

    thread = threading.Thread(target=other)
    with attention_given(pair[0]) as given:
        thread.start()
        assert not entered.wait(0.2)
        prefill(pair[0], [5, 9, 2])
    left.set()
    thread.join()
    assert [len(given), *counts] == [2, 2]


def test_what_another_thread_runs_on_the_same_model_is_not_collected(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    with attention_given(pair[0]) as given:
        thread = threading.Thread(target=prefill, args=(pair[0], [7, 7, 7, 7]))
        thread.start()
        thread.join()
        prefill(pair[0], [5, 9, 2])
    assert [each.queries.shape[1] for each in given] == [3, 3]


@pytest.mark.parametrize(
    "rope",
    [
        RopeParams(rotary_dim=8),
        RopeParams(rotary_dim=8, interleaved=True),
        RopeParams(rotary_dim=4, interleaved=True),
        RopeParams(rotary_dim=4, attention_factor=1.3),
    ],
)
def test_an_error_of_a_key_costs_what_all_queries_make_of_it(rope: RopeParams) -> None:
    generator = torch.Generator().manual_seed(4)
    queries = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    error = torch.randn(8, generator=generator, dtype=torch.float64)
    positions = torch.arange(11)
    turned = apply_rope(error.expand(11, 8), positions, rope)  # the error at each position
    cost = (queries @ turned.T).square().sum(1).mean(1)
    cos_sin = applying_rows(positions, rope, 0, torch.float64)
    found = turned_back(queries.mT @ queries, *cos_sin, rope)
    torch.testing.assert_close(torch.einsum("d,hde,e->h", error, found, error), cost)


@pytest.mark.parametrize("weighting", ["sensitivity", "attention"])
def test_errors_cost_what_the_formulas_say(
    pair: tuple[LoadedModel, LoadedModel], weighting: str
) -> None:
    loaded, document, after = pair[1], DOCUMENTS[0], [[5, 9, 2], [7]]
    cache = read(loaded, torch.tensor(document))
    found = regard(loaded, cache, after, weighting, projections(loaded))
    layers, heads, head_dim = loaded.spec.kv_shape
    assert found.cost["key"].shape == (layers, heads, head_dim, head_dim)
    error = torch.randn(head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    at = apply_rope(error.expand(14, -1), torch.arange(14), loaded.spec.rope)
    for layer in range(layers):
        given = [given_to(loaded, document, each)[layer] for each in after]
        weight = output_projection(loaded, layer).double().view(-1, heads * GROUP, head_dim)
        for head in range(heads):
            mine = slice(head * GROUP, head * GROUP + GROUP)
            scores = [a.queries[mine].double() @ at.T for a in given]
            key_cost = sum(s.square().sum((0, 1)) for s in scores).mean()
            value_cost = 4 * (weight[:, mine] @ error).square().sum()  # four tokens are read
            for field, cost in (("key", key_cost), ("value", value_cost)):
                metric = found.cost[field][layer, head]
                torch.testing.assert_close(error @ metric @ error, cost, rtol=1e-4, atol=0.0)


def test_rows_weigh_what_errors_move_in_the_output(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    loaded, document, after = pair[1], DOCUMENTS[0], [[5, 9, 2], [7]]
    cache = read(loaded, torch.tensor(document))
    rows = regard(loaded, cache, after, "attention", projections(loaded)).rows
    for layer in range(2):
        for head in range(2):
            keys, values = np.zeros(14), np.zeros(14)
            for attention in (given_to(loaded, document, each)[layer] for each in after):
                for query_head in (2 * head, 2 * head + 1):
                    for number, q in enumerate(attention.queries[query_head].double().numpy()):
                        seen = attention.keys[head, : 14 + number + 1].double().numpy()
                        scores = np.exp(seen @ q * attention.scaling)
                        share, v = scores / scores.sum(), attention.values[head].double().numpy()
                        v = v[: len(share)]
                        apart = v - share @ v
                        keys += ((share[:, None] * apart) ** 2).sum(1)[:14]
                        values += share[:14] ** 2
            np.testing.assert_allclose(rows["key"][layer, head], keys, rtol=1e-3, atol=1e-9)
            np.testing.assert_allclose(rows["value"][layer, head], values, rtol=1e-3, atol=1e-9)


def test_a_model_without_a_known_output_projection_is_refused() -> None:
    attention = SimpleNamespace(self_attn=SimpleNamespace(dense=None))
    model = SimpleNamespace(base_model=SimpleNamespace(layers=[attention]))
    with pytest.raises(UnavailableError, match=r"no o_proj in layer 0 .* weighting uniform"):
        output_projection(SimpleNamespace(name="odd", model=model), 0)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("weighting", ["sensitivity", "attention"])
def test_moments_are_weighted_sums(
    pair: tuple[LoadedModel, LoadedModel], tmp_path: Path, weighting: str
) -> None:
    source, target = pair
    config = replace(WEIGHED, weighting=weighting)
    moments = calibrate(*pair, DOCUMENTS, config, tmp_path / "m", continuations=AFTER)
    assert [(p.targets[0].field, p.targets[0].layer) for p in moments.parts] == [
        (field, layer) for field in ("key", "value") for layer in (0, 1)
    ]
    for part in moments.parts:
        field, layer = part.targets[0].field, part.targets[0].layer
        gram = cross = metric = square = 0.0
        for document, after in zip(DOCUMENTS, AFTER, strict=True):
            ids = torch.tensor(document)
            kv = {"source": capture_kv(source, ids), "target": capture_kv(target, ids)}
            noted = regard(target, read(target, ids), after, weighting, projections(target))
            rows, costs = (x[field][layer] for x in (noted.rows, noted.cost))
            if weighting == "sensitivity":
                slopes = gradients(target, read(target, ids), after)
                squares = sum(getattr(g, field + "s")[layer].square().sum(-1) for g in slopes)
                torch.testing.assert_close(rows, squares)
            w = row_weights(rows.sum(0)[2:], 0.3).double().numpy()
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
            metric = metric + costs.numpy()
        found = part.moments
        np.testing.assert_allclose(found.gram, gram, rtol=1e-4, atol=1e-5 * abs(gram).max())
        np.testing.assert_allclose(found.cross, cross, rtol=1e-4, atol=1e-5 * abs(cross).max())
        np.testing.assert_allclose(part.cost, metric, rtol=1e-4, atol=1e-5 * abs(metric).max())
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
        assert torch.equal(one.cost, other.cost)


def test_the_file_keeps_the_cost_and_files_of_one_weighting_add(
    pair: tuple[LoadedModel, LoadedModel], tmp_path: Path
) -> None:
    made = calibrate(*pair, DOCUMENTS, WEIGHED, tmp_path / "m")
    loaded = MomentSet.load(tmp_path / "m")
    both = made + loaded
    for one, other, total in zip(made.parts, loaded.parts, both.parts, strict=True):
        assert torch.equal(one.cost, other.cost)
        assert torch.equal(total.cost, 2 * one.cost)
    config = CalibrationConfig(weighting="sensitivity", skip_first=2, joint=True, scope="head")
    with pytest.raises(MismatchError, match="different columns"):
        made + calibrate(*pair, DOCUMENTS, config, tmp_path / "n")


def test_a_file_that_was_weighed_by_another_measure_is_refused(
    pair: tuple[LoadedModel, LoadedModel], tmp_path: Path
) -> None:
    """Version 1 kept other costs as `metric`; what was not weighed is version 1 still."""
    calibrate(*pair, DOCUMENTS, CalibrationConfig(skip_first=2), tmp_path / "plain")
    read_container(tmp_path / "plain", "moments", 1)
    calibrate(*pair, DOCUMENTS, WEIGHED, tmp_path / "m")
    with pytest.raises(FormatError, match="format version 2; this package reads versions 1 to 1"):
        read_container(tmp_path / "m", "moments", 1)
    content, tensors = read_container(tmp_path / "m", "moments", 2)
    older = {name.replace(".cost", ".metric"): tensor for name, tensor in tensors.items()}
    assert set(older) != set(tensors)
    write_container(tmp_path / "older", "moments", 1, content, older)
    with pytest.raises(FormatError, match="calibrate again with the same --weighting"):
        MomentSet.load(tmp_path / "older")


@pytest.mark.parametrize(
    ("config", "after", "message"),
    [
        (CalibrationConfig(), AFTER, "not read with weighting uniform"),
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
    with pytest.raises(
        InputError, match="weighting must be one of uniform, sensitivity, attention"
    ):
        CalibrationConfig(weighting="attended")
    with pytest.raises(InputError, match="ess_floor"):
        CalibrationConfig(ess_floor=0)
