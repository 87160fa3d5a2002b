"""The documents that the tiny family reads: who stands after whom in a ring, told between sentences
about nothing.

A document states, in shuffled order, the neighbours of one ring of names (``after anna ben``),
says some of them again (``again after anna ben``, so that late tokens depend on early ones), and
fills the rest with sentences that carry no fact. A question walks the ring one step or two: ``so
second after anna`` is answered by the name two steps on. The second step needs another look at
the document, which is what separates a large reader from a small one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trtllm_kvmap.errors import InputError

NAMES = [
    "anna",
    "ben",
    "carl",
    "dora",
    "emil",
    "fay",
    "gus",
    "hana",
    "ivan",
    "jade",
    "karl",
    "lena",
    "milo",
    "nora",
    "otto",
    "pia",
    "quin",
    "rosa",
    "sven",
    "tess",
    "ugo",
    "vera",
    "walt",
    "xena",
    "yuri",
    "zoe",
    "abel",
    "beth",
    "cyrus",
    "dina",
]
ADJECTIVES = [
    "old",
    "quiet",
    "small",
    "bright",
    "cold",
    "green",
    "heavy",
    "gentle",
    "broken",
    "distant",
]
NOUNS = [
    "river",
    "ship",
    "garden",
    "tower",
    "bridge",
    "harbor",
    "forest",
    "mill",
    "road",
    "market",
    "lamp",
    "stone",
]
VERBS = ["stood", "slept", "waited", "turned", "shone", "faded", "rested", "moved"]
GLUE = ["<pad>", "<bos>", "after", "again", "so", "first", "second", "near"]
FACT_TOKENS, FILLER_TOKENS = 3, 6
FRAME_TOKENS = 1 + 2 * FILLER_TOKENS  # of a whole document: <bos>, and how it opens and closes
STEP_WORDS = ("first", "second")
VOCABULARY = GLUE + NAMES + ADJECTIVES + NOUNS + VERBS
TOKEN_ID = {word: index for index, word in enumerate(VOCABULARY)}


@dataclass(frozen=True, slots=True)
class Question:
    """``stem`` is asked after the document; ``choices[label]`` is the name that ``steps`` steps
    lead to.
    """

    stem: str
    choices: tuple[str, ...]
    label: int
    steps: int


@dataclass(frozen=True, slots=True)
class Document:
    """``text`` (words separated by one space, ``<bos>`` first) and the questions it answers."""

    text: str
    questions: tuple[Question, ...]


def stem_words(name: str, steps: int) -> list[str]:
    """``so second after anna`` for two steps from anna."""
    return ["so", STEP_WORDS[steps - 1], "after", name]


def filler_words(rng: np.random.Generator) -> list[str]:
    adjectives = [ADJECTIVES[i] for i in rng.integers(len(ADJECTIVES), size=2)]
    nouns = [NOUNS[i] for i in rng.integers(len(NOUNS), size=2)]
    verb = VERBS[rng.integers(len(VERBS))]
    return [adjectives[0], nouns[0], verb, "near", adjectives[1], nouns[1]]


def sentences(
    rng: np.random.Generator, cycle: list[str], tokens: int, again_share: float = 0.15
) -> list[list[str]]:
    """At most ``tokens`` words: every fact of ``cycle`` once, repetitions and fillers between."""
    successor = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    spare = tokens - FACT_TOKENS * len(cycle)
    extras: list[str | None] = []  # "again" or a filler; which fact is repeated is chosen in place
    while spare >= FILLER_TOKENS:
        again = rng.random() < again_share
        extras.append("again" if again else None)
        spare -= FACT_TOKENS + 1 if again else FILLER_TOKENS
    order = [*rng.permutation(cycle), *extras]
    rng.shuffle(order)
    told: list[str] = []
    written: list[list[str]] = []
    for item in order:
        if item in successor:
            told.append(item)
            written.append(["after", item, successor[item]])
        elif item == "again" and told:
            name = told[rng.integers(len(told))]
            written.append(["again", "after", name, successor[name]])
        elif item != "again":
            written.append(filler_words(rng))
    return written


def mostly_facts(seed: int, count: int) -> list[str]:
    """Texts of short documents that are mostly facts; equal seeds give equal ones.

    A calibration that counts every token alike learns from these what facts need. In documents as
    long as a report's nine tokens of ten carry no fact, and a plain ridge of those recovers half as
    much of the gap; rows weighed by attention need no such text.
    """
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        facts = int(rng.integers(8, len(NAMES) + 1))
        tokens = FRAME_TOKENS + FACT_TOKENS * facts + int(rng.integers(0, FACT_TOKENS * facts))
        texts.append(make_document(rng, tokens, facts, 0).text)
    return texts


def make_document(
    rng: np.random.Generator, tokens: int, facts: int, questions: int, num_choices: int = 4
) -> Document:
    """One document of at most ``tokens`` tokens (one per word) about ``facts`` people, with its
    questions. It opens and closes with a sentence that carries no fact, so that the first and the
    last tokens, which a target may read itself, give nothing away.
    """
    if not num_choices <= facts <= len(NAMES):
        raise InputError(f"facts must be between {num_choices} and {len(NAMES)}, got {facts}.")
    least = FRAME_TOKENS + FACT_TOKENS * facts
    if tokens < least:
        raise InputError(f"{facts} facts need at least {least} tokens, got {tokens}.")
    cycle = [str(name) for name in rng.permutation(NAMES)[:facts]]
    body = sentences(rng, cycle, tokens - FRAME_TOKENS)
    framed = [["<bos>"], filler_words(rng), *body, filler_words(rng)]
    words = [word for sentence in framed for word in sentence]
    asked = []
    for index in range(questions):
        steps, start = 1 + index % len(STEP_WORDS), int(rng.integers(facts))
        answer = cycle[(start + steps) % facts]
        others = [name for name in cycle if name not in (answer, cycle[start])]
        choices = [answer, *rng.permutation(others)[: num_choices - 1]]
        order = rng.permutation(num_choices)
        asked.append(
            Question(
                stem=" ".join(stem_words(cycle[start], steps)),
                choices=tuple(str(choices[i]) for i in order),
                label=int(np.flatnonzero(order == 0)[0]),
                steps=steps,
            )
        )
    return Document(" ".join(words), tuple(asked))
