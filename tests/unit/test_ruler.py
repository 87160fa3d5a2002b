"""Generated long-context tasks: held to their text by a reader that knows only the wording."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import pytest
from random_models import write_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from word_tokenizer import FakeWordTokenizer

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.evaluate.tasks.ruler import TELLERS
from trtllm_kvmap.tiny.documents import NAMES


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("words")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def right_english(task: str, text: str, stem: str) -> str:
    """The answer that stands in the text."""
    if task == "frequent_words":
        return Counter(re.findall(r"A sign said (.+?)\.", text)).most_common(1)[0][0]
    key = re.fullmatch(r"The code of the (.+) is", stem).group(1)
    hops = 0
    while found := re.search(rf"The {key} has the same code as the (.+?)\.", text):
        key, hops = found.group(1), hops + 1
    assert hops == (2 if task == "variable_tracking" else 0)
    told = re.findall(r"The code of the (.+?) is \d", text)
    assert all(a != b for a, b in pairwise(told))  # values of one key stand apart
    return " and ".join(re.findall(rf"The code of the {key} is (\d+)\.", text))


def right_tiny(task: str, words: list[str], stem: str) -> str:
    if task == "frequent_words":
        return Counter(b for a, b in pairwise(words) if a == "near" and b in NAMES).most_common(1)[
            0
        ][0]
    values: dict[str, list[str]] = {}
    for a, b, c in zip(words, words[1:], words[2:], strict=False):
        if a == "after":
            values.setdefault(b, []).append(c)
    _, steps, _, key = stem.split()
    for _ in range({"first": 0, "second": 1}[steps]):
        (key,) = values[key]
    return " ".join(values[key])


@pytest.mark.parametrize("task", TELLERS)
@pytest.mark.parametrize("tokens", [256, 1024])
def test_the_right_choice_stands_in_the_english_text(task: str, tokens: int) -> None:
    tokenizer = FakeWordTokenizer()
    config = TaskConfig(task=task, num_items=3, context_tokens=tokens)
    items = read_items(config, tokenizer)
    labels = set()
    for item in items:
        assert tokens - 16 < len(item.context) <= tokens
        assert item.context.count(0) == 1
        text = tokenizer.decode(item.context)
        for question in item.questions:
            right, labels = (
                tokenizer.decode(question.choices[question.label]),
                labels | {question.label},
            )
            assert right == right_english(task, text, tokenizer.decode(question.stem))
            wrong = {tokenizer.decode(c) for c in question.choices} - {right}
            assert len(wrong) == 3
            parts = [part for each in wrong for part in each.split(" and ")]
            assert all((part in text) == (task != "niah_single") for part in parts)
        first = item.questions[0]
        assert item.continuation == first.stem + first.choices[first.label]
    assert len(labels) > 1 or len(items[0].questions) == 1
    assert items[0].context != items[1].context


@pytest.mark.parametrize("task", TELLERS)
@pytest.mark.parametrize("tokens", [256, 4096])
def test_the_tiny_family_reads_the_same_tasks_in_its_own_words(
    task: str, tokens: int, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    config = TaskConfig(task=task, num_items=2, context_tokens=tokens, questions=4)
    for item in read_items(config, tiny_tokenizer):
        words = tiny_tokenizer.decode(item.context).split()
        assert words[0] == "<bos>"
        assert tokens - 6 < len(words) <= tokens
        for question in item.questions:
            stem = tiny_tokenizer.decode(question.stem)
            right = tiny_tokenizer.decode(question.choices[question.label])
            assert right == right_tiny(task, words, stem)


def test_needles_stand_anywhere(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    config = TaskConfig(task="niah_single", num_items=40, context_tokens=256)
    places = [
        tiny_tokenizer.decode(item.context).split().index("after") / 256
        for item in read_items(config, tiny_tokenizer)
    ]
    assert min(places) < 0.15
    assert max(places) > 0.85


def test_items_depend_on_seed_place_and_task_alone(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    config = TaskConfig(task="niah_multikey", num_items=3, context_tokens=256)
    three = read_items(config, tiny_tokenizer)
    last = TaskConfig(task="niah_multikey", num_items=1, skip=2, context_tokens=256)
    assert read_items(last, tiny_tokenizer) == three[2:]
    other = TaskConfig(task="niah_multikey", num_items=1, context_tokens=256, seed=1)
    assert read_items(other, tiny_tokenizer)[0] != three[0]


def test_text_without_room_for_the_needles_is_refused(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    config = TaskConfig(task="niah_multivalue", num_items=1, context_tokens=20)
    with pytest.raises(InputError, match="take 37 tokens; context_tokens 20 leaves no room"):
        read_items(config, tiny_tokenizer)
