"""The harness's questions, held to one pass of a model over the whole text.

Runs on lm-evaluation-harness itself where it is installed, else on a fake of its base class.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fake_lm_eval
import pytest
import torch
from handmade_maps import random_map

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError, UnavailableError
from trtllm_kvmap.models import LoadedModel

if importlib.util.find_spec("lm_eval") is None:
    fake_lm_eval.install()
    HARNESS = f"a fake of lm_eval's LM, {fake_lm_eval.__file__}"
else:
    import lm_eval

    HARNESS = f"lm_eval {lm_eval.__version__}, {lm_eval.__file__}"

CONTEXT = "<bos> after anna ben near old mill stood " + "again after anna ben near " * 8


def asked(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def make(
    random_model: Callable, model_folder: Callable, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """``make(arm, **options)``: the adapter as the harness makes it, from a string."""
    from lm_eval.api.registry import get_model

    from trtllm_kvmap.evaluate import lm_eval_adapter

    print(HARNESS)
    path = tmp_path_factory.mktemp("map") / "map"
    source, target = random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)
    random_map(source, target).save(path)
    folders = {"source": model_folder("qwen3", seed=1)}
    folders["target"] = model_folder("qwen3", seed=2, layers=3)

    def made(arm: str, **options: Any) -> Any:
        given = {"kvmap": path, **folders, "arm": arm, **options}
        text = ",".join(f"{name}={value}" for name, value in given.items())
        extra = {"batch_size": 1, "max_batch_size": None, "device": None}
        adapter = get_model("kvmap").create_from_arg_string(text, extra)
        assert isinstance(adapter, lm_eval_adapter.KvMapLM)
        return adapter

    return made


def one_pass(model: LoadedModel, context: str, continuation: str) -> tuple[float, bool]:
    before, after = model.tokenise(context), model.tokenise(continuation)
    logits = prefill(model, [*before, *after]).logits[len(before) - 1 : -1]
    rows = range(len(after))
    total = float(torch.log_softmax(logits.double(), -1)[rows, after].sum())
    return total, logits.argmax(-1).tolist() == after


@pytest.mark.parametrize("arm", ["source", "target"])
@pytest.mark.parametrize("continuation", [" ben", " carl near old"])
def test_a_model_alone_answers_as_in_one_pass(make: Callable, arm: str, continuation: str) -> None:
    adapter = make(arm)
    ((total, greedy),) = adapter.loglikelihood([asked(CONTEXT.strip(), continuation)])
    wanted = one_pass(adapter.reader.model, CONTEXT.strip(), continuation)
    assert total == pytest.approx(wanted[0], abs=1e-4)
    assert greedy is wanted[1]


def test_the_greedy_continuation_is_greedy(make: Callable) -> None:
    adapter = make("target")
    context = CONTEXT.strip()
    (said,) = adapter.generate_until([asked(context, {"max_gen_toks": 5, "until": []})])
    assert len(said.split()) == 5
    ((_, greedy),) = adapter.loglikelihood([asked(context, f" {said}")])
    assert greedy
    first, second, *_ = said.split()
    stop = f" {second}" if second != first else second
    (cut,) = adapter.generate_until([asked(context, {"max_gen_toks": 5, "until": stop})])
    assert cut == said[: said.index(stop)]


def test_more_than_a_stride_is_generated_in_one_piece(make: Callable) -> None:
    adapter = make("mapped", repair_window=4)
    context = CONTEXT.strip()
    (said,) = adapter.generate_until([asked(context, {"max_new_tokens": 40})])
    ((_, greedy),) = adapter.loglikelihood([asked(context, f" {said}")])
    assert (len(said.split()), greedy) == (40, True)


def test_the_mapped_arm_hands_over(make: Callable) -> None:
    context = CONTEXT.strip()
    totals = {
        arm: make(arm, **options).loglikelihood([asked(context, " ben near")])[0][0]
        for arm, options in (("mapped", {"repair_window": 4}), ("target", {}), ("source", {}))
    }
    assert len({round(total, 3) for total in totals.values()}) == 3
    whole = make("mapped", repair_window=500)  # the target computes everything
    ((total, _),) = whole.loglikelihood([asked(context, " ben near")])
    assert total == pytest.approx(totals["target"], abs=1e-4)


def test_choices_of_one_context_are_read_once(
    make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make("mapped", repair_window=4)
    read, count = adapter.reader._read, []
    monkeypatch.setattr(adapter.reader, "_read", lambda ids: count.append(ids) or read(ids))
    requests = [
        asked(CONTEXT.strip(), f" {name}") for name in ("ben", "carl near", "dora old mill")
    ]
    together = adapter.loglikelihood([*requests, asked("<bos> after anna", " ben")])
    assert len(count) == 2
    apart = [adapter.loglikelihood([r])[0] for r in (requests[2], requests[0], requests[1])]
    assert [together[i] for i in (2, 0, 1)] == apart


def test_spaces_and_missing_contexts_are_cut_as_the_harness_does(
    make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make("target")
    assert adapter._pair("after anna  ", "ben") == adapter._pair("after anna", " ben")
    bos = adapter.reader.model.tokenizer.bos_token_id
    for blank in ("", " ", " \n"):
        found = adapter._pair(blank, "after anna")
        assert found == ([bos], adapter.reader.model.tokenise("after anna"))
    cut: list[str] = []  # line ends as well, which the words of this tokenizer do not show
    monkeypatch.setattr(adapter, "_ids", lambda text: cut.append(text) or [1])
    adapter._pair("after anna \n", "ben")
    assert cut == ["after anna", "after anna \nben"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_a_cuda_device_that_is_not_there_means_the_cpu(make: Callable) -> None:
    asked_for = make("target", device="cuda:0")
    assert asked_for.reader.model.device.type == "cpu"


def test_what_the_adapter_does_not_do_is_said(make: Callable) -> None:
    adapter = make("mapped")
    with pytest.raises(UnavailableError, match="hands no context over"):
        adapter.loglikelihood_rolling([asked("after anna")])
    with pytest.raises(InputError, match="do_sample=False"):
        adapter.generate_until([asked("after anna", {"do_sample": True})])
    with pytest.raises(InputError, match="mapped, source, target; got 'both'"):
        make("both")
    with pytest.raises(InputError, match="at least one token"):
        adapter.loglikelihood([asked("after anna", "")])
