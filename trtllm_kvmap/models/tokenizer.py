"""Text to token ids, and what tells two tokenizers apart."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trtllm_kvmap.errors import InputError


def load_tokenizer(path_or_id: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or hub id, or None when it has none (pre-tokenised text still
    works). Raises InputError for one whose files cannot be understood.
    """
    try:
        return AutoTokenizer.from_pretrained(path_or_id)
    except (OSError, ValueError):
        return None
    except Exception as error:  # its files may hold anything
        raise InputError(
            f"The tokenizer of {str(path_or_id)!r} cannot be read ({type(error).__name__}: "
            f"{error}); give a folder with the tokenizer files that the model came with."
        ) from error


def tokenise(
    tokenizer: PreTrainedTokenizerBase | None,
    name: str,
    text: str,
    *,
    add_special_tokens: bool = True,
) -> list[int]:
    """Token ids of ``text`` for the model called ``name``. Raises InputError when there is no
    tokenizer or it cannot write ``text``.
    """
    called: Any = tokenizer
    if called is None:
        raise InputError(f"{name} has no tokenizer, so it cannot read text; give token ids.")
    try:
        ids = called(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    except Exception as error:  # fast tokenizers raise nothing narrower for a word they lack
        raise InputError(
            f"The tokenizer of {name} cannot write {text[:60]!r}: {error}. Give text in its "
            f"vocabulary."
        ) from error
    return list(ids)


def tokenise_chat(
    tokenizer: PreTrainedTokenizerBase | None, name: str, messages: list[dict[str, str]]
) -> list[int]:
    """Token ids of ``messages`` ({"role", "content"} each) in the tokenizer's own chat template.
    Raises InputError when there is no template, or it does not take these messages.
    """
    called: Any = tokenizer
    if not getattr(called, "chat_template", None):
        raise InputError(f"{name} has no chat template; give text or token ids.")
    try:
        ids = called.apply_chat_template(messages, tokenize=True, return_dict=False)
    except Exception as error:  # templates raise whatever their author chose
        raise InputError(
            f"The chat template of {name} does not take these messages: {error}"
        ) from error
    return list(ids)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> str:
    """A digest of what turns text into ids; padding, truncation and chat template do not count."""
    if tokenizer is None:
        return hashlib.sha256(f"no tokenizer, {vocab_size} ids".encode()).hexdigest()
    if tokenizer.is_fast:
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        described.pop("padding", None)
        described.pop("truncation", None)
    else:
        described = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
