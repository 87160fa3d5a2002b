"""Which tokens of a context are alike: by place, and by what they write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Places where errors are counted apart: 0-15, 16-31, 32-63, ...
FIRST_BUCKET = 16
PARTS = 8  # of the mapped span, for interventions


def kinds_of(tokenizer: Any, token_ids: Sequence[int]) -> dict[str, list[int]]:
    """Positions by kind: ``first`` (position 0, whatever it is), ``special``, ``digits`` (every
    character but spaces is one), ``punctuation`` (no character is a letter or a digit), ``words``
    (the rest). Every position has one kind; without a tokenizer there are ``first`` and ``words``.
    """
    special = set(getattr(tokenizer, "all_special_ids", ()))
    kinds: dict[str, list[int]] = {}
    for position, token in enumerate(token_ids):
        if position == 0:
            kind = "first"
        elif token in special:
            kind = "special"
        else:
            kind = _kind("" if tokenizer is None else str(tokenizer.decode([token])).strip())
        kinds.setdefault(kind, []).append(position)
    return kinds


def buckets_of(tokens: range) -> dict[str, list[int]]:
    """Positions of ``tokens`` by powers of two: ``0-15``, ``16-31``, ``32-63``, ..."""
    buckets: dict[str, list[int]] = {}
    for position in tokens:
        start = 0 if position < FIRST_BUCKET else 1 << (position.bit_length() - 1)
        stop = FIRST_BUCKET if start == 0 else 2 * start
        buckets.setdefault(f"{start}-{stop - 1}", []).append(position)
    return buckets


def parts_of(tokens: range) -> dict[str, list[int]]:
    """``tokens`` in eighths of equal length, by their order: ``1/8`` is nearest the beginning."""
    bounds = [tokens.start + len(tokens) * i // PARTS for i in range(PARTS + 1)]
    return {f"{i + 1}/{PARTS}": list(range(bounds[i], bounds[i + 1])) for i in range(PARTS)}


def _kind(text: str) -> str:
    if not text or any(c.isalpha() for c in text):
        return "words"
    if all(c.isdigit() for c in text):
        return "digits"
    return "punctuation" if not any(c.isalnum() for c in text) else "words"
