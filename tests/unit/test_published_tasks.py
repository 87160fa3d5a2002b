"""Every benchmark in the shapes it is published in says the same, word by word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from published_tasks import COQA, COUNTS, HELLASWAG, MMLU, write_authors, write_hub
from word_tokenizer import FakeWordTokenizer

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.tasks.choice import READERS, Choices
from trtllm_kvmap.evaluate.tasks.conversations import read_conversations
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, named_task, read_items
from trtllm_kvmap.evaluate.tasks.published import task_records

MMLU_HEAD = "The following are multiple choice questions (with answers) about abstract algebra."
# What is handed over, the choices as they follow it after a space, and the right one.
WANTED = {
    "hellaswag": [
        (
            "Mending a roof: A man sits on a roof. He",
            ("pulls old tiles off.", " sings.. Then he jumps.", "is asleep on the ridge."),
            0,
        ),
        (
            "Home and Garden: How to mend a roof. Buy tiles. Count them first.",
            ("pulls old tiles off.", " sings.. Then he jumps.", "is asleep on the ridge."),
            3,
        ),
    ],
    "piqa": [
        (
            "Question: To keep bread fresh, \nAnswer:",
            ("wrap it.", "leave it in the rain. "),
            label,
        )
        for label in (0, 1)
    ],
    "arc": [
        (
            "Question: Which one melts in the sun?\nAnswer:",
            ("stone", "ice", "sand", "clay", "salt"),
            1,
        ),
        ("Question: What do plants take from the air?\nAnswer:", tuple("abcd"), 3),
    ],
    "winogrande": [
        (
            "The cup did not fit in the bag because",
            ("the cup was too large.", "the small bag was too large."),
            1,
        )
    ],
    "mmlu": [
        (
            f"{MMLU_HEAD}\n\nWhat is one, or two,\nplus two?\nA. 1\nB. 2\nC. 3\nD. 3 or 4\nAnswer:",
            tuple("ABCD"),
            3,
        )
    ],
}


def read(task: str, path: Path) -> list[Choices]:
    config = TaskConfig(task=task, data=str(path))
    return [READERS[task](record) for record in task_records(config)]


@pytest.mark.parametrize("write", [write_authors, write_hub])
@pytest.mark.parametrize("task", WANTED)
def test_the_published_shapes_say_the_same(task: str, write: Any, tmp_path: Path) -> None:
    found = read(task, write(task, tmp_path))
    for each, (context, choices, label) in zip(found, WANTED[task], strict=True):
        assert each.context == context
        assert each.choices[: len(choices)] == choices
        assert each.label == label
    config = TaskConfig(
        task=task, data=str(write(task, tmp_path)), num_items=len(found), questions=0
    )
    assert len(read_items(config, FakeWordTokenizer())) == COUNTS[task] == len(found)


def test_coqa_is_read_from_objects_and_from_columns(tmp_path: Path) -> None:
    tokenizer = FakeWordTokenizer()

    def talks(path: Path) -> Any:
        return read_conversations(TaskConfig("coqa", str(path), num_items=1), tokenizer)

    (authors,) = talks(write_authors("coqa", tmp_path))
    assert talks(write_hub("coqa", tmp_path)) == [authors]
    assert [tokenizer.decode(turn.answer) for turn in authors.turns] == ["the mill", "Ben"]
    plain = {
        **COQA,
        "questions": [q["input_text"] for q in COQA["questions"]],
        "answers": {"input_text": ["the mill", "Ben"], "answer_start": [0, 22]},
    }
    path = tmp_path / "plain.jsonl"
    path.write_text(json.dumps(plain))
    assert talks(path) == [authors]


def test_an_answer_to_another_turn_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "coqa.json"
    path.write_text(json.dumps([{**COQA, "answers": COQA["answers"][::-1]}]))
    with pytest.raises(InputError, match="`answers` answers turn 2 where turn 1 is asked"):
        read_conversations(TaskConfig("coqa", str(path), num_items=1), FakeWordTokenizer())
    columns = {"input_text": ["the mill", "Ben"], "turn_id": [1]}
    path.write_text(json.dumps([{**COQA, "answers": columns}]))
    with pytest.raises(InputError, match=r"item 1, answers: the field `turn_id` needs 2 entries"):
        read_conversations(TaskConfig("coqa", str(path), num_items=1), FakeWordTokenizer())


def test_the_letter_may_stand_for_the_number(tmp_path: Path) -> None:
    path = tmp_path / "mmlu.jsonl"
    path.write_text(json.dumps({**MMLU, "answer": "D"}))
    assert read("mmlu", path)[0].label == 3


@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("mmlu_high_school_biology_val.csv", " about high school biology"),
        ("mmlu_test.csv", None),
        ("mmlu.csv", None),
    ],
)
def test_the_subject_is_in_the_name_of_the_file(
    name: str, about: str | None, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text("Two?,1,2,3,4,B\n")
    (found,) = read("mmlu", path)
    assert found.context.startswith(
        "Two?" if about is None else MMLU_HEAD.replace(" about abstract algebra", about)
    )


def test_a_folder_of_mmlu_gives_each_subject_its_turn(tmp_path: Path) -> None:
    for subject, count in (("anatomy", 1), ("world_religions", 3), ("law", 2)):
        rows = [f"{subject} {i}?,1,2,3,4,B\n" for i in range(count)]
        (tmp_path / f"{subject}_test.csv").write_text("".join(rows))
    (tmp_path / "README.txt").write_text("about")
    asked = [found.context.split("\n\n")[-1].split("\n")[0] for found in read("mmlu", tmp_path)]
    assert asked == [
        "anatomy 0?",
        "law 0?",
        "world_religions 0?",
        "law 1?",
        "world_religions 1?",
        "world_religions 2?",
    ]
    assert "about world religions." in read("mmlu", tmp_path)[-1].context
    (tmp_path / "law_val.csv").write_text("law?,1,2,3,4,B\n")
    with pytest.raises(InputError, match=r"holds 4 files .* of the splits test, val"):
        read("mmlu", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds 0 files .* of the splits none"):
        read("mmlu", tmp_path / "empty")


@pytest.mark.parametrize("task", ["mmlu", "piqa", "arc"])
def test_what_can_be_neither_file_nor_folder_is_a_sentence(task: str) -> None:
    config = TaskConfig(task=task, data="x" * 300)  # or what lies in a folder that may not be read
    for read_it in (lambda: list(task_records(config)), lambda: named_task(config, task)):
        with pytest.raises(InputError, match=r"cannot be read \(File name too long\)"):
            read_it()


def test_a_context_of_two_empty_halves_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl"
    path.write_text(json.dumps({**HELLASWAG, "ctx_a": None, "ctx_b": ""}))
    with pytest.raises(InputError, match="`ctx_a` must not be as empty as `ctx_b`"):
        read("hellaswag", path)


def test_a_test_split_without_labels_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({**HELLASWAG, "label": ""}))
    with pytest.raises(InputError, match="`label` must be one of 0, 1, 2, 3, got ''"):
        read("hellaswag", path)
