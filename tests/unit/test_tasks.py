"""The items of every task: what stands in them, and what is said of a file that holds none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from random_models import write_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.tasks.config import NAMES
from trtllm_kvmap.evaluate.tasks.items import Item, Question, require_unseen
from trtllm_kvmap.evaluate.tasks.named import TASKS, TaskConfig, read_items

HELLASWAG = [
    {
        "ind": 3,
        "ctx": "High jump: A boy is running down a track. the boy",
        "label": 2,
        "endings": [
            "runs into a car.",
            "gets in a mat.",
            "lifts his body above the height of a pole.",
            "stands on his hands and springs.",
        ],
    },
    {
        "ind": 67,
        "ctx": "Ice fishing: A man dressed in yellow and black winter clothes ice fishes on a a "
        "frozen lake. The man is reeling in a fish for a long time. the mans catch",
        "label": 1,
        "endings": [
            "more fish and throws them to the side.",
            "finally reaches the surface.",
            "a fish for dinner by making a wish with his mouth.",
            "one and puts it on a fishing pole in the lake.",
        ],
    },
]


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("words")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("english")
    words = {word for item in HELLASWAG for text in [item["ctx"], *item["endings"]]
             for word in text.split()}  # fmt: skip
    write_tokenizer(folder, ["<pad>", "<bos>", *sorted(words)])
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def hellaswag(tmp_path: Path) -> Path:
    path = tmp_path / "hellaswag.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in HELLASWAG))
    return path


def test_tiny_answers_stand_in_the_document(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    config = TaskConfig(num_items=4, context_tokens=400, scored_tokens=23)
    steps_of = {"first": 1, "second": 2, "third": 3}
    for item in read_items(config, tiny_tokenizer):
        words = tiny_tokenizer.decode(item.context).split()
        assert words[0] == "<bos>"
        assert 240 <= len(words) <= 400
        after = {a: b for word, a, b in zip(words, words[1:], words[2:], strict=False)
                 if word == "after"}  # fmt: skip
        assert len(item.questions) == 6
        for question in item.questions:
            _, steps, _, name = tiny_tokenizer.decode(question.stem).split()
            for _ in range(steps_of[steps]):
                name = after[name]
            assert tiny_tokenizer.decode(question.choices[question.label]) == name
        again = tiny_tokenizer.decode(item.continuation).split()
        assert len(again) == 23
        for at in range(0, 20, 4):
            assert again[at : at + 2] == ["again", "after"]
            assert after[again[at + 2]] == again[at + 3]


def test_tiny_items_depend_on_seed_and_place_alone(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    four = read_items(TaskConfig(num_items=4, context_tokens=300), tiny_tokenizer)
    last = read_items(TaskConfig(num_items=2, skip=2, context_tokens=300), tiny_tokenizer)
    other = read_items(TaskConfig(num_items=4, context_tokens=300, seed=1), tiny_tokenizer)
    assert four[2:] == last
    assert not {item.digest for item in four} & {item.digest for item in other}


def test_hellaswag(hellaswag: Path, english: PreTrainedTokenizerBase) -> None:
    config = TaskConfig(task="hellaswag", data=str(hellaswag), num_items=2)
    items = read_items(config, english)
    for item, entry in zip(items, HELLASWAG, strict=True):
        (question,) = item.questions
        assert english.decode(item.context) == entry["ctx"]
        assert [english.decode(c) for c in question.choices] == entry["endings"]
        assert question.label == entry["label"]
        assert question.stem == ()
        assert english.decode(item.continuation) == entry["endings"][entry["label"]]


def test_hellaswag_counts_its_skip_in_lines(
    hellaswag: Path, english: PreTrainedTokenizerBase
) -> None:
    config = TaskConfig(task="hellaswag", data=str(hellaswag), num_items=1, skip=1)
    (item,) = read_items(config, english)
    assert english.decode(item.context) == HELLASWAG[1]["ctx"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ('{"ctx": "one", "endings": ["one", "the"]}', "label"),
        (
            '{"ctx": "the", "endings": ["boy", "boy"], "label": 5}',
            "field `label` must be one of 0, 1",
        ),
        ('{"ctx": "the", "endings": ["boy", "boy"], "label": 0}', "every choice reads 'boy'"),
        ('{"ctx": "the", "endings": ["boy"], "label": 0}', "at least two choices"),
        ('{"ctx": "the", "endings": ["boy", "xylophone"], "label": 0}', "cannot write"),
        ("[1]", "line 2"),
    ],
)
def test_a_bad_hellaswag_line_is_named(
    hellaswag: Path, english: PreTrainedTokenizerBase, line: str, said: str
) -> None:
    first = hellaswag.read_text().splitlines()[0]
    hellaswag.write_text(f"{first}\n{line}\n")
    config = TaskConfig(task="hellaswag", data=str(hellaswag), num_items=2)
    with pytest.raises(InputError, match="line 2") as caught:
        read_items(config, english)
    assert said in str(caught.value)


def test_text_is_cut_into_context_and_continuation(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    words = ["anna", "ben", "carl", "dora", "emil", "fay", "gus", "hana"] * 4
    path = tmp_path / "text.txt"
    path.write_text(" ".join(words))
    config = TaskConfig(
        task="text", data=str(path), num_items=2, skip=1, context_tokens=6, scored_tokens=3
    )
    first, second = read_items(config, tiny_tokenizer)
    assert tiny_tokenizer.decode(first.context).split() == words[9:15]
    assert tiny_tokenizer.decode(first.continuation).split() == words[15:18]
    assert tiny_tokenizer.decode(second.context).split() == words[18:24]


def test_text_pieces_begin_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    class WithBos:
        bos_token_id = 7

        def __call__(self, text: str) -> object:
            return type("Encoded", (), {"input_ids": [7, *range(100, 100 + len(text))]})

    path = tmp_path / "text.txt"
    path.write_text("abcdefgh")
    config = TaskConfig(task="text", data=str(path), num_items=2, context_tokens=3, scored_tokens=2)
    first, second = read_items(config, WithBos())
    assert (first.context, first.continuation) == ((7, 100, 101), (102, 103))
    assert (second.context, second.continuation) == ((7, 104, 105), (106, 107))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": "boolq"}, "known are tiny, text, prompts, hellaswag"),
        ({"task": "text"}, "needs a file; give one as data"),
        ({"task": "text", "data": "absent.txt"}, "absent.txt"),
        ({"num_items": 0}, "num_items"),
        ({"skip": -1}, "negative"),
        ({"context_tokens": 12}, "context_tokens must be at least 25 for the task tiny"),
    ],
)
def test_what_cannot_be_read_is_said(
    tiny_tokenizer: PreTrainedTokenizerBase, options: dict, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        read_items(TaskConfig(**options), tiny_tokenizer)


def test_every_task_that_may_be_named_has_a_reader() -> None:
    assert tuple(TASKS) == NAMES


def test_too_few_items_and_no_tokenizer(hellaswag: Path, english: PreTrainedTokenizerBase) -> None:
    with pytest.raises(InputError, match="holds 2 items"):
        read_items(TaskConfig(task="hellaswag", data=str(hellaswag), num_items=3), english)
    with pytest.raises(InputError, match="no tokenizer"):
        read_items(TaskConfig(), None)


def test_items_refuse_what_has_no_score() -> None:
    with pytest.raises(InputError, match="context"):
        Item((), continuation=(1,))
    with pytest.raises(InputError, match="no score"):
        Item((1, 2))
    with pytest.raises(InputError, match="at least one token"):
        Question((1,), ((2,), ()), 0)


def test_items_of_the_selection_are_refused() -> None:
    items = [Item((1, 2, 3), continuation=(4,)), Item((1, 2, 4), continuation=(4,))]
    require_unseen(items, [Item((1, 2), continuation=(3, 4)).digest])
    with pytest.raises(InputError, match="1 of the 2 items"):
        require_unseen(items, [items[1].digest])
    assert items[0].longest_path == 1
    assert Item((1,), (Question((1, 2), ((3,), (4, 5)), 0),), (6,)).longest_path == 4


@pytest.mark.parametrize(
    ("field", "least"),
    [("num_items", 1), ("context_tokens", 1), ("skip", 0), ("scored_tokens", 0), ("seed", 0)],
)
def test_counts_that_no_task_has_are_refused_before_any_is_read(field: str, least: int) -> None:
    assert getattr(TaskConfig(**{field: least}), field) == least
    with pytest.raises(InputError, match=f"{field} must .*got {least - 1}"):
        TaskConfig(**{field: least - 1})
