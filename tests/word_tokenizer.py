"""A fake tokenizer that writes any text: one token a word, ids in order of first use."""

from __future__ import annotations

import re
from types import SimpleNamespace


class FakeWordTokenizer:
    """Fake: words and line ends are tokens, and every text begins with ``<bos>`` unless told
    otherwise, as a real tokenizer's would.
    """

    def __init__(self, special: bool = True) -> None:
        self.words = ["<bos>"]
        self.special = special
        self.bos_token_id = 0 if special else None
        self.all_special_ids = [0]

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        ids = [0] if add_special_tokens and self.special else []
        for word in re.findall(r"\n|[^\s]+", text):
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return SimpleNamespace(input_ids=ids)

    def get_vocab(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}

    def decode(self, token_ids: list[int] | tuple[int, ...]) -> str:
        return " ".join(self.words[i] for i in token_ids)

    def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
        return [self.words[i] for i in token_ids]
