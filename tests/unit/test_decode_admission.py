"""What a bridge refuses, with what sentence, and that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from caches import tokens
from handmade_maps import copy_map, random_map
from random_models import write_model

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError, KvMapError, MismatchError
from trtllm_kvmap.inject.hf_cache import (
    empty_cache,
    make_cache,
    num_entries,
)
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.tiny.documents import VOCABULARY

OUTSIDE = len(VOCABULARY)  # the first token id that no model here knows


def changed_weight(folder: Path) -> LoadedModel:
    write_model(folder)
    loaded = load_model(folder)
    with torch.no_grad():
        loaded.model.model.layers[0].self_attn.v_proj.weight[2, 1] *= 1.001
    return loaded


def changed_rope(folder: Path) -> LoadedModel:
    write_model(folder, rope={"rope_theta": 10001.0})
    return load_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed_weight, "another {role} model: weights differ"),
        (changed_rope, "another {role} model: config differ"),
    ],
)
@pytest.mark.parametrize("role", ["source", "target"])
def test_another_model_is_refused(
    change: Callable, message: str, role: str, tmp_path: Path, random_model: Callable
) -> None:
    models = {"source": random_model(), "target": random_model()}
    kvmap = copy_map(**models)
    KvBridge(kvmap, **models)
    with pytest.raises(MismatchError, match=message.format(role=role)):
        KvBridge(kvmap, **{**models, role: change(tmp_path)})


def test_another_tokenizer_is_refused(random_model: Callable) -> None:
    swapped = random_model(words=[*VOCABULARY[:-2], VOCABULARY[-1], VOCABULARY[-2]])
    kvmap = copy_map(random_model(), swapped)
    with pytest.raises(MismatchError, match="different tokenizers"):
        KvBridge(kvmap, source=random_model(), target=swapped)


def test_an_unknown_backend_lists_the_known_ones(random_model: Callable) -> None:
    models = {"source": random_model(), "target": random_model()}
    with pytest.raises(InputError, match=r"'abacus'; choose one of .*cpu.*reference"):
        KvBridge(copy_map(**models), **models, backend="abacus")


PLAN = plan_handoff(20, repair_window=4)
MASK = torch.ones(2, 20)
MASK[1, :5] = 0
HOLE, NOTHING = MASK.clone(), MASK.clone()
HOLE[1, 8], NOTHING[1] = 0, 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"token_ids": []}, InputError, "at least one token"),
        (
            {"token_ids": [OUTSIDE] * 20},
            InputError,
            f"from {OUTSIDE} to {OUTSIDE}; .* knows 0 to {OUTSIDE - 1}",
        ),
        (
            {"token_ids": [3] * 19 + [OUTSIDE]},
            InputError,
            f"from 3 to {OUTSIDE}; .* knows 0 to {OUTSIDE - 1}",
        ),
        ({"token_ids": [3] * 19}, InputError, "0-0, 0-1, 1-16, 16-20; the prompt needs 0-19"),
        (
            {"token_ids": [3] * 600, "plan": plan_handoff(600)},
            InputError,
            "takes 600 positions; .* allows 512",
        ),
        ({"plan": replace(PLAN, mapped=range(2, 16))}, InputError, "without gaps"),
        ({"plan": plan_handoff(0), "token_ids": [3]}, InputError, "leaves no token to the target"),
        ({"source_cache": "empty"}, InputError, "holds no token; run the model over the prompt"),
        ({"source_cache": "short"}, InputError, "1 sequences of 15 tokens; the plan needs 1 of at"),
        ({"source_cache": "batch"}, InputError, "2 sequences of 20 tokens; the plan needs 1 of at"),
        ({"source_cache": "wide"}, MismatchError, r"source's cache holds .* = \(2, 2, 32\)"),
        ({"plan": plan_handoff(20, spliced=5)}, InputError, "so target_cache is needed"),
        (
            {"plan": plan_handoff(20, spliced=5), "target_cache": "tiny"},
            InputError,
            "target's cache holds 1 sequences of 3 tokens",
        ),
        (
            {"plan": plan_handoff(20, spliced=5), "target_cache": "wide"},
            MismatchError,
            "target's cache holds",
        ),
        (
            {"plan": plan_handoff(20, spliced=5), "target_cache": "half"},
            MismatchError,
            "cache is torch.bfloat16 but the model computes in torch.float32",
        ),
        ({"attention_mask": torch.ones(1, 19)}, InputError, r"\[1, 19\]; the token ids need"),
        (
            {"token_ids": [[3] * 20] * 2, "attention_mask": MASK.flip(1), "source_cache": "batch"},
            InputError,
            "must be left-padded",
        ),
        (
            {"token_ids": [[3] * 20] * 2, "attention_mask": HOLE, "source_cache": "batch"},
            InputError,
            "must be left-padded",
        ),
        (
            {"token_ids": [[3] * 20] * 2, "attention_mask": NOTHING, "source_cache": "batch"},
            InputError,
            "must be left-padded",
        ),
        (
            {
                "token_ids": [[3] * 20] * 2,
                "attention_mask": MASK,
                "source_cache": "batch",
                "target_cache": "batch",
                "plan": plan_handoff(20, spliced=5),
            },
            InputError,
            "spliced into a padded batch",
        ),
    ],
)
def test_a_bad_request_is_refused_before_anything_runs(
    changes: dict,
    error: type[KvMapError],
    message: str,
    random_model: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = random_model(), random_model(seed=1)
    caches = {
        "empty": empty_cache(),
        "tiny": prefill(source, tokens(3)).cache,
        "short": prefill(source, tokens(15)).cache,
        "right": prefill(source, tokens(20)).cache,
        "batch": prefill(source, tokens(2, 20)).cache,
        "wide": prefill(random_model(head_dim=32), tokens(20)).cache,
        "half": make_cache(source.spec, 20, dtype=torch.bfloat16),
    }
    before = {name: num_entries(cache) for name, cache in caches.items()}
    bridge = KvBridge(copy_map(source, target), source=source, target=target)

    def must_not_run(*_: object, **__: object) -> None:
        raise AssertionError("a model ran")

    monkeypatch.setattr(source.model, "forward", must_not_run)
    monkeypatch.setattr(target.model, "forward", must_not_run)
    request = {"source_cache": "right", "token_ids": tokens(20), "plan": PLAN, **changes}
    for name in ("source_cache", "target_cache"):
        if name in request:
            request[name] = caches[request[name]]
    with pytest.raises(error, match=message):
        bridge.hand_over(**request)
    assert {name: num_entries(cache) for name, cache in caches.items()} == before


def test_a_source_that_is_out_of_positions_can_still_hand_over(random_model: Callable) -> None:
    """The target may be the longer model: that is a reason to change."""
    source, target = random_model(max_positions=30), random_model(seed=1)
    bridge = KvBridge(random_map(source, target), source=source, target=target)
    ids = tokens(40)
    cache = prefill(source, ids[:30]).cache
    assert num_entries(bridge.hand_over(cache, ids, plan_handoff(40, repair_window=10)).cache) == 40
    with pytest.raises(InputError, match=r"takes 36 positions; .* allows 30"):
        bridge.hand_over(cache, ids, plan_handoff(40, repair_window=4))


def test_short_prompts_are_computed_by_the_target(random_model: Callable) -> None:
    source, target = random_model(), random_model(seed=1)
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    for count in (1, 2, 5):
        ids = tokens(count)
        handoff = bridge.hand_over(prefill(source, ids).cache, ids, plan_handoff(count))
        expected = prefill(target, ids).logits[-1]
        torch.testing.assert_close(handoff.logits, expected, rtol=0, atol=2e-5)
    # A source that has read nothing has nothing to give, and nothing is asked of it.
    bridge.hand_over(empty_cache(), tokens(5), plan_handoff(5))
    assert num_entries(bridge.convert(prefill(source, tokens(1)).cache, tokens(1))) == 1
