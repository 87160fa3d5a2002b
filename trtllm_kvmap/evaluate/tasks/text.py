"""Text of tasks as token ids, the way evaluation harnesses cut it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtllm_kvmap.errors import InputError

Tokenizer = Any  # a transformers tokenizer; only its call is used


def encode(tokenizer: Tokenizer, text: str, **options: bool) -> tuple[int, ...]:
    """Token ids of ``text``. Raises InputError for text that the tokenizer cannot write."""
    try:
        return tuple(tokenizer(text, **options).input_ids)
    except Exception as error:  # word-level tokenizers raise nothing narrower for a word they lack
        shown = str(text)[:60]
        raise InputError(f"The tokenizer cannot write the text {shown!r} ({error}).") from error


def encode_bare(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The same without special tokens: what follows other text, or writes its own ``<bos>``."""
    return encode(tokenizer, text, add_special_tokens=False)


def encode_after(tokenizer: Tokenizer, context: str, text: str) -> tuple[int, ...]:
    """The token ids of ``context + text`` beyond as many as ``context`` alone has: the cut that
    lm-evaluation-harness makes, so that a word after a space is the token it is in running text.
    """
    return encode(tokenizer, context + text)[len(encode(tokenizer, context)) :]


def list_folder(data: str) -> list[Path] | None:
    """What lies in the folder ``data``, by name; None where it is none. Raises InputError for one
    that cannot be read.
    """
    folder = Path(data)
    try:
        return sorted(folder.iterdir()) if data and folder.is_dir() else None
    except OSError as error:
        raise InputError(f"{data} cannot be read ({error.strerror}).") from error


def read_text(task: str, data: str) -> str:
    """The content of a task's file, without a byte order mark. Raises InputError for a file that is
    missing, cannot be read or is not UTF-8.
    """
    path = Path(data)
    if not data:
        raise InputError(f"The task {task!r} needs a file; give one as data (--data FILE).")
    try:
        if not path.is_file():
            raise InputError(f"The task {task!r} needs a file; there is none at {data!r}.")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{data} is not UTF-8 text ({error}); convert it first.") from error
    except OSError as error:
        raise InputError(f"{data} cannot be read ({error.strerror}).") from error
