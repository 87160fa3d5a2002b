"""Messages come back as they were, and nothing else is taken for one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from exchange_cases import make_pool, offer_of
from hypothesis import given
from hypothesis import strategies as st

from trtllm_kvmap.exchange.in_process import InProcessTransport
from trtllm_kvmap.exchange.messages import (
    MAX_BLOCKS_PER_MESSAGE,
    MAX_DETAIL,
    MAX_MESSAGE_BYTES,
    Accept,
    Address,
    Blocks,
    End,
    MalformedMessageError,
    Message,
    Reason,
    decode,
    encode,
)

OFFER = offer_of(make_pool(9), InProcessTransport())
LARGEST_ADDRESS = Address("nixl", (1 << 64) - 1, 1023, bytes(range(256)) * 100)
MESSAGES: dict[str, Message] = {
    "offer": OFFER,
    "offer of a GPU": replace(OFFER, address=LARGEST_ADDRESS, key_scale=0.5, dtype="bfloat16"),
    "accept": Accept("r1"),
    "blocks": Blocks("r1", 3, (0, 2), (0, (1 << 64) - 1)),
    "end": End("r1", Reason.CORRUPTED, "a block's checksum\n does not fit"),
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    assert decode(encode(message)) == message


def test_the_largest_messages_fit() -> None:
    ids = range((1 << 31) - MAX_BLOCKS_PER_MESSAGE, (1 << 31))
    blocks = Blocks("r" * 64, 0, tuple(ids), ((1 << 64) - 1,) * len(ids))
    end = End("r" * 64, Reason.TRANSFER_FAILED, "\U0001f600" * MAX_DETAIL)
    for message in (blocks, end, MESSAGES["offer of a GPU"]):
        assert len(encode(message)) <= MAX_MESSAGE_BYTES
        assert decode(encode(message)) == message


def places(entry: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON value."""
    inner = entry.items() if isinstance(entry, dict) else ()
    if isinstance(entry, list):
        inner = enumerate(entry)
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


EVERY_PLACE = [
    (name, place)
    for name, message in MESSAGES.items()
    for place in places(json.loads(encode(message)))
]
WRONG = [None, True, -1, 1.5, 1 << 70, "", "x" * 600, "1", [], {}, [[]], {"kind": "end"}]
# What is right where it is put: a free text, a name, base64, a scale, the host as a device.
RIGHT: dict[str, tuple[Any, ...]] = {
    "detail": ("", "1"),
    "request_id": ("1",),
    "checksum": ("1",),
    "transport": ("1",),
    "token": ("", "x" * 600),
    "key_scale": (1.5, 1 << 70),
    "value_scale": (1.5, 1 << 70),
    "device": (-1,),
}


@pytest.mark.parametrize(("name", "place"), EVERY_PLACE, ids=str)
def test_one_wrong_entry_anywhere_is_malformed(name: str, place: tuple[Any, ...]) -> None:
    for wrong in WRONG:
        entry = json.loads(encode(MESSAGES[name]))
        at = entry
        for key in place[:-1]:
            at = at[key]
        if not place:
            entry = wrong
        elif wrong in RIGHT.get(str(place[-1]), ()):
            continue
        else:
            at[place[-1]] = wrong
        with pytest.raises(MalformedMessageError):
            decode(json.dumps(entry).encode())


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 65, "é", "r1\n"])
def test_a_name_is_a_name(name: str) -> None:
    with pytest.raises(MalformedMessageError):
        decode(encode(Accept(name)))


@pytest.mark.parametrize("name", MESSAGES)
def test_a_missing_and_an_extra_entry_are_malformed(name: str) -> None:
    whole = json.loads(encode(MESSAGES[name]))
    for key in whole:
        with pytest.raises(MalformedMessageError):
            decode(json.dumps({k: v for k, v in whole.items() if k != key}).encode())
    with pytest.raises(MalformedMessageError):
        decode(json.dumps({**whole, "more": 1}).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"kind":"accept","protocol":1,"request_id":"r1"',
        b'{"kind":"accept","protocol":2,"request_id":"r1"}',
        b'{"kind":"end","protocol":1,"request_id":"r1","reason":"complete","detail":NaN}',
        encode(OFFER).replace(b'"key_scale":1.0', b'"key_scale":NaN'),
        encode(OFFER).replace(b'"key_scale":1.0', b'"key_scale":1e999'),
        encode(OFFER).replace(b'"key_scale":1.0', b'"key_scale":0'),
        encode(MESSAGES["blocks"]).replace(b"[0,2]", b"[0,2,4]"),
    ],
    ids=range(10),
)
def test_other_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        decode(data)


@given(st.binary(max_size=300))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        decode(data)


@given(st.sampled_from(list(MESSAGES.values())), st.data())
def test_a_damaged_message_is_malformed_or_a_message(message: Message, data: st.DataObject) -> None:
    whole = bytearray(encode(message))
    where = data.draw(st.integers(0, len(whole) - 1))
    whole[where] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(decode(bytes(whole)), type(message))
    except MalformedMessageError:
        return
