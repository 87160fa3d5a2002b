"""Interventions: what is replaced, entry by entry, and faults planted in a map that they find."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from evaluate_cases import ITEMS, QUICK, make_item
from handmade_maps import copy_map, random_map
from rich.console import Console
from word_tokenizer import FakeWordTokenizer

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.arms import mapped
from trtllm_kvmap.evaluate.diagnosis.diagnose import diagnose
from trtllm_kvmap.evaluate.diagnosis.diagnosis import Diagnosis
from trtllm_kvmap.evaluate.diagnosis.interventions import (
    CONTROLS,
    SHIFT,
    Region,
    go_on,
    mapped_entries,
    replaced,
)
from trtllm_kvmap.evaluate.diagnosis.tables import headline, tables
from trtllm_kvmap.evaluate.diagnosis.token_error import TokenErrors
from trtllm_kvmap.evaluate.diagnosis.token_kinds import buckets_of, kinds_of, parts_of
from trtllm_kvmap.evaluate.probe import ask
from trtllm_kvmap.evaluate.reading import read_item
from trtllm_kvmap.evaluate.run import evaluate
from trtllm_kvmap.inject.hf_cache import view_pool
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.spec.slices import FIELDS, Slice

CONFIG = replace(QUICK, repair_window=8)
PLAN = plan_handoff(60, first_tokens=1, repair_window=8)


@pytest.fixture(scope="module")
def pair(random_model: Callable) -> tuple[LoadedModel, LoadedModel]:
    return random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)


def faulty(model: LoadedModel, field: str, layer: int, head: int) -> KvMap:
    """The exact map of a model to itself, but for one head of one layer and field."""
    exact = copy_map(model, model)
    dim = model.spec.head_dim
    noise = 2 * torch.randn(dim, generator=torch.Generator().manual_seed(7))
    groups: list[HeadGroup] = []
    for group in exact.groups:
        for h in group.heads:
            spoilt = (group.field, group.layer, h) == (field, layer, head)
            groups.append(
                HeadGroup(
                    field=group.field,
                    layer=group.layer,
                    heads=(h,),
                    slices=(Slice("source", group.field, group.layer, h),),
                    weight=torch.eye(dim),
                    bias=noise if spoilt else torch.zeros(dim),
                )
            )
    return replace(exact, scope="slice", groups=tuple(groups))


def test_only_the_region_becomes_the_targets_own(pair: tuple[LoadedModel, LoadedModel]) -> None:
    reading = read_item(*pair, ITEMS[0], (), rollout_steps=1)
    bridge = KvBridge(random_map(*pair), source=pair[0], target=pair[1])
    entries = mapped_entries(bridge, reading, PLAN)
    before = [view.clone() for view in view_pool(entries).keys + view_pool(entries).values]
    region = Region("", "", ("value",), range(1, 3), range(1, 2))
    hybrid = view_pool(replaced(reading, PLAN, entries, region, (3, 40)))
    native = view_pool(reading.target.cache)
    for field in FIELDS:
        for layer in range(3):
            expected = view_pool(entries).field(field)[0][layer].clone()
            if field == "value" and layer >= 1:
                for token in (3, 40):
                    expected[0, 1, token] = native.values[layer][0, 1, token]
            assert torch.equal(hybrid.field(field)[0][layer], expected)
    after = view_pool(entries).keys + view_pool(entries).values
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_nothing_replaced_is_the_mapped_arm_and_everything_the_native_target(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    reading = read_item(*pair, ITEMS[0], (), rollout_steps=1)
    bridge = KvBridge(random_map(*pair), source=pair[0], target=pair[1])
    entries = mapped_entries(bridge, reading, PLAN)
    mine = ask(go_on(reading, PLAN, entries), reading.script.tree).log_probs
    arm = ask(mapped(bridge, lambda _: PLAN, reading), reading.script.tree).log_probs
    torch.testing.assert_close(mine, arm, atol=1e-5, rtol=0)
    everything = Region("", "", FIELDS, range(3), range(2))
    whole = replaced(reading, PLAN, entries, everything)
    native = ask(go_on(reading, PLAN, whole), reading.script.tree).log_probs
    torch.testing.assert_close(native, reading.answers.log_probs, atol=1e-4, rtol=0)
    assert float((mine - native).abs().max()) > 0.1


@pytest.mark.parametrize(("field", "layer", "head"), [("key", 1, 0), ("value", 0, 1)])
def test_a_planted_fault_is_found(
    random_model: Callable, field: str, layer: int, head: int
) -> None:
    model = random_model("qwen3", seed=1, layers=3)
    found = diagnose(faulty(model, field, layer, head), model, model, ITEMS[:2], CONFIG)
    removed = {(i.group, i.name): i.removed["value"] for i in found.interventions}
    assert found.divergence["value"] > 1e-4
    other = {"key": "value", "value": "key"}[field]
    for name in (
        ("field", f"{field}s"),
        ("layer", f"layer {layer}"),
        ("layer", f"{field}s of layer {layer}"),
        ("head", f"head {head} of layer {layer}"),
        ("layers_below", f"layers 0-{layer}"),
        ("layers_above", f"layers {layer}-2"),
        ("layers_above", "layers 0-2"),
    ):
        assert removed[name] > 0.99, name
    for name in (
        ("field", f"{other}s"),
        ("layer", "layer 2"),
        ("head", f"head {1 - head} of layer {layer}"),
        ("layers_above", f"layers {layer + 1}-2"),
    ):
        assert abs(removed[name]) < 0.01, name
    error = found.kv_error[field]["nrmse"]
    assert max(range(3), key=lambda i: error[i]) == layer
    assert max(found.kv_error[other]["nrmse"]) < 1e-3


def test_the_positions_together_remove_what_all_do(pair: tuple[LoadedModel, LoadedModel]) -> None:
    found = diagnose(random_map(*pair), *pair, ITEMS, CONFIG)
    removed = {(i.group, i.name): i.removed["value"] for i in found.interventions}
    assert removed["layers_below", "layers 0-2"] > 0.999
    parts = [value for (group, _), value in removed.items() if group == "position"]
    assert len(parts) == 8
    assert all(part < 0.999 for part in parts)
    assert ("kind", "first") not in removed  # S = 1: the first token is never mapped
    assert removed["kind", "words"] > 0.999
    wanted = {"divergence", "interventions", "kv_error", "attention_cosine", "tokens", "lengths"}
    content = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert wanted < set(content)
    assert Diagnosis.from_json(content) == found
    console = Console(width=100, file=io.StringIO())
    for table in tables(found):
        console.print(table)
    shown = console.file.getvalue()
    assert "head 1 of layer 2" in shown
    assert "shifted_values" in shown
    assert f"{found.divergence['value']:.3f} [" in headline(found)


def test_controls_spoil_what_they_say(random_model: Callable) -> None:
    """Of the exact map of a model to itself, so that what is spoilt can be written down."""
    model = random_model("qwen3", seed=1)
    reading = read_item(model, model, ITEMS[0], (), rollout_steps=1)
    bridge = KvBridge(copy_map(model, model), source=model, target=model)
    entries = mapped_entries(bridge, reading, PLAN)
    native, span = view_pool(reading.target.cache), slice(1, 52)
    spoilt = {name: view_pool(c(bridge, reading, PLAN, entries)) for name, c in CONTROLS.items()}
    late = spoilt["shifted_values"]
    torch.testing.assert_close(late.values[1][0, :, 2:52], native.values[1][0, :, 1:51])
    torch.testing.assert_close(late.keys[1][0], native.keys[1][0, :, :52])
    heads = spoilt["permuted_heads"]
    torch.testing.assert_close(heads.values[1][0, 0, span], native.values[1][0, 1, span])
    torch.testing.assert_close(heads.keys[0][0, 1, span], native.keys[0][0, 0, span])
    torch.testing.assert_close(heads.keys[0][0, :, :1], native.keys[0][0, :, :1])
    # The same token SHIFT places later has, in layer 0, exactly the keys of a shifted one.
    turned = spoilt["shifted_positions"]
    context = ITEMS[0].context
    moved = (*context[:SHIFT], *context)
    later = read_item(model, model, replace(ITEMS[0], context=moved), (), rollout_steps=1)
    expected = view_pool(later.target.cache).keys[0][0, :, 1 + SHIFT : 52 + SHIFT]
    torch.testing.assert_close(turned.keys[0][0, :, span], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(turned.values[0][0, :, :52], native.values[0][0, :, :52])


def test_a_source_of_one_head_has_nothing_to_permute(random_model: Callable) -> None:
    source = random_model("qwen3", seed=1, kv_heads=1)
    target = random_model("qwen3", seed=2)
    kvmap = random_map(source, target, num_slices=1)
    found = diagnose(kvmap, source, target, [ITEMS[0]], CONFIG)
    assert "one KV head" in found.refused["permuted_heads"]
    names = {i.name for i in found.interventions if i.group == "control"}
    assert names == {"shifted_positions", "shifted_values"}


def test_errors_are_counted_where_they_are(pair: tuple[LoadedModel, LoadedModel]) -> None:
    target = pair[1]
    generator = torch.Generator().manual_seed(0)
    native = [torch.randn(1, 2, 40, 16, generator=generator) for _ in range(6)]
    ours = [view.clone() for view in native]
    for layer in range(3, 6):  # values: one unit in every channel of the tokens 20 and 21
        ours[layer][:, :, 20:22] += 1.0
    errors = TokenErrors(target)
    pools = [KvPool(tuple(views[:3]), tuple(views[3:])) for views in (ours, native)]
    errors.add(*pools, range(4, 40), 40, [1] * 40)
    rows = {(row.group, row.name): row for row in errors.rows()}
    bucket = rows["position", "16-31"]
    expected = 0.0
    for view in native[3:]:
        span = view[0, :, 4:40].double()
        spread = (span - span.mean(1, keepdim=True)).square().sum() / 36
        expected += float(2 * (2 * 16) / spread) / 16 / 3
    assert (bucket.tokens, bucket.key) == (16, 0.0)
    assert bucket.value == pytest.approx(expected)
    assert rows["position", "32-63"].value == 0.0
    assert [name for group, name in rows if group == "position"] == ["0-15", "16-31", "32-63"]
    assert rows["position", "0-15"].tokens == 12


def test_tokens_are_told_apart() -> None:
    tokenizer = FakeWordTokenizer()
    ids = tokenizer("the 42 , mill9 ...").input_ids
    assert kinds_of(tokenizer, [*ids, 0]) == {
        "first": [0],
        "words": [1, 4],
        "digits": [2],
        "punctuation": [3, 5],
        "special": [6],
    }
    assert kinds_of(None, [7, 8]) == {"first": [0], "words": [1]}
    assert {name: (p[0], p[-1]) for name, p in buckets_of(range(3, 130)).items()} == {
        "0-15": (3, 15),
        "16-31": (16, 31),
        "32-63": (32, 63),
        "64-127": (64, 127),
        "128-255": (128, 129),
    }
    parts = parts_of(range(5, 18))
    assert [p for part in parts.values() for p in part] == list(range(5, 18))
    assert {len(part) for part in parts.values()} == {1, 2}


def test_lengths_beyond_the_calibration_are_marked(pair: tuple[LoadedModel, LoadedModel]) -> None:
    fitted = {"moments": [{"config": {"max_tokens": 64}}]}
    kvmap = replace(random_map(*pair), fitted=fitted)
    longer = {96: [make_item(9, 96), make_item(10, 90)], 48: [make_item(11, 48)]}
    found = diagnose(kvmap, *pair, [ITEMS[0]], CONFIG, longer)
    assert [(r.tokens, r.beyond_calibration) for r in found.lengths] == [(48, False), (96, True)]
    for row in found.lengths:
        assert row.divergence["value"] > 0
        assert row.nll["value"] != row.target_nll["value"] != row.source_nll["value"]
    arms = evaluate(kvmap, *pair, longer[96], CONFIG).arms
    row = found.lengths[1]
    assert [row.nll, row.accuracy, row.gap_recovered] == [
        arms["mapped_repaired_8"][name] for name in ("nll", "accuracy", "gap_recovered")
    ]
    for arm in ("source", "target"):
        taken = getattr(row, f"{arm}_nll"), getattr(row, f"{arm}_accuracy")
        assert taken == (arms[arm]["nll"], arms[arm]["accuracy"])
    assert arms["source"]["accuracy"] != arms["target"]["accuracy"]  # else this shows nothing
    assert found.config["metric"] == "accuracy"
    untold = diagnose(random_map(*pair), *pair, [ITEMS[0]], CONFIG, {48: longer[48]})
    assert untold.lengths[0].beyond_calibration is None


def test_what_cannot_be_diagnosed_is_said(pair: tuple[LoadedModel, LoadedModel]) -> None:
    with pytest.raises(InputError, match="no items"):
        diagnose(random_map(*pair), *pair, [], CONFIG)
    with pytest.raises(InputError, match="computes all itself"):
        diagnose(random_map(*pair), *pair, [make_item(1, 8)], CONFIG)
