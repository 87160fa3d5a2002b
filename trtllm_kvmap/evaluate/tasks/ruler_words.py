"""How generated long-context tasks are worded: in plain English, or in the tiny family's words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trtllm_kvmap.evaluate.tasks.text import Tokenizer
from trtllm_kvmap.tiny.documents import NAMES, VOCABULARY, filler_words


@dataclass(frozen=True, slots=True)
class Wording:
    """The sentences of a task. ``fact`` says that a key has a value, ``link`` that a key has the
    value of another, ``seen`` mentions a word once; ``ask`` and ``ask_linked`` (of a key) and
    ``ask_seen`` stand before an answer. ``hops`` facts and links make a chain.
    """

    opening: str
    filler: Callable[[np.random.Generator], str]
    keys: Callable[[np.random.Generator, int], list[str]]
    values: Callable[[np.random.Generator, int, Sequence[str]], list[str]]
    fact: str
    link: str
    seen: str
    ask: str
    ask_linked: str
    ask_seen: str
    joined: str
    hops: int


def wording_for(tokenizer: Tokenizer) -> Wording:
    """TINY for a tokenizer that knows the tiny family's words and no others, else ENGLISH."""
    return TINY if set(tokenizer.get_vocab()) == set(VOCABULARY) else ENGLISH


# fmt: off
PLACES = (
    "harbor", "lantern", "meadow", "orchard", "quarry", "tunnel", "valley", "windmill",
    "bakery", "cabin", "dock", "engine", "ferry", "gate", "hangar", "island",
    "jetty", "kiln", "library", "museum", "office", "pier", "station", "tower",
)
COLOURS = (
    "amber", "black", "blue", "brown", "green", "grey", "orange", "pink",
    "purple", "red", "white", "yellow",
)
# fmt: on
REMARKS = (
    "The road was quiet that morning.",
    "Somebody had left the window open.",
    "Rain came later than the paper had said.",
    "The children went home by the river.",
    "A dog slept under the long table.",
    "Nobody remembered who had built the wall.",
    "The train to the coast was late again.",
    "There was bread on the shelf and tea in the pot.",
)


def _english_keys(rng: np.random.Generator, count: int) -> list[str]:
    drawn = rng.permutation(len(PLACES) * len(COLOURS))[:count]
    return [f"{COLOURS[i % len(COLOURS)]} {PLACES[i // len(COLOURS)]}" for i in drawn]


def _numbers(rng: np.random.Generator, count: int, _keys: Sequence[str]) -> list[str]:
    """Different numbers of five digits."""
    return [str(10_000 + int(i)) for i in rng.choice(90_000, count, replace=False)]


def _names(rng: np.random.Generator, count: int) -> list[str]:
    return [str(name) for name in rng.permutation(NAMES)[:count]]


def _other_names(rng: np.random.Generator, count: int, keys: Sequence[str]) -> list[str]:
    others = [name for name in NAMES if name not in keys]
    return [str(name) for name in rng.permutation(others)[:count]]


ENGLISH = Wording(
    opening="",
    filler=lambda rng: REMARKS[rng.integers(len(REMARKS))],
    keys=_english_keys,
    values=_numbers,
    fact="The code of the {key} is {value}.",
    link="The {key} has the same code as the {other}.",
    seen="A sign said {word}.",
    ask="The code of the {key} is",
    ask_linked="The code of the {key} is",
    ask_seen="Of all the signs, most said",
    joined=" and ",
    hops=3,
)
TINY = Wording(
    opening="<bos>",
    filler=lambda rng: " ".join(filler_words(rng)),
    keys=_names,
    values=_other_names,
    fact="after {key} {value}",
    link="after {key} {other}",
    seen="near {word}",
    ask="so first after {key}",
    ask_linked="so second after {key}",
    ask_seen="so first near",
    joined=" ",
    hops=2,
)
