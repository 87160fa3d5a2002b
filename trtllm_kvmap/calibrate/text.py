"""Calibration text: files become lists of token ids.

- A `.jsonl` file holds one document a line: an object with `text`, with `token_ids` (already
  tokenised), or with `messages` (objects with `role` and `content`), which are written in the
  tokenizer's own chat template, as they are when a model serves. Empty lines are passed over.
- Any other file is plain text and one document. (A blank line is part of a document: short
  paragraphs would teach a map nothing about distance.)
- A folder stands for the files in it, in the order of their names.

A document of more than ``max_tokens`` is cut into windows, each read from position 0. When the
document begins with the tokenizer's BOS token, so does every window.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.models import LoadedModel, ModelDescription, tokenise, tokenise_chat

Reader = LoadedModel | ModelDescription


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that its model's chat template writes."""

    messages: list[dict[str, str]]


Content = str | list[int] | Chat


def read_documents(
    path: str | Path,
    model: Reader,
    *,
    min_tokens: int,
    max_tokens: int,
    max_windows: int | None = None,
) -> list[list[int]]:
    """The documents of ``path``, tokenised by ``model``'s tokenizer, each of ``min_tokens`` to
    ``max_tokens`` tokens: a longer one in windows, of which the first ``max_windows`` are taken
    (None: all). No weights are needed.

    Raises InputError, naming file and line, for a file that is missing, unreadable, empty, not
    UTF-8 or not JSON, a line without a usable field, a document of fewer than ``min_tokens``, token
    ids the model does not know, or text for a model without a tokenizer. A last window that is too
    short is left out.
    """
    documents: list[list[int]] = []
    for file in _files(Path(path)):
        for where, content in _contents(file):
            ids = _token_ids(content, model, where)
            if len(ids) < min_tokens:
                raise InputError(
                    f"{where} has {len(ids)} tokens, and at least {min_tokens} are needed in a "
                    f"document. Take it out, or join it to another."
                )
            windows = islice(_windows(ids, _bos(model), max_tokens), max_windows)
            documents += [window for window in windows if len(window) >= min_tokens]
    if not documents:
        raise InputError(f"{path} holds no document; give text.")
    return documents


def text_digest(documents: Sequence[Sequence[int]]) -> str:
    """sha256 of the token ids and of where documents end."""
    sha = hashlib.sha256()
    for ids in documents:
        sha.update(np.asarray([len(ids), *ids], dtype="<i8").tobytes())
    return sha.hexdigest()


def shared_prefix(documents: Sequence[Sequence[int]], limit: int) -> list[int]:
    """The first tokens, at most ``limit``, with which every document begins."""
    prefix = []
    for column in list(zip(*(ids[:limit] for ids in documents), strict=False)):
        if len(set(column)) > 1:
            break
        prefix.append(column[0])
    return prefix


def _files(path: Path) -> list[Path]:
    try:
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise InputError(f"There is no file or folder {path}; give text.")
        files = sorted(file for file in path.iterdir() if file.is_file())
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}).") from error
    if not files:
        raise InputError(f"The folder {path} holds no file; give text.")
    return files


def _contents(file: Path) -> Iterator[tuple[str, Content]]:
    """The documents of one file, each with its place for complaints."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text ({error}); convert it first.") from error
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}).") from error
    if not text.strip():
        raise InputError(f"{file} is empty; give text.")
    if file.suffix != ".jsonl":
        yield str(file), text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{file}, line {number},"
            yield where, _content_of_line(line, where)


def _content_of_line(line: str, where: str) -> Content:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON ({error}); mend or remove the line.") from error
    fields = entry if isinstance(entry, dict) else {}
    ids, text = fields.get("token_ids"), fields.get("text")
    chat: Any = fields.get("messages")
    if isinstance(ids, list) and all(type(token) is int for token in ids):
        return ids
    if isinstance(text, str) and "token_ids" not in fields:
        return text
    if text is None and ids is None and _is_chat(chat):
        return Chat(chat)
    raise InputError(
        f"{where} needs an object with a string `text`, a list of integers `token_ids`, or a list "
        f"`messages` of objects with the strings `role` and `content`; it has "
        f"{sorted(fields) if fields else 'none of these'}."
    )


def _is_chat(chat: Any) -> bool:
    return (
        isinstance(chat, list)
        and bool(chat)
        and all(
            isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content"))
            for m in chat
        )
    )


def _token_ids(content: Content, model: Reader, where: str) -> list[int]:
    try:
        if isinstance(content, str):
            content = tokenise(model.tokenizer, model.name, content)
        elif isinstance(content, Chat):
            content = tokenise_chat(model.tokenizer, model.name, content.messages)
    except InputError as error:
        raise InputError(f"{where} cannot be read. {error}") from error
    known = model.spec.vocab_size
    if content and not 0 <= min(content) <= max(content) < known:
        raise InputError(
            f"{where} has token ids from {min(content)} to {max(content)}; {model.name} knows 0 "
            f"to {known - 1}."
        )
    return content


def _bos(model: Reader) -> int | None:
    return getattr(model.tokenizer, "bos_token_id", None)


def _windows(ids: list[int], bos: int | None, max_tokens: int) -> Iterator[list[int]]:
    start = ids[:1] if ids[0] == bos else []
    step = max_tokens - len(start)
    for first in range(len(start), len(ids), step):
        yield start + ids[first : first + step]
