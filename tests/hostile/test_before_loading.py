"""What can be judged without the models is refused before the weights of either are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from handmade_maps import random_map
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.cli.verbs import app
from trtllm_kvmap.errors import UnavailableError
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.mapper import backends
from trtllm_kvmap.models import describe_model, load_model
from trtllm_kvmap.tiny.documents import VOCABULARY

JUDGING = ("evaluate", "diagnose", "guard")
READING = (
    "calibrate",
    "refine",
    "promote",
    "generate",
    "alternate",
    "fit",
    "plan",
    "find",
    *JUDGING,
)
UNKNOWN = "known are tiny, text, prompts, hellaswag"


@pytest.fixture(scope="module")
def work(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[..., Path]
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("before")
    pair = [model_folder("qwen3", seed=1), model_folder("qwen3", layers=3, seed=2)]
    models = [load_model(path) for path in pair]
    maps = folder / "there.kvmap.safetensors", folder / "back.kvmap.safetensors"
    random_map(*models, num_slices=1).save(maps[0])
    random_map(*models[::-1], num_slices=1).save(maps[1])
    text = folder / "text.jsonl"
    text.write_text(json.dumps({"text": "after anna ben near " * 20}) + "\n")
    other = model_folder("qwen3", layers=3, seed=2, words=VOCABULARY[:2] + VOCABULARY[:1:-1])
    return {"pair": pair, "maps": maps, "text": text, "out": folder / "out", "other": other}


def command(verb: str, work: dict[str, Any], target: object = None, text: object = None) -> list:
    """The verb as it would run, but for ``target`` and ``text`` if given."""
    source, usual = work["pair"]
    models = ["--source", source, "--target", target or usual]
    read, out, (there, back) = text or work["text"], ["--out", work["out"]], work["maps"]
    return {
        "calibrate": ["calibrate", source, target or usual, "--text", read, *out],
        "refine": ["refine", there, *models, "--text", read, *out],
        "promote": ["promote", there, *models, "--text", read, *out, "--new", there],
        "find": ["registry", "find", work["out"].parent, *models],
        "plan": ["plan", there, *models, "--tokens", 100, "--measure"],
        "generate": ["generate", there, *models, "--prompt", "after anna", "--allow-unproven"],
        "alternate": ["alternate", there, back, *models],
        "fit": ["fit", "none.moments.safetensors", *models, *out, "--n", 1, "--n", 2],
        **{verb: [verb, there, *models] for verb in JUDGING},
    }[verb]


@pytest.fixture
def complaint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, work: dict[str, Any]
) -> Callable[[list], str]:
    """The complaint of a command, in one line, which loads no weights and writes nothing."""

    def load(*given: Any, **more: Any) -> None:
        raise AssertionError(f"The weights of {given[0]} are loaded.")

    def run(arguments: list) -> str:
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == 2, (arguments, result.output, result.exception)
        assert not work["out"].exists()
        return " ".join(result.stderr.replace("│", " ").split())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    return run


@pytest.mark.parametrize("verb", READING)
def test_a_target_that_is_not_there(verb: str, work: dict, complaint: Callable) -> None:
    assert "There is no such folder" in complaint(command(verb, work, target="./none"))


@pytest.mark.parametrize("verb", READING)
def test_a_target_without_weights(
    verb: str, work: dict, complaint: Callable, tmp_path: Path
) -> None:
    bare = shutil.copytree(
        work["pair"][1], tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")
    )
    assert "There are no weights in this folder" in complaint(command(verb, work, target=bare))


@pytest.mark.parametrize("verb", READING)
def test_a_target_with_another_tokenizer(verb: str, work: dict, complaint: Callable) -> None:
    assert "have different tokenizers" in complaint(command(verb, work, target=work["other"]))


MAPPING = ("refine", "promote", "generate", "alternate", "plan", *JUDGING)


@pytest.mark.parametrize("verb", MAPPING)
def test_models_that_are_swapped(verb: str, work: dict, complaint: Callable) -> None:
    swapped = {**work, "pair": work["pair"][::-1]}
    assert "Source and target look swapped" in complaint(command(verb, swapped))


def test_a_way_back_that_is_of_another_pair(work: dict, complaint: Callable) -> None:
    there = work["maps"][0]
    said = complaint(command("alternate", {**work, "maps": (there, there)}))
    assert f"swapped: the map {there} was fitted from" in said


@pytest.mark.parametrize("verb", ["fit", "alternate", *JUDGING])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--task", "hella"], UNKNOWN),
        (["--task", "coqa", "--data", "none.jsonl"], "none at 'none.jsonl'"),
        (["--task", "coqa"], "needs a file"),
    ],
)
def test_a_task_that_cannot_be_read(
    verb: str, options: list, said: str, work: dict, complaint: Callable
) -> None:
    assert said in complaint([*command(verb, work), *options])


@pytest.mark.parametrize("verb", ["fit", "evaluate"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--questions", 0], "No item has a question"),
        (["--metric", "nll", "--scored-tokens", 0], "No item has a continuation"),
    ],
)
def test_items_without_what_the_metric_needs(
    verb: str, options: list, said: str, work: dict, complaint: Callable
) -> None:
    assert said in complaint([*command(verb, work), "--num-items", 2, *options])


@pytest.mark.parametrize(("verb", "tasks"), [("evaluate", ""), ("evaluate", "tiny"), ("guard", "")])
def test_items_that_helped_to_choose_the_map(
    verb: str, tasks: str, work: dict, tmp_path: Path, complaint: Callable
) -> None:
    there = KvMap.load(work["maps"][0], allow_unproven=True)
    asked = TaskConfig(num_items=2, context_tokens=300)
    items = read_items(asked, describe_model(work["pair"][1]).tokenizer)
    chosen = {**there.fitted, "selected_on": [items[0].digest]}
    replace(there, fitted=chosen).save(tmp_path / "chosen")
    given = [verb, tmp_path / "chosen", *command(verb, work)[2:]]
    tasks_flag = ["--tasks", tasks] if tasks else []
    said = complaint([*given, *tasks_flag, "--num-items", 2, "--context-tokens", 300])
    assert "1 of the 2 items helped to choose this map" in said
    assert "(another --seed or --skip)" in said


@pytest.mark.parametrize(
    ("verb", "options", "said"),
    [
        ("evaluate", ["--tasks", "tiny,hella"], UNKNOWN),
        ("evaluate", ["--tasks", "tiny,piqa", "--data", "none.jsonl"], "none at 'none.jsonl'"),
        ("evaluate", ["--tasks", "tiny", "--attach"], "--attach are of one report"),
        ("guard", ["--also", "hella"], UNKNOWN),
        ("guard", ["--also", "text=none.txt"], "none at 'none.txt'"),
        ("alternate", ["--task", "niah_single"], "coqa and tiny have"),
        ("fit", ["--scope", "heads"], "--scope must be one of copy, head, pooled, slice"),
        ("generate", ["--max-new-tokens", 1000], "Shorten the prompt"),
        ("plan", ["--max-seconds", 0], "--max-seconds must be above 0"),
        ("plan", ["--direction", "sideways"], "is not one of 'up', 'down'"),
    ],
)
def test_other_options_that_are_wrong_alone(
    verb: str, options: list, said: str, work: dict, complaint: Callable
) -> None:
    assert said in complaint([*command(verb, work), *options])


@pytest.mark.parametrize("verb", ["fit", "generate", "evaluate", "diagnose"])
def test_a_backend_that_is_unknown_or_not_built(
    verb: str, work: dict, complaint: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = complaint([*command(verb, work), "--backend", "gpu"])
    assert "'gpu' is not one of 'cpu', 'cuda', 'reference'" in said

    def not_built() -> None:
        raise UnavailableError("It is not built.")

    monkeypatch.setattr(backends, "load_native", not_built)
    assert "It is not built" in complaint([*command(verb, work), "--backend", "cuda"])


@pytest.mark.parametrize("verb", ["calibrate", "refine", "promote"])
@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "There is no file or folder"), ("{", "is not JSON"), ('{"text": "zebra"}', "zebra")],
)
def test_text_that_cannot_be_read(
    verb: str,
    content: str | None,
    said: str,
    work: dict,
    complaint: Callable,
    tmp_path: Path,
) -> None:
    text = tmp_path / "text.jsonl"
    if content is not None:
        text.write_text(content)
    assert said in complaint(command(verb, work, text=text))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--task", "hella", "--data", "text.txt"], UNKNOWN),
        (["--task", "text", "--data", "none.txt"], "none at 'none.txt'"),
        (["--task", "text", "--data", "text.txt", "--target", "./none"], "no such folder"),
        (["--task", "text", "--data", "text.txt", "--text", "none.txt"], "no file or folder"),
        (["--task", "text", "--data", "text.txt", "--out", "."], "would write into ., which is"),
        (["--weighting", "attention", "--config", "three.yaml"], "calibration must hold keys"),
    ],
)
def test_a_recipe(
    options: list, said: str, work: dict, complaint: Callable, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("after anna ben near " * 20)
    if "--config" in options:
        (tmp_path / "three.yaml").write_text("calibration: 3\n")
    before = set(tmp_path.iterdir())
    own = ["--source", work["pair"][0], "--target", work["pair"][1], "--text", "."]
    arguments = ["recipe", "ridge-k", *(own if "--task" in options else []), *options]
    assert said in complaint(arguments)
    assert set(tmp_path.iterdir()) == before
