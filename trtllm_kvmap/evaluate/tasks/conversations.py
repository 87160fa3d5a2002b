"""Conversations with known answers: CoQA as published, or the tiny family's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.tasks.config import TaskConfig
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.evaluate.tasks.records import Record, read_records
from trtllm_kvmap.evaluate.tasks.text import Tokenizer, encode, encode_bare
from trtllm_kvmap.evaluate.tasks.tiny import require_tokens
from trtllm_kvmap.tiny.documents import FACT_TOKENS, FRAME_TOKENS, make_document


@dataclass(frozen=True, slots=True)
class Turn:
    """What is asked and the right answer, token ids; neither is empty."""

    asked: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A text that is read first, and the turns about it."""

    opening: tuple[int, ...]
    turns: tuple[Turn, ...]


def read_conversations(config: TaskConfig, tokenizer: Tokenizer) -> list[Conversation]:
    """The conversations of the task ``coqa`` or ``tiny``, at most ``num_items``. Raises InputError
    for another task, and as the task's reader does.
    """
    if config.task == "coqa":
        return list(_coqa(config, tokenizer))
    if config.task == "tiny":
        if config.questions < 1:
            raise InputError("questions must be at least 1 for conversations, got 0.")
        require_tokens(config)
        return list(_tiny(config, tokenizer))
    raise InputError(f"The task {config.task!r} has no conversations; coqa and tiny have.")


def coqa_items(config: TaskConfig, tokenizer: Tokenizer) -> list[Item]:
    """CoQA (Reddy et al. 2019) as single items: the story with every turn but the last and the last
    question is the context, its answer the continuation.
    """
    items = []
    for talk in _coqa(config, tokenizer):
        told = [token for turn in talk.turns[:-1] for token in (*turn.asked, *turn.answer)]
        last = talk.turns[-1]
        items.append(Item((*talk.opening, *told, *last.asked), continuation=last.answer))
    return items


def _coqa(config: TaskConfig, tokenizer: Tokenizer) -> Iterator[Conversation]:
    records = read_records(config.task, config.data)
    for record in islice(records, config.skip, config.skip + config.num_items):
        try:
            yield Conversation(
                encode(tokenizer, record.text("story").strip()),
                tuple(
                    Turn(
                        encode_bare(tokenizer, f"\n\nQ: {question}\n\nA:"),
                        encode_bare(tokenizer, f" {answer}"),
                    )
                    for question, answer in _turns(record)
                ),
            )
        except InputError as error:
            raise InputError(
                str(error) if record.where in str(error) else f"{record.where}: {error}"
            ) from error


def _turns(record: Record) -> list[tuple[str, str]]:
    """Every question with its answer. Both are lists of objects with ``input_text`` and ``turn_id``
    as first published, or the lists of these fields that `datasets` makes of them.
    """
    questions, answers = _told(record, "questions"), _told(record, "answers")
    if len(questions) != len(answers) or not questions:
        record.refuse("answers", f"needs one for each of the {len(questions)} questions")
    for (_, asked), (_, answered) in zip(questions, answers, strict=True):
        if None not in (asked, answered) and asked != answered:
            record.refuse("answers", f"answers turn {answered!r} where turn {asked!r} is asked")
    return [(q.strip(), a.strip()) for (q, _), (a, _) in zip(questions, answers, strict=True)]


def _told(record: Record, name: str) -> list[tuple[str, Any]]:
    """(text, turn or None) of each question or answer."""
    told = record.fields.get(name)
    if isinstance(told, dict):
        columns = record.object(name)
        texts = columns.texts("input_text")
        turns = told.get("turn_id") or [None] * len(texts)
        if not isinstance(turns, list) or len(turns) != len(texts):
            columns.refuse("turn_id", f"needs {len(texts)} entries, one for each text")
        return list(zip(texts, turns, strict=True))
    if isinstance(told, list) and told and isinstance(told[0], str):
        return [(text, None) for text in record.texts(name)]
    return [(r.text("input_text"), r.fields.get("turn_id")) for r in record.objects(name)]


def _tiny(config: TaskConfig, tokenizer: Tokenizer) -> Iterator[Conversation]:
    """One document and ``questions`` turns about it; every answer is one name."""
    for index in range(config.skip, config.skip + config.num_items):
        rng = np.random.default_rng([config.seed, index])
        facts = min(16, (config.context_tokens - FRAME_TOKENS) // FACT_TOKENS)
        document = make_document(rng, config.context_tokens, facts, config.questions)
        yield Conversation(
            encode_bare(tokenizer, document.text),
            tuple(
                Turn(
                    encode_bare(tokenizer, question.stem),
                    encode_bare(tokenizer, question.choices[question.label]),
                )
                for question in document.questions
            ),
        )
