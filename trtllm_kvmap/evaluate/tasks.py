"""Where items come from: the tiny family's documents, HellaSwag, or any plain text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.items import Item, Question
from trtllm_kvmap.tiny.documents import FACT_TOKENS, FRAME_TOKENS, make_document

Tokenizer = Any  # a transformers tokenizer; only its call is used
SHORTEST_DOCUMENT, FACTS = 256, (8, 24)  # of the tiny family's documents


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """Which items to read. Equal configurations give equal items; different ``skip`` (or seeds of
    the task `tiny`) give different ones.
    """

    task: str = field(default="tiny", metadata={"help": "tiny, hellaswag or text"})
    data: str = field(default="", metadata={"help": "the task's file (tiny needs none)"})
    num_items: int = field(default=60, metadata={"help": "how many items to read"})
    skip: int = field(default=0, metadata={"help": "how many items to leave out before them"})
    context_tokens: int = field(
        default=1024, metadata={"help": "longest context of tiny, every context of text"}
    )
    scored_tokens: int = field(
        default=40, metadata={"help": "length of the scored continuation of tiny and text"}
    )
    questions: int = field(default=6, metadata={"help": "questions per document of tiny"})
    seed: int = field(default=0, metadata={"help": "draws the documents of tiny"})


def read_items(config: TaskConfig, tokenizer: Tokenizer) -> list[Item]:
    """The items that ``config`` names, in order. Raises InputError for an unknown task, a file
    that is not what the task reads, or fewer items than asked for.
    """
    if config.task not in TASKS:
        raise InputError(f"The task {config.task!r} is not known; known are {', '.join(TASKS)}.")
    if tokenizer is None:
        raise InputError(f"The task {config.task!r} is text, and the model has no tokenizer.")
    for name in ("num_items", "context_tokens"):
        if getattr(config, name) < 1:
            raise InputError(f"{name} must be at least 1, got {getattr(config, name)}.")
    if min(config.skip, config.questions, config.scored_tokens) < 0:
        raise InputError("skip, questions and scored_tokens must not be negative.")
    items = TASKS[config.task](config, tokenizer)
    if len(items) < config.num_items:
        raise InputError(
            f"{config.data} holds {len(items)} items of the task {config.task!r} after the first "
            f"{config.skip}; {config.num_items} were asked for. Ask for fewer, or give more text."
        )
    return items


def tiny_items(config: TaskConfig, tokenizer: Tokenizer) -> list[Item]:
    """Documents of 256 tokens to ``context_tokens`` with questions, and a continuation that says
    facts of the document again (``again after anna ben``).
    """
    items = []
    for index in range(config.skip, config.skip + config.num_items):
        rng = np.random.default_rng([config.seed, index])
        shortest = min(SHORTEST_DOCUMENT, config.context_tokens)
        tokens = int(rng.integers(shortest, config.context_tokens + 1))
        most = min(FACTS[1], (tokens - FRAME_TOKENS) // FACT_TOKENS)
        facts = int(rng.integers(min(FACTS[0], most), most + 1))
        document = make_document(rng, tokens, facts, config.questions)
        questions = tuple(
            Question(
                stem=_words(tokenizer, question.stem),
                choices=tuple(_words(tokenizer, choice) for choice in question.choices),
                label=question.label,
            )
            for question in document.questions
        )
        again = restatements(rng, document.text.split(), config.scored_tokens)
        continuation = _words(tokenizer, " ".join(again)) if again else ()
        items.append(Item(_words(tokenizer, document.text), questions, continuation))
    return items


def restatements(rng: np.random.Generator, words: list[str], tokens: int) -> list[str]:
    """Facts told in ``words``, told again in new order until ``tokens`` words are full."""
    told = {
        words[i + 1]: words[i + 2]
        for i, word in enumerate(words[:-2])
        if word == "after" and words[i - 1] != "again"
    }
    again: list[str] = []
    while len(again) < tokens:
        for name in rng.permutation(sorted(told)):
            again += ["again", "after", str(name), told[name]]
    return again[:tokens]


def hellaswag_items(config: TaskConfig, tokenizer: Tokenizer) -> list[Item]:
    """HellaSwag (Zellers et al. 2019) as published: JSON lines with ``ind, ctx, endings, label``.
    The endings follow the context at once; the right one is also the continuation.
    """
    items: list[Item] = []
    for number, line in enumerate(_lines(config), start=1):
        if number <= config.skip or not line.strip():
            continue
        if len(items) == config.num_items:
            break
        where = f"{config.data}, line {number}"
        try:
            entry = json.loads(line)
            context, endings, label = entry["ctx"], list(entry["endings"]), int(entry["label"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{where} is not a HellaSwag item ({error!r}); each line needs the JSON fields "
                f"ind, ctx, endings and label."
            ) from error
        try:
            context_ids = _ids(tokenizer, context)
            whole = [_ids(tokenizer, f"{context} {ending}") for ending in endings]
            choices = tuple(ids[len(context_ids) :] for ids in whole)
            question = Question(stem=(), choices=choices, label=label)
            items.append(Item(context_ids, (question,), choices[label]))
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
    return items


def text_items(config: TaskConfig, tokenizer: Tokenizer) -> list[Item]:
    """Plain text cut into pieces one after another: ``context_tokens`` are handed over and the
    ``scored_tokens`` after them are scored. A tokenizer that begins texts with a token of its own
    begins every piece with it.
    """
    if not config.scored_tokens:
        raise InputError("The task 'text' needs scored_tokens of at least 1.")
    ids = _ids(tokenizer, "".join(_lines(config)))
    head = ids[:1] if ids and ids[0] == getattr(tokenizer, "bos_token_id", None) else ()
    body, step = ids[len(head) :], config.context_tokens - len(head) + config.scored_tokens
    pieces = [head + body[at : at + step] for at in range(0, len(body) - step + 1, step)]
    chosen = pieces[config.skip : config.skip + config.num_items]
    end = config.context_tokens
    return [Item(piece[:end], continuation=piece[end:]) for piece in chosen]


TASKS: dict[str, Callable[[TaskConfig, Tokenizer], list[Item]]] = {
    "tiny": tiny_items,
    "hellaswag": hellaswag_items,
    "text": text_items,
}


def _lines(config: TaskConfig) -> list[str]:
    path = Path(config.data)
    if not config.data or not path.is_file():
        raise InputError(
            f"The task {config.task!r} needs a file; there is none at {config.data!r}."
        )
    try:
        return path.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise InputError(f"{config.data} is not UTF-8 text ({error}).") from error


def _ids(tokenizer: Tokenizer, text: str, **options: bool) -> tuple[int, ...]:
    try:
        return tuple(tokenizer(text, **options).input_ids)
    except Exception as error:  # word-level tokenizers raise nothing narrower for a word they lack
        shown = str(text)[:60]
        raise InputError(f"The tokenizer cannot write the text {shown!r} ({error}).") from error


def _words(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The tiny documents write their own ``<bos>``, so the tokenizer must not add one."""
    return _ids(tokenizer, text, add_special_tokens=False)
