"""Asking a model everything at once, and the scores of its answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from evaluate_cases import ITEMS
from random_models import available_architectures

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.evaluate.kv_error import KvError
from trtllm_kvmap.evaluate.probe import Answers, Ready, Script, ask
from trtllm_kvmap.evaluate.score import attention_cosines, score
from trtllm_kvmap.evaluate.tasks.items import Item, Question
from trtllm_kvmap.inject.hf_cache import num_entries
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.rotary import apply_rope
from trtllm_kvmap.spec.rope import RopeParams


@pytest.fixture(scope="module")
def pair(random_model: Callable) -> tuple[LoadedModel, LoadedModel]:
    return random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)


@pytest.mark.parametrize("architecture", available_architectures())
def test_one_pass_answers_as_many_separate_ones_would(
    architecture: str, random_model: Callable
) -> None:
    model, item = random_model(architecture), ITEMS[0]
    read = prefill(model, item.context)
    ready = Ready(model, read.cache, read.logits[-1], len(item.context))
    script = Script(item, (9, 8, 7))
    answers = ask(ready, script.tree)
    paths = [((9, 8, 7), script.predicted_rollout), (item.continuation, script.continuation)]
    for question, choices in zip(item.questions, script.choices, strict=True):
        paths += [
            (question.stem + choice, [None] * len(question.stem) + nodes)
            for choice, nodes in zip(question.choices, choices, strict=True)
        ]
    for path, nodes in paths:
        logits = prefill(model, item.context + path).logits[len(item.context) - 1 : -1]
        log_probs = torch.log_softmax(logits, -1)
        kept = [i for i, node in enumerate(nodes) if node is not None]
        got = answers.token_log_probs([nodes[i] for i in kept], [path[i] for i in kept])
        wanted = [float(log_probs[i, path[i]]) for i in kept]
        np.testing.assert_allclose(got, wanted, atol=2e-5)
        best = answers.top1([nodes[i] for i in kept])
        assert best == log_probs[kept].argmax(-1).tolist()
    assert num_entries(ready.cache) == len(item.context)
    assert torch.equal(ask(ready, script.tree).log_probs, answers.log_probs)


def test_attention_outputs_are_those_of_the_layers(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """The last layer's, put through the rest of the model by hand, gives the logits."""
    model, item = pair[1], ITEMS[0]
    read = prefill(model, item.context)
    ready = Ready(model, read.cache, read.logits[-1], len(item.context))
    script, residual = Script(item, ()), []
    last = model.model.base_model.layers[-1]
    hook = last.input_layernorm.register_forward_pre_hook(lambda _m, args: residual.append(args[0]))
    answers = ask(ready, script.tree)
    hook.remove()
    assert len(answers.attention) == 3
    with torch.no_grad():
        hidden = residual[0] + answers.attention[-1][None]
        hidden = hidden + last.mlp(last.post_attention_layernorm(hidden))
        logits = model.model.lm_head(model.model.base_model.norm(hidden))[0]
    torch.testing.assert_close(torch.log_softmax(logits, -1), answers.log_probs[1:])


def test_scores_by_hand() -> None:
    """Five words; every row of log-probabilities is written down, and so is every sum."""
    item = Item((0,), (Question((1,), ((2,), (3, 4)), 1),), (2, 2))
    script = Script(item, (2, 2))
    rows = {  # after the context, after 1, after 1 3, after 2
        "context": [0.1, 0.2, 0.3, 0.1, 0.3],
        "1": [0.1, 0.1, 0.35, 0.4, 0.05],
        "1 3": [0.1, 0.1, 0.1, 0.1, 0.6],
        "2": [0.2, 0.2, 0.2, 0.25, 0.15],
    }
    mine = Answers(torch.tensor(list(rows.values())).log(), ())
    theirs_rows = torch.tensor(list(rows.values()))
    theirs_rows[3] = torch.tensor([0.2, 0.2, 0.3, 0.1, 0.2])
    native = Answers(theirs_rows.log(), ())
    assert script.tree.token_ids == [1, 3, 2]
    got = score(script, mine, native, length_normalised=False)
    assert (got.correct, got.questions, got.chance) == (0, 1, 0.5)  # 0.35 beats 0.4 x 0.6
    assert score(script, mine, native, length_normalised=True).correct == 1
    assert got.nll == pytest.approx(-np.log(0.3) - np.log(0.2))
    assert (got.tokens, got.agreed) == (2, 1)  # the second likeliest token is 3 here, 2 there
    assert (got.rolled, got.steps) == (1, 2)  # for the same reason
    assert script.predicted_rollout == script.continuation == [-1, 2]


def test_cosines_of_attention() -> None:
    a = (torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(2, 3))
    b = (torch.tensor([[1.0, 0.0], [1.0, 0.0]]), -torch.ones(2, 3))
    empty = torch.zeros(0, 1)
    np.testing.assert_allclose(attention_cosines(Answers(empty, a), Answers(empty, b)), [0.5, -1])


def test_kv_error_by_hand() -> None:
    """One layer, one head, two items of three tokens each, of which token 0 is not mapped."""
    rope = RopeParams(rotary_dim=4)
    generator = torch.Generator().manual_seed(0)
    total = KvError(1, rope)
    rows = {"key": [], "value": []}
    for _ in range(2):
        content = torch.randn(4, 3, 4, generator=generator, dtype=torch.float64)
        ours, theirs = content[0], content[1]
        pools = [
            KvPool(
                (apply_rope(keys, torch.arange(3), rope).float()[None, None],),
                (values.float()[None, None],),
            )
            for keys, values in ((ours, content[2]), (theirs, content[3]))
        ]
        total.add(*pools, range(1, 3), rope_length=3)
        rows["key"].append((ours[1:], theirs[1:]))
        rows["value"].append((content[2][1:], content[3][1:]))
    got = total.to_json()
    for field, pieces in rows.items():
        ours, theirs = (np.concatenate([p[side].numpy() for p in pieces]) for side in (0, 1))
        spread = ((theirs - theirs.mean(0)) ** 2).sum()
        nrmse = np.sqrt(((ours - theirs) ** 2).sum() / spread)
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        cosine = ((ours * theirs).sum(1) / norms).mean()
        assert got[field]["nrmse"] == pytest.approx([nrmse], rel=1e-5)
        assert got[field]["cosine"] == pytest.approx([cosine], rel=1e-5)


def test_kv_error_of_nothing_is_nothing() -> None:
    assert KvError(2, RopeParams(rotary_dim=4)).to_json()["key"] == {
        "nrmse": [None, None],
        "cosine": [None, None],
    }
