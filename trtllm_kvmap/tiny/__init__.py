"""The tiny family: three real models of one tokenizer, small enough to live in the repository."""

from __future__ import annotations

from pathlib import Path

FAMILY = ("tiny-s", "tiny-m", "tiny-x")
PAIRS = (("tiny-s", "tiny-m"), ("tiny-s", "tiny-x"))


def model_folder(name: str) -> Path:
    """Where a member's config, weights and tokenizer lie."""
    return Path(__file__).parent / name
