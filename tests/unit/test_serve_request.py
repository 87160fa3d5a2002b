"""What a client may ask, and what it is told otherwise."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.serve.request import parse_request


def parse(parameters: dict[str, str] | None = None, **body: object):
    return parse_request(json.dumps(body), parameters or {})


def test_a_whole_request_is_read() -> None:
    asked = parse(
        model="any",
        prompt="one two",
        max_tokens=7,
        temperature=0.0,
        n=1,
        stream=True,
        stop=["a", "b"],
        tenant="t",
        conversation="c",
    )
    assert (asked.prompt, asked.messages, asked.max_tokens) == ("one two", None, 7)
    assert (asked.stream, asked.stop) == (True, ("a", "b"))
    assert (asked.tenant, asked.conversation, asked.mapper_id) == ("t", "c", "")


def test_defaults_and_nulls() -> None:
    messages = [{"role": "user", "content": "hi"}]
    asked = parse(messages=messages, stop=None, max_tokens=None, max_completion_tokens=3)
    assert asked.messages == tuple(messages)
    assert (asked.stop, asked.stream, asked.max_tokens) == ((), False, 3)
    assert parse(prompt="a", stop="x").stop == ("x",)
    assert parse(prompt="a").max_tokens is None


def test_hints_of_a_router_name_the_conversation_and_the_map() -> None:
    hints = {"x-vsr-kv-cache-id": "id", "x-vsr-kv-mapper-id": "m", "x-vsr-kv-source-pod": "p:1"}
    assert parse(hints, prompt="a").conversation == "id"
    assert parse(hints, prompt="a").mapper_id == "m"
    assert parse(hints, prompt="a", conversation="own").conversation == "own"
    headers = {"X-VSR-KV-Mapper-Id": "m", "x-Vsr-Kv-Cache-Id": "id", "Accept": "*/*"}
    asked = parse(headers, prompt="a")
    assert (asked.conversation, asked.mapper_id) == ("id", "m")


def test_a_name_that_the_source_would_have_to_keep_has_a_bound() -> None:
    assert parse(prompt="a", tenant="t" * 256).tenant == "t" * 256
    for hints, body in (
        ({}, {"tenant": "t" * 257}),
        ({}, {"conversation": "t" * 257}),
        ({"x-vsr-kv-cache-id": "t" * 257}, {}),
    ):
        with pytest.raises(InputError, match="at most 256 characters, got 257"):
            parse(hints, prompt="a", **body)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "must be a JSON object, got list"),
        ('{"a\\ud800": 1}', "Unknown field"),
        ("{}", "Give the prompt once"),
        ('{"prompt": "a", "messages": []}', "Give the prompt once"),
        ('{"prompt": " \\n"}', "prompt is empty"),
        ('{"prompt": ["a"]}', "`prompt` must be str, got list"),
        ('{"prompt": "a", "top_p": 0.5}', "Unknown field 'top_p'; known are"),
        ('{"prompt": "a", "max_tokens": "5"}', "`max_tokens` must be int, got str"),
        ('{"prompt": "a", "max_tokens": true}', "`max_tokens` must be int, got bool"),
        ('{"prompt": "a", "max_tokens": 0}', "at least 1, got 0"),
        ('{"prompt": "a", "max_tokens": 1, "max_completion_tokens": 1}', "not both"),
        ('{"prompt": "a", "temperature": 0.7}', "must be 0, got 0.7"),
        ('{"prompt": "a", "temperature": NaN}', "must be 0, got nan"),
        ('{"prompt": "a", "n": 2}', "`n` must be 1, got 2"),
        ('{"prompt": "a", "stream": 1}', "`stream` must be bool, got int"),
        ('{"prompt": "a", "stop": [""]}', "none of them empty"),
        ('{"prompt": "a", "stop": [1]}', "`stop` must be a text"),
        ('{"prompt": "a", "stop": ["a","a","a","a","a","a","a","a","a"]}', "at most 8"),
        ('{"messages": []}', "`messages` is empty"),
        ('{"messages": ["hi"]}', "`role` and `content`"),
        ('{"messages": [{"role": "user"}]}', "`role` and `content`"),
        ('{"messages": [{"role": "user", "content": 5}]}', "`role` and `content`"),
        ('{"messages": [{"role": "u", "content": "", "name": "x"}]}', "`role` and `content`"),
    ],
)
def test_what_cannot_be_done_as_asked_is_refused(body: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_request(body, {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
KNOWN = st.sampled_from(["prompt", "messages", "max_tokens", "stop", "n", "stream", "temperature"])


@given(st.dictionaries(KNOWN | st.text(max_size=3), JSON, max_size=5))
def test_any_json_is_read_or_refused_with_a_sentence(body: dict) -> None:
    with contextlib.suppress(InputError):  # and nothing else
        asked = parse_request(json.dumps(body), {})
        assert (asked.prompt is None) != (asked.messages is None)
