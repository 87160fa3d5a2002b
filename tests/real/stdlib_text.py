"""English that comes with Python itself: the language reference to calibrate on, and docstrings of
modules, which are not in it, to be judged on.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import http.cookies
import json
import shelve
import ssl
import statistics
import uuid
import wave
from pathlib import Path
from pydoc_data.topics import topics

REFERENCE: dict[str, str] = topics  # about 110,000 tokens
# Each on a subject of its own, and of 500 tokens at least.
DOCSTRINGS = {
    "heapq": heapq.__about__,
    "statistics": statistics.__doc__,
    "json": json.__doc__,
    "shelve": shelve.__doc__,
    "ssl": ssl.__doc__,
    "wave": wave.__doc__,
    "uuid": uuid.__doc__,
    "hashlib": hashlib.__doc__,
    "argparse": argparse.__doc__,
    "cookies": http.cookies.__doc__,
}


def write_texts(folder: Path, texts: dict[str, str]) -> list[Path]:
    """One file a text, in a new folder; returns the files."""
    folder.mkdir()
    files = [folder / f"{name}.txt" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text, encoding="utf-8")
    return files
