"""The task `prompts`: a user's own, with answers or without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.models import load_model
from trtllm_kvmap.tiny import model_folder


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_model(model_folder("tiny-s")).tokenizer


def written(folder: Path, *lines: Any) -> str:
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_an_answer_is_scored_or_the_end_of_the_prompt(tokenizer: Any, tmp_path: Path) -> None:
    lines = (
        {"prompt": "<bos> left out"},
        {"prompt": "<bos> after anna ben", "answer": "near carl"},
        {"prompt": "<bos> after anna ben so first after carl", "note": "not read"},
    )
    config = TaskConfig("prompts", written(tmp_path, *lines), num_items=2, skip=1, scored_tokens=3)
    asked, ended = read_items(config, tokenizer)
    spelt = [
        tuple(tokenizer.convert_tokens_to_ids(text.split()))
        for text in (
            "<bos> after anna ben",
            "near carl",
            "<bos> after anna ben so",
            "first after carl",
        )
    ]
    assert [asked.context, asked.continuation, ended.context, ended.continuation] == spelt
    assert asked.questions == ended.questions == ()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"answer": "ben"}, "line 2: the field `prompt` is missing"),
        ({"prompt": 3}, "line 2: the field `prompt` must be text"),
        ({"prompt": "after anna ben", "answer": " "}, "line 2: the field `answer` must be text"),
        (
            {"prompt": "after anna ben"},
            "line 2: the field `prompt` has 3 tokens, of which the last 3",
        ),
        ("after anna ben", "line 2"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(
    line: Any, said: str, tokenizer: Any, tmp_path: Path
) -> None:
    whole = {"prompt": "<bos> after anna ben", "answer": "near carl"}
    config = TaskConfig("prompts", written(tmp_path, whole, line), num_items=2, scored_tokens=3)
    with pytest.raises(InputError, match=said):
        read_items(config, tokenizer)


def test_too_few_prompts_are_said(tokenizer: Any, tmp_path: Path) -> None:
    data = written(tmp_path, {"prompt": "<bos> after anna ben", "answer": "near carl"})
    with pytest.raises(InputError, match="holds 1 items of the task 'prompts'"):
        read_items(TaskConfig("prompts", data, num_items=2), tokenizer)
