"""What is scored: a context that is handed over once, and what is asked of the model after it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trtllm_kvmap.errors import InputError


@dataclass(frozen=True, slots=True)
class Question:
    """A multiple-choice question: each choice is scored by its log-probability after context +
    stem.

    ``stem`` may be empty (the choices then follow the context at once); every choice has at least
    one token and differs from the others; ``choices[label]`` is the right one. The first
    ``given[i]`` tokens of choice i are read but not scored (empty: all are scored). ``characters``
    are the lengths of the choices as text, by which a length-normalised score is divided (empty:
    by scored tokens).
    """

    stem: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    label: int
    given: tuple[int, ...] = ()
    characters: tuple[int, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """What the log-probability of each choice is divided by when lengths are normalised."""
        return self.characters or tuple(len(choice) for choice in self.scored)

    @property
    def skipped(self) -> tuple[int, ...]:
        """How many tokens of each choice are read before the first that is scored."""
        return self.given or (0,) * len(self.choices)

    @property
    def scored(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each choice that are scored."""
        return tuple(c[n:] for c, n in zip(self.choices, self.skipped, strict=True))

    def __post_init__(self) -> None:
        if len(self.choices) < 2 or not all(self.choices):
            raise InputError(
                f"A question needs at least two choices of at least one token each, got lengths "
                f"{[len(choice) for choice in self.choices]}."
            )
        if not 0 <= self.label < len(self.choices):
            raise InputError(
                f"The label {self.label} names none of the {len(self.choices)} choices; count "
                f"from 0."
            )
        for name in ("given", "characters"):
            if getattr(self, name) and len(getattr(self, name)) != len(self.choices):
                raise InputError(
                    f"{name} needs one count for each of the {len(self.choices)} choices, got "
                    f"{getattr(self, name)}."
                )
        if not all(self.scored) or min(self.lengths) < 1:
            raise InputError(
                f"Every choice needs at least one token that is scored; got lengths "
                f"{[len(choice) for choice in self.choices]}, of which {self.given} are given."
            )
        if len(set(self.choices)) < len(self.choices):
            raise InputError(
                f"Two choices of a question are the same tokens, {self.choices}; does the "
                f"tokenizer know their words?"
            )


@dataclass(frozen=True, slots=True)
class Item:
    """One context (token ids) with questions, each asked of the context alone, and a continuation
    whose loss is scored. One of the two may be empty.
    """

    context: tuple[int, ...]
    questions: tuple[Question, ...] = ()
    continuation: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.context:
            raise InputError("An item needs a context of at least one token.")
        if not self.questions and not self.continuation:
            raise InputError("An item needs a question or a continuation, or there is no score.")

    @property
    def digest(self) -> str:
        """16 hex digits that name the context; equal contexts have equal digests."""
        return hashlib.sha256(np.asarray(self.context, dtype="<i8").tobytes()).hexdigest()[:16]

    @property
    def longest_path(self) -> int:
        """Tokens read after the context by the longest question or the continuation."""
        asked = [len(q.stem) + max(map(len, q.choices)) for q in self.questions]
        return max([len(self.continuation), *asked])


def require_unseen(items: Sequence[Item], seen: Sequence[str]) -> None:
    """Raise InputError when the context of an item is among the digests ``seen`` in selection."""
    known = set(seen)
    common = sum(item.digest in known for item in items)
    if common:
        raise InputError(
            f"{common} of the {len(items)} items helped to choose this map, so a report on them "
            f"would flatter it. Give items that the selection never saw (another seed or skip)."
        )
