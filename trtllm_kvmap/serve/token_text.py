"""Tokens as text that grows: pieces that are never taken back, and texts that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer writes for the first bytes of a character


class TokenText:
    """The text of an answer, token by token. Once ``stopped``, one of ``stop`` has been met, and
    neither it nor anything behind it is ever given out.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        # Tokens from _begin on are decoded together, because a tokenizer joins neighbours; those
        # before _end are in the text already.
        self._begin = self._end = 0
        self._held = ""

    def push(self, token: int) -> str:
        """What may be shown now that ``token`` has come; empty while a character or a stop text may
        still be unfinished.
        """
        self._ids.append(token)
        before = self._decode(self._ids[self._begin : self._end])
        after = self._decode(self._ids[self._begin :])
        if after.endswith(UNFINISHED):
            return ""
        self._begin, self._end = self._end, len(self._ids)
        return self._show(after[len(before) :])

    def finish(self) -> str:
        """What was held back, when no token comes any more."""
        tail = self._decode(self._ids[self._begin :])
        known = self._decode(self._ids[self._begin : self._end])
        shown = self._show(tail[len(known) :])
        held, self._held = self._held, ""
        return shown if self.stopped else shown + held

    def _show(self, more: str) -> str:
        if self.stopped:
            return ""
        text = self._held + more
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` with which ``stop`` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
