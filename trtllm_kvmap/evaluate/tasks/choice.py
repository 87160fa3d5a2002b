"""Multiple-choice benchmarks as published, worded and scored as lm-evaluation-harness does.

Everything up to the choices is the context that is handed over. Each choice is scored by its
log-probability after it; ``length_normalised`` divides that by the choice's length in characters
(the field's `acc_norm`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.tasks.config import TaskConfig
from trtllm_kvmap.evaluate.tasks.items import Item, Question
from trtllm_kvmap.evaluate.tasks.published import LETTERS, task_records
from trtllm_kvmap.evaluate.tasks.records import Record
from trtllm_kvmap.evaluate.tasks.text import Tokenizer, encode, encode_after

# What is done to HellaSwag's text, in order: `[title]` starts a sentence, other bracketed words are
# layout of WikiHow pages. The space that stays where a mark stood is the harness's too.
HELLASWAG_MARKS = ((r" \[title\]", ". "), (r"\[.*?\]", ""), ("  ", " "))


@dataclass(frozen=True, slots=True)
class Choices:
    """One question in words. Each choice follows ``context`` after a space; of ``choices[i]`` the
    words ``given[i]`` at its front are read and not scored (empty: all of it is scored).
    """

    context: str
    choices: tuple[str, ...]
    label: int
    given: tuple[str, ...] = ()


def hellaswag(record: Record) -> Choices:
    """HellaSwag (Zellers et al. 2019): ``ctx, endings, label`` and, in the published files,
    ``activity_label``, which then stands before the context, and the context's two halves ``ctx_a``
    and ``ctx_b`` (empty for how-to pages), of which the second is given a capital.
    """
    endings = record.texts("endings")
    label = record.label("label", [str(i) for i in range(len(endings))])
    context = record.text("ctx")
    if "ctx_a" in record and "ctx_b" in record:
        halves = (record.fields[name] for name in ("ctx_a", "ctx_b"))
        first, second = (half if isinstance(half, str) else "" for half in halves)
        if not (first + second).strip():
            record.refuse("ctx_a", "must not be as empty as `ctx_b`")
        context = f"{first} {second.capitalize()}"
    if "activity_label" in record:
        context = f"{record.text('activity_label')}: {context}"
    return Choices(_plain(context), tuple(_plain(ending) for ending in endings), label)


def piqa(record: Record) -> Choices:
    """PIQA (Bisk et al. 2020): ``goal, sol1, sol2``; the label is the field ``label``, or that line
    of the file `<name>-labels.lst` beside it.
    """
    if "label" not in record:
        raise InputError(
            f"{record.where}: the field `label` is missing, and there is no file "
            f"<name>-labels.lst beside it that has this line."
        )
    solutions = record.text("sol1"), record.text("sol2")
    return Choices(_asked(record.text("goal")), solutions, record.label("label", ("0", "1")))


def arc(record: Record) -> Choices:
    """ARC (Clark et al. 2018): ``question.stem``, ``question.choices`` of ``text`` and ``label``,
    ``answerKey``; or the flat form in which ``question`` is text and ``choices`` holds two lists.
    """
    if isinstance(record.fields.get("question"), str):
        stem, choices = record.text("question"), record.object("choices")
        texts, labels = choices.texts("text"), choices.texts("label")
        if len(texts) != len(labels):
            choices.refuse("label", f"needs {len(texts)} entries, one for each text")
    else:
        question = record.object("question")
        stem, listed = question.text("stem"), question.objects("choices")
        texts = [choice.text("text") for choice in listed]
        labels = [choice.text("label") for choice in listed]
    if len(set(labels)) < len(labels):
        record.refuse("choices", f"has one label twice: {', '.join(labels)}")
    return Choices(_asked(stem), tuple(texts), record.label("answerKey", labels))


def winogrande(record: Record) -> Choices:
    """WinoGrande (Sakaguchi et al. 2020): ``sentence`` with one ``_``, ``option1``, ``option2`` and
    ``answer``.

    Scored as Trinh and Le (2018) do: either option is put in, and only what follows it is scored,
    so that a rare name costs nothing.
    """
    sentence = record.text("sentence")
    before, blank, after = sentence.partition("_")
    if not blank or "_" in after or not before.strip() or not after.strip():
        record.refuse("sentence", f"needs words on both sides of one _, got {sentence!r}")
    options = record.text("option1"), record.text("option2")
    return Choices(
        before.rstrip(),
        tuple(f"{option} {after.strip()}" for option in options),
        record.label("answer", ("1", "2")),
        given=options,
    )


def mmlu(record: Record) -> Choices:
    """MMLU (Hendrycks et al. 2021): rows of question, four choices and a letter, whose subject
    their file is named by (`<subject>_test.csv`); or JSON of ``question, choices, answer`` (a
    number from 0, or the letter) and perhaps ``subject``. The letter is what is scored.
    """
    known: Sequence[str] = LETTERS
    if "choices" in record:
        texts = record.texts("choices")
        if record.fields.get("answer") not in LETTERS:
            known = [str(i) for i in range(len(LETTERS))]
    else:
        texts = [record.text(letter) for letter in LETTERS]
    if len(texts) != len(LETTERS):
        record.refuse("choices", f"needs {len(LETTERS)} texts, got {len(texts)}")
    subject = record.text("subject").replace("_", " ") if "subject" in record else ""
    head = "The following are multiple choice questions (with answers)"
    lines = [
        *([f"{head} about {subject}.", ""] if subject else []),
        record.text("question").strip(),
        *(f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=True)),
        "Answer:",
    ]
    return Choices("\n".join(lines), LETTERS, record.label("answer", known))


READERS: dict[str, Callable[[Record], Choices]] = {
    "hellaswag": hellaswag,
    "piqa": piqa,
    "arc": arc,
    "winogrande": winogrande,
    "mmlu": mmlu,
}
# Whose published accuracy is the length-normalised one.
NORMALISED = frozenset({"hellaswag", "piqa", "arc"})


def choice_items(config: TaskConfig, tokenizer: Tokenizer) -> list[Item]:
    """The items of a task of READERS; the right choice is also the continuation. Raises InputError,
    naming line and field, for the first record that is not the task's.
    """
    records = islice(task_records(config), config.skip, config.skip + config.num_items)
    items = []
    for record in records:
        choices = READERS[config.task](record)
        try:
            items.append(_item(_distinct(choices), tokenizer))
        except InputError as error:
            raise InputError(f"{record.where}: {error}") from error
    return items


def _distinct(asked: Choices) -> Choices:
    """Choices of the same words are one choice. Raises InputError when all are the same."""
    kept = [i for i, words in enumerate(asked.choices) if asked.choices.index(words) == i]
    if len(kept) < 2 <= len(asked.choices):
        raise InputError(
            f"every choice reads {asked.choices[0]!r}, so there is nothing to choose; take the "
            f"record out of the file."
        )
    return Choices(
        asked.context,
        tuple(asked.choices[i] for i in kept),
        kept.index(asked.choices.index(asked.choices[asked.label])),
        tuple(asked.given[i] for i in kept) if asked.given else (),
    )


def _item(asked: Choices, tokenizer: Tokenizer) -> Item:
    tokens = [encode_after(tokenizer, asked.context, f" {choice}") for choice in asked.choices]
    given = [len(encode_after(tokenizer, asked.context, f" {words}")) for words in asked.given]
    unscored = [len(words) for words in asked.given] or [0] * len(tokens)
    question = Question(
        stem=(),
        choices=tuple(tokens),
        label=asked.label,
        given=tuple(given),
        characters=tuple(len(c) - n for c, n in zip(asked.choices, unscored, strict=True)),
    )
    return Item(encode(tokenizer, asked.context), (question,), tokens[asked.label])


def _asked(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def _plain(text: str) -> str:
    text = text.strip()
    for mark, instead in HELLASWAG_MARKS:
        text = re.sub(mark, instead, text)
    return text
