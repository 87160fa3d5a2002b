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
    MAX_LOSSES,
    MAX_MESSAGE_BYTES,
    Accept,
    Address,
    Blocks,
    End,
    MalformedMessageError,
    Message,
    Reason,
    Recall,
    decode,
    encode,
)

OFFER = offer_of(make_pool(9), InProcessTransport())
JUDGED = replace(OFFER, losses=(0.1, 2 / 3, 0.0), recall=Recall((4, 17), (0.25, 1e-9), (0, 2)))
LARGEST_ADDRESS = Address("nixl", (1 << 64) - 1, 1023, bytes(range(256)) * 100)
MESSAGES: dict[str, Message] = {
    "offer": OFFER,
    "offer of a GPU": replace(OFFER, address=LARGEST_ADDRESS, key_scale=0.5, dtype="bfloat16"),
    "offer to a guard": JUDGED,
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
    longest = (-1.2345678901234567e-300,) * MAX_LOSSES
    recall = Recall(((1 << 31) - 2,) * MAX_LOSSES, longest, (MAX_LOSSES - 1,) * MAX_LOSSES)
    offer = MESSAGES["offer of a GPU"]
    judged = replace(offer, num_tokens=(1 << 31) - 1, losses=longest, recall=recall)
    for message in (blocks, end, offer, judged):
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
# What is right where it is put: a free text, a name, base64, a scale, the host as a device, losses.
RIGHT: dict[str, tuple[Any, ...]] = {
    "detail": ("", "1"),
    "request_id": ("1",),
    "checksum": ("1",),
    "transport": ("1",),
    "token": ("", "x" * 600),
    "key_scale": (1.5, 1 << 70),
    "value_scale": (1.5, 1 << 70),
    "device": (-1,),
    "recall": (None,),
    "known": ([],),
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
        elif wrong in RIGHT.get(str(place[-1]), ()) or right_loss(name, place, wrong):
            continue
        else:
            at[place[-1]] = wrong
        with pytest.raises(MalformedMessageError):
            decode(json.dumps(entry).encode())


def right_loss(name: str, place: tuple[Any, ...], value: Any) -> bool:
    """Any number is a loss, and an offer without a recall need not have any."""
    if place == ("losses",) and name != "offer to a guard":
        return bool(value == [])
    return place[-2:-1] == ("losses",) and type(value) in (int, float)


def test_a_number_too_large_for_any_float_is_malformed() -> None:
    for place in ("key_scale", "value_scale", "losses"):
        entry = json.loads(encode(OFFER))
        entry[place] = [10**400] if place == "losses" else 10**400
        with pytest.raises(MalformedMessageError, match=place):
            decode(json.dumps(entry).encode())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"asked": [4]}, "one loss for each"),
        ({"losses": [0.25]}, "one loss for each"),
        ({"asked": [4, 18]}, "not offered"),
        ({"known": [3]}, "not sent"),
    ],
)
def test_a_recall_is_of_what_is_offered(changed: dict[str, Any], said: str) -> None:
    entry = json.loads(encode(JUDGED))
    entry["recall"] |= changed
    with pytest.raises(MalformedMessageError, match=said):
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
        b'{"kind":"accept","protocol":2,"request_id":"r1"',
        b'{"kind":"accept","protocol":1,"request_id":"r1"}',
        b'{"kind":"end","protocol":2,"request_id":"r1","reason":"complete","detail":NaN}',
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
