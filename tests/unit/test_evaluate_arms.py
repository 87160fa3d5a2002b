"""Every arm on random models, whose true answers are known by construction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from evaluate_cases import ITEMS, arms_of
from handmade_maps import copy_map, random_map

from trtllm_kvmap.artifact.native import TokenTable
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.evaluate.arms import Arm
from trtllm_kvmap.evaluate.probe import Ready, ask
from trtllm_kvmap.evaluate.reading import Reading, judge, read_item
from trtllm_kvmap.inject.hf_cache import num_entries, take_span, view_pool
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.slices import Slice


@pytest.fixture(scope="module")
def pair(random_model: Callable) -> tuple[LoadedModel, LoadedModel]:
    return random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)


@pytest.fixture(scope="module")
def reading(pair: tuple[LoadedModel, LoadedModel]) -> Reading:
    return read_item(*pair, ITEMS[0], ITEMS[1:], rollout_steps=5)


@pytest.fixture(scope="module")
def all_arms(pair: tuple[LoadedModel, LoadedModel]) -> dict[str, Arm]:
    return arms_of(random_map(*pair), *pair)


def answers_of(ready: Ready, reading: Reading) -> torch.Tensor:
    return ask(ready, reading.script.tree).log_probs


def test_the_target_answers_twice_the_same(reading: Reading, all_arms: dict[str, Arm]) -> None:
    first, second = (answers_of(all_arms["target"](reading), reading) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, reading.answers.log_probs)
    outcome = judge(all_arms["target"](reading), reading, length_normalised=False)
    assert outcome.score.agreed == outcome.score.tokens == 7
    assert outcome.score.rolled == outcome.score.steps == 5
    np.testing.assert_allclose(outcome.cosines, [1, 1, 1], rtol=1e-12)


def test_the_source_arm_is_the_source(reading: Reading, all_arms: dict[str, Arm]) -> None:
    ready = all_arms["source"](reading)
    assert ready.model is reading.source.model
    assert ready.model is not reading.target.model
    assert judge(ready, reading, length_normalised=False).cosines.shape == (0,)


def test_reinjection_is_bit_equal(reading: Reading, all_arms: dict[str, Arm]) -> None:
    ready = all_arms["reinjection"](reading)
    assert ready.cache is not reading.target.cache
    for mine, native in zip(
        view_pool(ready.cache).keys + view_pool(ready.cache).values,
        view_pool(reading.target.cache).keys + view_pool(reading.target.cache).values,
        strict=True,
    ):
        assert mine.data_ptr() != native.data_ptr()
        assert torch.equal(mine, native)
    assert torch.equal(answers_of(ready, reading), reading.answers.log_probs)


def test_an_identity_map_changes_nothing(pair: tuple[LoadedModel, LoadedModel]) -> None:
    model = pair[0]
    reading = read_item(model, model, ITEMS[0], ITEMS[1:], rollout_steps=4)
    for name, arm in arms_of(copy_map(model, model), model, model).items():
        if name.startswith(("mapped", "copy", "source")):
            got = answers_of(arm(reading), reading)
            torch.testing.assert_close(got, reading.answers.log_probs, rtol=0, atol=5e-5)
        elif name in ("wrong_document", "wrong_document_repaired", "no_context", "repair_only"):
            got = answers_of(arm(reading), reading)
            assert float((got - reading.answers.log_probs).abs().max()) > 0.1


@pytest.mark.parametrize(("first_tokens", "repair_window"), [(20, 40), (0, 60), (60, 1), (4, 80)])
def test_repair_only_with_every_token_computed_is_the_target(
    pair: tuple[LoadedModel, LoadedModel], reading: Reading, first_tokens: int, repair_window: int
) -> None:
    made = arms_of(random_map(*pair), *pair, first_tokens=first_tokens, repair_window=repair_window)
    for name in ("repair_only", f"mapped_repaired_{repair_window}", "wrong_document_repaired"):
        ready = made[name](reading)
        assert len(ready.mapped) == 0
        got = answers_of(ready, reading)
        torch.testing.assert_close(got, reading.answers.log_probs, rtol=0, atol=5e-5)


def test_repair_only_is_the_target_that_may_not_look_at_the_middle(
    pair: tuple[LoadedModel, LoadedModel], reading: Reading
) -> None:
    made = arms_of(random_map(*pair), *pair, first_tokens=3, repair_window=9)
    ready = made["repair_only"](reading)
    assert (num_entries(ready.cache), ready.position) == (12, 60)
    asked = reading.item.continuation
    allowed = torch.ones(67, 67).tril()
    allowed[51:, 3:51] = 0
    mask = torch.zeros(1, 1, 67, 67).masked_fill(allowed == 0, torch.finfo(torch.float32).min)
    token_ids = torch.tensor([reading.item.context + asked])
    with torch.no_grad():
        wanted = pair[1].model(token_ids, attention_mask=mask).logits[0, 59:66]
    torch.testing.assert_close(ready.logits, wanted[0], rtol=0, atol=2e-5)
    got = ask(ready, reading.script.tree).token_log_probs(reading.script.continuation, asked)
    wanted = torch.log_softmax(wanted, -1)[range(7), list(asked)].double()
    torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=0, atol=2e-5)


def test_the_wrong_document_keeps_only_the_true_ends(
    pair: tuple[LoadedModel, LoadedModel], reading: Reading
) -> None:
    """The arm equals handing over a text whose middle is the stranger's, up to repair, which reads
    the true end.
    """
    made = arms_of(random_map(*pair), *pair, first_tokens=2, repair_window=6)
    stranger = reading.stranger
    assert stranger.token_ids == (ITEMS[1].context + ITEMS[2].context)[:60]
    ready = made["wrong_document_repaired"](reading)
    right = made["mapped_repaired_6"](reading)
    assert ready.mapped == right.mapped == range(2, 54)
    own, mapped = view_pool(ready.cache), view_pool(right.cache)
    for mine, theirs in zip(own.keys + own.values, mapped.keys + mapped.values, strict=True):
        assert torch.equal(mine[:, :, :2], theirs[:, :, :2])
        assert not torch.isclose(mine[:, :, 2:54], theirs[:, :, 2:54]).all(-1).any()
    bridge = KvBridge(random_map(*pair), source=pair[0], target=pair[1])
    middle = bridge.convert(stranger.source.cache, stranger.token_ids, first_tokens=2)
    for mine, theirs in zip(own.values, view_pool(middle).values, strict=True):
        torch.testing.assert_close(mine[:, :, 2:54], theirs[:, :, 2:54])


def test_a_map_that_reads_token_ids_reads_the_strangers(
    pair: tuple[LoadedModel, LoadedModel], reading: Reading
) -> None:
    """Every head is a copy of a table of token ids, so the values tell which ids were read."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, pair[1].spec.vocab_size, 2, 16, generator=generator)
    groups = tuple(
        replace(
            group,
            heads=(0, 1),
            slices=tuple(Slice("target", group.field, 0, head) for head in (0, 1)),
            weight=None,
            bias=None,
        )
        for group in random_map(*pair).groups
        if group.heads == (0,)
    )
    kvmap = replace(random_map(*pair), groups=groups, token_table=TokenTable(keys, values))
    read = reading.stranger.token_ids
    ready = arms_of(kvmap, *pair)["wrong_document"](reading)
    for mine in view_pool(ready.cache).values:
        wanted = values[list(read[1:59])].transpose(0, 1)
        assert torch.equal(mine[0, :, 1:59], wanted)


def test_no_context_is_a_text_that_ends_after_the_first_tokens(
    pair: tuple[LoadedModel, LoadedModel], reading: Reading
) -> None:
    for first_tokens, kept in ((0, 1), (1, 1), (5, 5)):
        made = arms_of(random_map(*pair), *pair, first_tokens=first_tokens)
        ready = made["no_context"](reading)
        native = prefill(pair[1], reading.item.context[:kept])
        torch.testing.assert_close(ready.logits, native.logits[-1], rtol=0, atol=1e-5)
        assert (ready.position, num_entries(ready.cache)) == (kept, kept)


def test_arms_leave_the_readings_as_they_were(reading: Reading, all_arms: dict[str, Arm]) -> None:
    def caches() -> list[KvPool]:
        readies = (reading.source, reading.target, reading.stranger.source)
        return [take_span(r.cache, range(num_entries(r.cache))) for r in readies]

    before = caches()
    for arm in all_arms.values():
        judge(arm(reading), reading, length_normalised=False)
    for was, now in zip(before, caches(), strict=True):
        for a, b in zip(was.keys + was.values, now.keys + now.values, strict=True):
            assert torch.equal(a, b)
