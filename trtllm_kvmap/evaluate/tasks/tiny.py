"""The tiny family's own documents as items."""

from __future__ import annotations

import numpy as np

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.tasks.config import TaskConfig
from trtllm_kvmap.evaluate.tasks.items import Item, Question
from trtllm_kvmap.evaluate.tasks.text import Tokenizer, encode_bare
from trtllm_kvmap.tiny.documents import FACT_TOKENS, FRAME_TOKENS, make_document

SHORTEST_DOCUMENT, FACTS = 256, (8, 24)


LEAST_TOKENS = FRAME_TOKENS + 4 * FACT_TOKENS  # as many facts as a question has choices


def require_tokens(config: TaskConfig) -> None:
    """Raise InputError unless a document with a question fits into the context."""
    if config.context_tokens < LEAST_TOKENS:
        raise InputError(
            f"context_tokens must be at least {LEAST_TOKENS} for the task tiny, got "
            f"{config.context_tokens}."
        )


def tiny_items(config: TaskConfig, tokenizer: Tokenizer) -> list[Item]:
    """Documents of 256 tokens to ``context_tokens`` with questions, and a continuation that says
    facts of the document again (``again after anna ben``).
    """
    require_tokens(config)
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
                stem=encode_bare(tokenizer, question.stem),
                choices=tuple(encode_bare(tokenizer, choice) for choice in question.choices),
                label=question.label,
            )
            for question in document.questions
        )
        again = restatements(rng, document.text.split(), config.scored_tokens)
        continuation = encode_bare(tokenizer, " ".join(again)) if again else ()
        items.append(Item(encode_bare(tokenizer, document.text), questions, continuation))
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
