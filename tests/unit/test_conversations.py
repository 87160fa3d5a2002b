"""CoQA as published, and the tiny family's conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from word_tokenizer import FakeWordTokenizer

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.tasks.conversations import read_conversations
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items

TALK = {
    "source": "by hand",
    "story": " The mill burned down. Ben had built it. ",
    "questions": [
        {"input_text": "What burned?", "turn_id": 1},
        {"input_text": "Who built it?", "turn_id": 2},
    ],
    "answers": [
        {"input_text": "the mill", "turn_id": 1, "span_text": "The mill"},
        {"input_text": "Ben", "turn_id": 2, "span_text": "Ben"},
    ],
}


def coqa(tmp_path: Path, *talks: Any, **options: Any) -> TaskConfig:
    path = tmp_path / "coqa.json"
    path.write_text(json.dumps({"version": "1.0", "data": talks}))
    return TaskConfig(task="coqa", data=str(path), num_items=len(talks), **options)


def test_coqa_is_read_turn_by_turn(tmp_path: Path) -> None:
    tokenizer = FakeWordTokenizer()
    (talk,) = read_conversations(coqa(tmp_path, TALK), tokenizer)
    assert tokenizer.decode(talk.opening) == "<bos> The mill burned down. Ben had built it."
    assert [tokenizer.decode(turn.asked).split() for turn in talk.turns] == [
        ["Q:", "What", "burned?", "A:"],
        ["Q:", "Who", "built", "it?", "A:"],
    ]
    assert [tokenizer.decode(turn.answer) for turn in talk.turns] == ["the mill", "Ben"]


def test_a_coqa_item_asks_the_last_question_after_all_others(tmp_path: Path) -> None:
    tokenizer = FakeWordTokenizer()
    (item,) = read_items(coqa(tmp_path, TALK), tokenizer)
    assert " ".join(tokenizer.decode(item.context).split()) == (
        "<bos> The mill burned down. Ben had built it. Q: What burned? A: the mill "
        "Q: Who built it? A:"
    )
    assert tokenizer.decode(item.continuation) == "Ben"


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        (
            {"answers": TALK["answers"][:1]},
            "item 2: the field `answers` needs one for each of the 2",
        ),
        ({"story": ""}, "item 2: the field `story` must be text"),
        (
            {"questions": [{"turn_id": 1}, {"input_text": "Who?"}]},
            r"item 2, questions\[0\].*missing",
        ),
    ],
)
def test_a_bad_conversation_is_named(tmp_path: Path, spoilt: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_conversations(coqa(tmp_path, TALK, {**TALK, **spoilt}), FakeWordTokenizer())


def test_a_tiny_conversation_is_answered_by_its_document() -> None:
    tokenizer = FakeWordTokenizer()
    config = TaskConfig(num_items=2, context_tokens=120, questions=5)
    for talk in read_conversations(config, tokenizer):
        words = tokenizer.decode(talk.opening).split()
        after = {b: c for a, b, c in zip(words, words[1:], words[2:], strict=False) if a == "after"}
        assert len(talk.turns) == 5
        for turn in talk.turns:
            _, steps, _, name = tokenizer.decode(turn.asked).split()
            for _ in range({"first": 1, "second": 2}[steps]):
                name = after[name]
            assert tokenizer.decode(turn.answer) == name


def test_a_task_without_conversations_is_refused() -> None:
    with pytest.raises(InputError, match="coqa and tiny have"):
        read_conversations(TaskConfig(task="piqa"), FakeWordTokenizer())


def test_a_conversation_of_the_tiny_task_needs_a_question() -> None:
    with pytest.raises(InputError, match="questions must be at least 1"):
        read_conversations(TaskConfig(questions=0), FakeWordTokenizer())
    with pytest.raises(InputError, match="context_tokens must be at least 25 for the task tiny"):
        read_conversations(TaskConfig(context_tokens=24), FakeWordTokenizer())
