"""What becomes a document, and every way in which text can be unusable."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trtllm_kvmap.calibrate.text import read_documents, shared_prefix, text_digest
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.tiny.documents import TOKEN_ID, VOCABULARY

SIZE = len(VOCABULARY)


@pytest.fixture
def loaded(random_model: Callable[..., LoadedModel]) -> LoadedModel:
    return random_model()


def ids(words: str) -> list[int]:
    return [TOKEN_ID[word] for word in words.split()]


def read(path: Path, loaded: LoadedModel, least: int = 2, most: int = 100) -> list[list[int]]:
    return read_documents(path, loaded, min_tokens=least, max_tokens=most)


def test_a_plain_text_file_is_one_document(tmp_path: Path, loaded: LoadedModel) -> None:
    path = tmp_path / "a.txt"
    path.write_text("<bos> after anna ben near\n\nagain after anna ben near\n")
    assert read(path, loaded) == [ids("<bos> after anna ben near again after anna ben near")]


def test_a_byte_order_mark_is_no_text(tmp_path: Path, loaded: LoadedModel) -> None:
    (tmp_path / "a.txt").write_text("after anna ben", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "after anna ben"}', encoding="utf-8-sig")
    assert read(tmp_path, loaded) == [ids("after anna ben")] * 2


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"token_ids":[' + "1" * 5000 + "]}", '{"text": "\\ud800 anna ben"}']
)
def test_lines_that_python_gives_up_on_are_named(
    tmp_path: Path, loaded: LoadedModel, line: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "after anna ben"}\n' + line)
    with pytest.raises(InputError, match=r"a\.jsonl, line 2,"):
        read(tmp_path, loaded)


def test_a_file_that_may_not_be_read_is_a_sentence(
    tmp_path: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(Who runs as root may read everything.)"""

    def refused(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.txt").touch()
    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(InputError, match=r"a\.txt cannot be read \(Permission denied\)"):
        read(tmp_path, loaded)
    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(InputError, match=r"cannot be read \(Permission denied\)"):
        read(tmp_path, loaded)


def test_jsonl_mixes_text_and_token_ids(tmp_path: Path, loaded: LoadedModel) -> None:
    path = tmp_path / "a.jsonl"
    # U+2028 ends a line for str.splitlines, but not in JSON lines.
    lines = [{"text": "after anna\u2028ben near"}, {"token_ids": [3, 1, 4, 1, 5], "note": "kept"}]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    assert read(path, loaded) == [ids("after anna ben near"), [3, 1, 4, 1, 5]]


def test_a_folder_is_its_files_in_the_order_of_names(tmp_path: Path, loaded: LoadedModel) -> None:
    (tmp_path / "b.txt").write_text("anna ben carl")
    (tmp_path / "a.jsonl").write_text('{"token_ids": [1, 2]}\n{"token_ids": [3, 4]}')
    (tmp_path / "inner").mkdir()
    for number in (17, 12, 19, 14, 11, 18, 13, 16, 15):
        (tmp_path / f"c{number}.jsonl").write_text(f'{{"token_ids": [{number}, 5]}}')
    others = [[number, 5] for number in range(11, 20)]
    assert read(tmp_path, loaded) == [[1, 2], [3, 4], ids("anna ben carl"), *others]


def test_long_documents_become_windows(tmp_path: Path, loaded: LoadedModel) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"token_ids": list(range(20, 31))}))
    assert read(path, loaded, 3, 4) == [[20, 21, 22, 23], [24, 25, 26, 27], [28, 29, 30]]
    assert read(path, loaded, 4, 4) == [[20, 21, 22, 23], [24, 25, 26, 27]]
    assert read(path, loaded, 4, 11) == [list(range(20, 31))]


def test_every_window_begins_with_bos_when_the_document_does(
    tmp_path: Path, loaded: LoadedModel
) -> None:
    path, bos = tmp_path / "a.jsonl", TOKEN_ID["<bos>"]
    path.write_text(json.dumps({"token_ids": [bos, *range(20, 29)]}))
    assert read(path, loaded, 3, 4) == [[bos, 20, 21, 22], [bos, 23, 24, 25], [bos, 26, 27, 28]]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", " \n\n", r"a\.txt is empty"),
        ("a.jsonl", "", r"a\.jsonl is empty"),
        ("a.txt", b"anna \xff\xfe", "not UTF-8"),
        ("a.txt", "anna", r"has 1 tokens, and at least 2 are needed in a document\. Take it out"),
        ("a.jsonl", '{"token_ids": []}', "line 1, has 0 tokens"),
        ("a.jsonl", '{"token_ids": [1, 2]}\n\n{"token_ids": [1,', "line 3, is not JSON"),
        ("a.jsonl", '{"body": "anna ben"}', r"line 1, needs .* `text`.*\['body'\]"),
        ("a.jsonl", '"anna ben"', "line 1, needs .* none of these"),
        ("a.jsonl", '{"text": 7}', "line 1, needs"),
        ("a.jsonl", '{"token_ids": [1, true]}', "line 1, needs"),
        ("a.jsonl", '{"token_ids": "1 2", "text": "anna ben"}', "line 1, needs"),
        ("a.jsonl", '{"token_ids": [1, -2]}', "from -2 to 1; qwen3-.* knows 0 to"),
        ("a.jsonl", f'{{"token_ids": [1, {SIZE}]}}', f"to {SIZE}; qwen3-.* knows 0 to {SIZE - 1}"),
    ],
)
def test_unusable_text_is_refused(
    tmp_path: Path, loaded: LoadedModel, name: str, content: str | bytes, reason: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=reason):
        read(path, loaded)


def test_places_without_text_are_refused(tmp_path: Path, loaded: LoadedModel) -> None:
    with pytest.raises(InputError, match="no file or folder"):
        read(tmp_path / "missing", loaded)
    with pytest.raises(InputError, match="holds no file"):
        read(tmp_path, loaded)


def test_text_needs_a_tokenizer_but_token_ids_do_not(tmp_path: Path, loaded: LoadedModel) -> None:
    bare = replace(loaded, tokenizer=None)
    path = tmp_path / "a.jsonl"
    path.write_text('{"token_ids": [1, 2]}')
    assert read(path, bare) == [[1, 2]]
    path.write_text('{"text": "anna ben"}')
    with pytest.raises(InputError, match="has no tokenizer"):
        read(path, bare)


def chatting(loaded: LoadedModel) -> LoadedModel:
    """The same model with a tokenizer that has a chat template: ``<bos> role content near ...``."""
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = (
        "<bos>{% for m in messages %} {{ m['role'] }} {{ m['content'] }} near{% endfor %}"
    )
    return replace(loaded, tokenizer=tokenizer)


def test_messages_are_written_in_the_chat_template(tmp_path: Path, loaded: LoadedModel) -> None:
    path = tmp_path / "a.jsonl"
    chat = [{"role": "so", "content": "after anna"}, {"role": "first", "content": "ben"}]
    path.write_text(json.dumps({"messages": chat}) + "\n" + json.dumps({"token_ids": [5, 6]}))
    documents = read(path, chatting(loaded))
    assert documents == [ids("<bos> so after anna near first ben near"), [5, 6]]
    with pytest.raises(InputError, match=r"line 1, cannot be read\. .* has no chat template"):
        read(path, loaded)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"messages": []}, "line 1, needs .*messages"),
        ({"messages": [{"role": "so"}]}, "line 1, needs .*role.* and .*content"),
        ({"messages": [{"role": "so", "content": "anna"}], "text": "anna"}, None),
        ({"messages": [{"role": "so", "content": "xylophone"}]}, "line 1, cannot be read"),
    ],
)
def test_messages_that_are_none(
    tmp_path: Path, loaded: LoadedModel, entry: dict, reason: str | None
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(entry))
    if reason is None:  # the field text is what was meant before there were messages
        assert read(path, chatting(loaded), 1) == [ids("anna")]
        return
    with pytest.raises(InputError, match=reason):
        read(path, chatting(loaded))


def test_the_digest_sees_every_token_and_every_border() -> None:
    texts = [[[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[1, 2], [4]], [[3], [1, 2]], [[2, 1], [3]]]
    assert len({text_digest(text) for text in texts}) == len(texts)
    assert text_digest(texts[0]) == text_digest(((1, 2), (3,)))


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ([[1, 2, 3, 9], [1, 2, 4, 9]], [1, 2]),
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]], [1, 2, 3, 4]),
        ([[1, 2], [1, 2, 3]], [1, 2]),
        ([[1, 2], [2, 2]], []),
        ([[7, 8, 9]], [7, 8, 9]),
    ],
)
def test_the_shared_prefix(documents: list[list[int]], expected: list[int]) -> None:
    assert shared_prefix(documents, 4) == expected


def test_only_the_first_windows_of_each_document(tmp_path: Path, loaded: LoadedModel) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "<bos> after anna ben near again"}\n{"text": "ben near anna"}\n'
    )
    first = read_documents(tmp_path / "a.jsonl", loaded, min_tokens=2, max_tokens=3, max_windows=1)
    assert first == [ids("<bos> after anna"), ids("ben near anna")]
