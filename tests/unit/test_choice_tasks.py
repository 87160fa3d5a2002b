"""Published multiple-choice files: what is handed over, what is scored, and what is complained of.

The items are hand-written in the shape of the published ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from word_tokenizer import FakeWordTokenizer

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.probe import Answers, Script
from trtllm_kvmap.evaluate.score import score
from trtllm_kvmap.evaluate.tasks.items import Item, Question
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, named_task, read_items
from trtllm_kvmap.evaluate.tasks.records import read_records

HELLASWAG = {
    "activity_label": "Baking",
    "ctx": "A man opens an oven. He",
    "endings": ["takes out a loaf.", "[header] sings.", "flies away.", "closes   the sea."],
    "label": "0",
}
PIQA = {
    "goal": "To keep bread fresh, ",
    "sol1": "wrap it.",
    "sol2": "leave it in rain.",
    "label": 0,
}
ICE = {"text": "ice", "label": "A"}
ARC = {
    "id": "x_1",
    "question": {
        "stem": "Which one melts?",
        "choices": [{"text": "ice", "label": "A"}, {"text": "stone", "label": "B"}],
    },
    "answerKey": "A",
}
ARC_FLAT = {
    "question": "Which one melts?",
    "choices": {"text": ["stone", "ice"], "label": ["1", "2"]},
    "answerKey": "2",
}
WINOGRANDE = {
    "sentence": "The cup did not fit in the bag because _ was too large.",
    "option1": "the cup",
    "option2": "the small bag",
    "answer": "1",
}
MMLU = {
    "question": "What is 1 + 1?",
    "subject": "early_arithmetic",
    "choices": ["1", "2", "3", "4"],
    "answer": 1,
}


def items_of(
    tmp_path: Path, task: str, *records: Any, name: str = "items.jsonl", **options: Any
) -> tuple[list[Item], FakeWordTokenizer]:
    path = tmp_path / name
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = FakeWordTokenizer()
    config = TaskConfig(task=task, data=str(path), **{"num_items": len(records) or 1, **options})
    return read_items(config, tokenizer), tokenizer


@pytest.mark.parametrize(
    ("task", "record", "context", "choices", "label"),
    [
        (
            "hellaswag",
            HELLASWAG,
            "<bos> Baking: A man opens an oven. He",
            ["takes out a loaf.", "sings.", "flies away.", "closes the sea."],
            0,
        ),
        (
            "piqa",
            PIQA,
            "<bos> Question: To keep bread fresh, \n Answer:",
            ["wrap it.", "leave it in rain."],
            0,
        ),
        ("arc", ARC, "<bos> Question: Which one melts? \n Answer:", ["ice", "stone"], 0),
        ("arc", ARC_FLAT, "<bos> Question: Which one melts? \n Answer:", ["stone", "ice"], 1),
        (
            "winogrande",
            WINOGRANDE,
            "<bos> The cup did not fit in the bag because",
            ["the cup was too large.", "the small bag was too large."],
            0,
        ),
        (
            "mmlu",
            MMLU,
            "<bos> The following are multiple choice questions (with answers) about early "
            "arithmetic. \n \n What is 1 + 1? \n A. 1 \n B. 2 \n C. 3 \n D. 4 \n Answer:",
            ["A", "B", "C", "D"],
            1,
        ),
    ],
)
def test_what_is_handed_over_and_what_is_scored(
    tmp_path: Path, task: str, record: dict, context: str, choices: list[str], label: int
) -> None:
    (item,), tokenizer = items_of(tmp_path, task, record)
    (question,) = item.questions
    assert tokenizer.decode(item.context) == context
    assert [tokenizer.decode(choice) for choice in question.choices] == choices
    assert (question.stem, question.label) == ((), label)
    assert item.continuation == question.choices[label]


def test_winogrande_scores_only_what_follows_the_option(tmp_path: Path) -> None:
    (item,), tokenizer = items_of(tmp_path, "winogrande", WINOGRANDE)
    (question,) = item.questions
    assert question.given == (2, 3)
    assert [tokenizer.decode(scored) for scored in question.scored] == ["was too large."] * 2
    assert question.lengths == (len(" was too large."),) * 2
    # Whatever the tokens of the options cost, the likelier rest wins.
    script = Script(item, ())
    log_probs = torch.full((1 + len(script.tree), 64), -50.0)
    first, second = (question.choices[i] for i in (0, 1))
    for choice, nodes, each in (
        (first, script.choices[0][0], -2.0),
        (second, script.choices[0][1], -1.0),
    ):
        for token, node in zip(choice[-3:], nodes, strict=True):
            log_probs[node + 1, token] = each
    answers = Answers(log_probs, ())
    assert score(script, answers, answers, length_normalised=False).correct == 0
    log_probs[script.choices[0][0][0] + 1, first[2]] = 3.0
    assert score(script, answers, answers, length_normalised=False).correct == 1


def test_lengths_are_characters_as_in_acc_norm(tmp_path: Path) -> None:
    (item,), _ = items_of(tmp_path, "piqa", PIQA)
    (question,) = item.questions
    assert question.lengths == (len("wrap it."), len("leave it in rain."))
    script = Script(item, ())
    log_probs = torch.full((1 + len(script.tree), 64), -50.0)
    # Sums -6 and -8.5: per character 0.75 and 0.5, per token 3 and 2.125.
    for total, choice, nodes in zip((-6.0, -8.5), question.choices, script.choices[0], strict=True):
        for token, node in zip(choice, nodes, strict=True):
            log_probs[node + 1, token] = total / len(choice)
    answers = Answers(log_probs, ())
    assert score(script, answers, answers, length_normalised=False).correct == 1
    assert score(script, answers, answers, length_normalised=True).correct == 0


def test_characters_and_tokens_can_disagree() -> None:
    question = Question((), ((1, 2), (3, 4, 5, 6)), 1, characters=(10, 40))
    item = Item((0,), (question,))
    script = Script(item, ())
    log_probs = torch.zeros(1 + len(script.tree), 8)
    for choice, nodes in zip(question.choices, script.choices[0], strict=True):
        for token, node in zip(choice, nodes, strict=True):
            log_probs[node + 1, token] = -2.0
    answers = Answers(log_probs, ())  # -4 and -8; by tokens equal, by characters -0.4 and -0.2
    assert score(script, answers, answers, length_normalised=True).correct == 1


def test_piqa_labels_may_lie_beside_the_items(tmp_path: Path) -> None:
    unlabelled = {key: value for key, value in PIQA.items() if key != "label"}
    (tmp_path / "items-labels.lst").write_text("1\n0\n")
    items, _ = items_of(tmp_path, "piqa", unlabelled, unlabelled)
    assert [item.questions[0].label for item in items] == [1, 0]
    (tmp_path / "items-labels.lst").write_text("1\n")
    with pytest.raises(InputError, match=r"line 2: the field `label` is missing.*labels\.lst"):
        items_of(tmp_path, "piqa", unlabelled, unlabelled)


def test_mmlu_as_rows_of_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "mmlu.csv").write_text('"One, or two?",one,two,three,four,B\n')
    (item,), tokenizer = items_of(tmp_path, "mmlu", name="mmlu.csv")
    assert tokenizer.decode(item.context).startswith("<bos> One, or two? \n A. one")
    assert item.questions[0].label == 1
    (tmp_path / "mmlu.csv").write_text("One?,one,two,B\n")
    with pytest.raises(InputError, match="row 1 has 4 columns; 6 are needed"):
        items_of(tmp_path, "mmlu", name="mmlu.csv")


def test_what_is_no_csv_or_no_utf8_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "mmlu.csv").write_text("One?,a,b,c,d,A\n" + "x" * 200_000 + ",a,b,c,d,B\n")
    with pytest.raises(InputError, match=r"mmlu\.csv, line 2 is not CSV \(field larger"):
        items_of(tmp_path, "mmlu", name="mmlu.csv", num_items=2)
    unlabelled = {key: value for key, value in PIQA.items() if key != "label"}
    (tmp_path / "items-labels.lst").write_bytes(b"0\n\xe9\n")
    with pytest.raises(InputError, match=r"items-labels\.lst is not UTF-8"):
        items_of(tmp_path, "piqa", unlabelled)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "mmlu.csv").write_text("One?,a,b,c,d,A\n", encoding="utf-8-sig")
    (item,), tokenizer = items_of(tmp_path, "mmlu", name="mmlu.csv")
    assert tokenizer.decode(item.context).startswith("<bos> One?")
    (tmp_path / "arc.json").write_text(json.dumps([ARC]), encoding="utf-8-sig")
    assert items_of(tmp_path, "arc", name="arc.json")[0][0].questions[0].label == 0


def test_a_file_that_may_not_be_read_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(Who runs as root may read everything.)"""

    def refused(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refused)
    (tmp_path / "arc.json").touch()
    with pytest.raises(InputError, match=r"arc\.json cannot be read \(Permission denied\)"):
        items_of(tmp_path, "arc", name="arc.json")


def test_a_json_file_is_a_list_or_has_one_under_data(tmp_path: Path) -> None:
    for content in ([ARC, ARC_FLAT], {"version": "1", "data": [ARC, ARC_FLAT]}):
        (tmp_path / "arc.json").write_text(json.dumps(content))
        items, _ = items_of(tmp_path, "arc", name="arc.json", num_items=1, skip=1)
        assert items[0].questions[0].label == 1
    (tmp_path / "arc.json").write_text(json.dumps({"data": {}}))
    with pytest.raises(InputError, match="under `data`"):
        items_of(tmp_path, "arc", name="arc.json")
    (tmp_path / "arc.json").write_text(json.dumps({"rows": []}))
    with pytest.raises(InputError, match="item 1: the field `question` is missing; there are rows"):
        items_of(tmp_path, "arc", name="arc.json")
    (tmp_path / "arc.json").write_text(json.dumps([ARC])[:-1])
    with pytest.raises(InputError, match="is not JSON"):
        items_of(tmp_path, "arc", name="arc.json")


@pytest.mark.parametrize("name", ["arc.json", "arc.jsonl"])
@pytest.mark.parametrize("text", ['{"question": ' + "1" * 5000 + "}", "[" * 200_000])
def test_json_that_python_gives_up_on_is_refused(tmp_path: Path, name: str, text: str) -> None:
    """Integers of thousands of digits, and brackets without end."""
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=f"{name}.* is not JSON"):
        list(read_records("arc", str(tmp_path / name)))


@pytest.mark.parametrize(
    ("task", "record", "said"),
    [
        ("hellaswag", {**HELLASWAG, "label": ""}, r"line 2: the field `label` must be one of 0, 1"),
        ("hellaswag", {**HELLASWAG, "endings": "one"}, "`endings` must be a list of texts"),
        ("hellaswag", {**HELLASWAG, "ctx": " "}, "`ctx` must be text"),
        ("piqa", {**PIQA, "sol2": None}, "`sol2` must be text, got None"),
        ("piqa", {**PIQA, "label": True}, "`label` must be one of 0, 1, got True"),
        ("arc", {**ARC, "answerKey": "C"}, "`answerKey` must be one of A, B, got 'C'"),
        ("arc", {**ARC, "question": {"stem": "What?"}}, "question: the field `choices` is missing"),
        ("arc", {**ARC_FLAT, "choices": {"text": ["a", "b"], "label": ["1"]}}, "needs 2 entries"),
        ("winogrande", {**WINOGRANDE, "sentence": "No blank."}, "on both sides of one _"),
        ("winogrande", {**WINOGRANDE, "sentence": "It was _ or _ again."}, "sides of one _"),
        (
            "arc",
            {**ARC_FLAT, "choices": {"text": ["a", "b"], "label": ["2", "2"]}},
            "`choices` has one label twice: 2, 2",
        ),
        ("arc", {**ARC, "question": {"stem": "?", "choices": [ICE, ICE]}}, "one label twice: A, A"),
        ("piqa", {**PIQA, "sol2": PIQA["sol1"]}, "every choice reads 'wrap it.'"),
        ("winogrande", {**WINOGRANDE, "answer": ""}, "`answer` must be one of 1, 2"),
        ("mmlu", {**MMLU, "choices": ["1"]}, "needs 4 texts, got 1"),
        ("mmlu", {**MMLU, "answer": 4}, "`answer` must be one of 0, 1, 2, 3, got 4"),
        ("mmlu", [1], "line 2 must be a JSON object"),
    ],
)
def test_a_bad_record_is_named_with_its_line_and_field(
    tmp_path: Path, task: str, record: Any, said: str
) -> None:
    good = {"hellaswag": HELLASWAG, "piqa": PIQA, "arc": ARC, "winogrande": WINOGRANDE}
    with pytest.raises(InputError, match=said) as caught:
        items_of(tmp_path, task, good.get(task, MMLU), record)
    assert "line 2" in str(caught.value)


def test_choices_of_the_same_words_are_one(tmp_path: Path) -> None:
    """Whichever of the two is right: no run ends for a record that its authors published so."""
    labels = ["1", "2", "3", "4"]
    texts = ["ice", "stone", "ice", "sand"]
    records = [
        {**ARC_FLAT, "choices": {"text": texts, "label": labels}, "answerKey": key}
        for key in labels
    ]
    items, tokenizer = items_of(tmp_path, "arc", *records)
    for item, right in zip(items, [0, 1, 0, 2], strict=True):
        (question,) = item.questions
        assert [tokenizer.decode(c) for c in question.choices] == ["ice", "stone", "sand"]
        assert (question.label, question.characters) == (right, (3, 5, 4))
        assert item.continuation == question.choices[right]


def test_a_question_refuses_counts_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="given needs one count"):
        Question((), ((1, 2), (3, 4)), 0, given=(1,))
    with pytest.raises(InputError, match="at least one token that is scored"):
        Question((), ((1, 2), (3, 4)), 0, given=(1, 2))
    with pytest.raises(InputError, match="characters needs one count"):
        Question((), ((1, 2), (3, 4)), 0, characters=(1, 2, 3))


def test_a_folder_stands_for_the_file_of_each_task(tmp_path: Path) -> None:
    (tmp_path / "piqa_valid.jsonl").write_text("")
    config = TaskConfig(data=str(tmp_path))
    assert named_task(config, "piqa").data == str(tmp_path / "piqa_valid.jsonl")
    assert named_task(config, "niah_single") == TaskConfig(task="niah_single", data=str(tmp_path))
    with pytest.raises(InputError, match="holds 0 files whose names begin with 'arc'"):
        named_task(config, "arc")
    (tmp_path / "piqa_train.jsonl").write_text("")
    with pytest.raises(InputError, match="holds 2 files"):
        named_task(config, "piqa")
    assert named_task(config, "mmlu").data == str(tmp_path)  # the subjects' files may be here
    (tmp_path / "mmlu").mkdir()
    assert named_task(config, "mmlu").data == str(tmp_path / "mmlu")
