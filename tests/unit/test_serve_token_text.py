"""Text that grows token by token is the text decoded at once, and stops where it should."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trtllm_kvmap.serve.token_text import TokenText


class Bytes:
    """A tokenizer of single bytes, so that a character may take several tokens."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(ids).decode("utf-8", errors="replace")


class Words:
    """A tokenizer of words that writes a space between neighbours, and none before the first."""

    WORDS = ("ab", "abc", "c", "d,", "é")

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(self.WORDS[i] for i in ids)


def shown(tokenizer: object, ids: list[int], *stop: str) -> tuple[list[str], bool]:
    text = TokenText(tokenizer, stop)
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            break
    return [*pieces, text.finish()], text.stopped


@given(st.text(max_size=20))
def test_bytes_are_shown_as_whole_characters(whole: str) -> None:
    whole = whole.replace("\ufffd", "")
    pieces, stopped = shown(Bytes(), list(whole.encode()))
    assert "".join(pieces) == whole
    assert "\ufffd" not in "".join(pieces)
    assert not stopped


@given(st.lists(st.integers(0, 4), max_size=12))
def test_words_keep_their_spaces(ids: list[int]) -> None:
    pieces, _ = shown(Words(), ids)
    assert "".join(pieces) == Words().decode(ids, skip_special_tokens=True)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_a_stop_text_cuts_before_its_first_place(whole: str, stop: list[str]) -> None:
    """The cut is where a reader of the whole text would first see a stop text completed."""
    pieces, stopped = shown(Bytes(), list(whole.encode()), *stop)
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stop if s in whole]
    assert stopped == bool(ends)
    first = min((end for end, _ in ends), default=None)
    cut = min((at for end, at in ends if end == first), default=len(whole))
    assert "".join(pieces) == whole[:cut]


def test_nothing_is_held_back_longer_than_a_stop_text_may_begin() -> None:
    pieces, _ = shown(Bytes(), list(b"xaxab!"), "abc")
    assert pieces == ["x", "", "ax", "", "", "ab!", ""]


def test_bytes_that_are_no_character_are_shown_in_the_end() -> None:
    pieces, _ = shown(Bytes(), [0x61, 0xC3])
    assert pieces == ["a", "", "\ufffd"]
