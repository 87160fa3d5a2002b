"""Documents of the tiny family say what their questions ask."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.tiny.documents import (
    NAMES,
    STEP_WORDS,
    TOKEN_ID,
    Document,
    make_document,
    mostly_facts,
)


def facts_told(document: Document) -> dict[str, str]:
    """Every ``after X Y`` of the text, said again or not."""
    words = document.text.split()
    pairs = [(words[i + 1], words[i + 2]) for i, word in enumerate(words) if word == "after"]
    told = dict(pairs)
    assert all(told[name] == neighbour for name, neighbour in pairs), "a fact contradicts another"
    return told


@pytest.mark.parametrize("seed", range(8))
def test_every_question_is_answered_by_walking_the_facts(seed: int) -> None:
    document = make_document(np.random.default_rng(seed), 300, 12, 9)
    told = facts_told(document)
    assert len(told) == 12
    for question in document.questions:
        so, step, after, name = question.stem.split()
        assert (so, after) == ("so", "after")
        for _ in range(STEP_WORDS.index(step) + 1):
            name = told[name]
        assert question.choices[question.label] == name
        assert len(set(question.choices)) == 4
        assert question.stem.split()[3] not in question.choices


@pytest.mark.parametrize("tokens", [37, 64, 257, 1024])
def test_a_document_fits_and_has_only_known_words(tokens: int) -> None:
    words = make_document(np.random.default_rng(0), tokens, 8, 1).text.split()
    assert tokens - 12 <= len(words) <= tokens
    assert set(words) <= set(TOKEN_ID)
    assert not {"after", *NAMES} & {*words[:7], *words[-6:]}, "a fact at an end"


def test_long_documents_say_facts_again() -> None:
    words = make_document(np.random.default_rng(0), 1024, 8, 0).text.split()
    assert 5 <= words.count("again") <= 60


def test_what_cannot_be_made_is_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="12 facts need at least 49 tokens, got 40"):
        make_document(rng, 40, 12, 1)
    with pytest.raises(InputError, match="facts must be between 4 and 30, got 31"):
        make_document(rng, 400, 31, 1)


def test_documents_that_are_mostly_facts() -> None:
    texts = mostly_facts(seed=1, count=20)
    assert texts == mostly_facts(seed=1, count=30)[:20]
    assert not set(texts) & set(mostly_facts(seed=2, count=20))
    for text in texts:
        told = facts_told(Document(text, ()))
        body = len(text.split()) - 13  # <bos>, and a sentence of six words at either end
        assert 8 <= len(told) <= len(NAMES)
        assert 3 * len(told) <= body < 2 * 3 * len(told)
