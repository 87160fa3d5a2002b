"""What the two ends say to each other, as bounded JSON that is parsed strictly.

An unknown message, a missing or an extra entry, a wrong type, or a number out of bounds is a
MalformedMessageError: nothing of a message is used unless all of it is right.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.errors import KvMapError
from trtllm_kvmap.spec.layout import KvLayout, trtllm_layout

PROTOCOL = 2
MAX_MESSAGE_BYTES = 1 << 20
MAX_BLOCKS_PER_MESSAGE = 8192
MAX_DETAIL = 500
MAX_LOSSES = 1024  # of each list in an offer
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
_LARGEST = 1 << 31  # of any count
_ADDRESS = 1 << 64


class MalformedMessageError(KvMapError):
    """The other end said something that this protocol does not allow."""


class Reason(str, Enum):
    """Why an exchange ended. All but COMPLETE mean that the target reads the prompt itself."""

    COMPLETE = "complete"
    WRONG_REQUEST = "wrong_request"
    WRONG_MODEL = "wrong_model"
    WRONG_TOKENS = "wrong_tokens"
    WRONG_LAYOUT = "wrong_layout"
    UNSUPPORTED = "unsupported"
    NO_MEMORY = "no_memory"
    TIMEOUT = "timeout"
    PEER_LOST = "peer_lost"
    CANCELLED = "cancelled"
    CORRUPTED = "corrupted"
    MALFORMED = "malformed"
    TRANSFER_FAILED = "transfer_failed"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a transport finds a pool: block b lies ``b * block_bytes`` behind ``base``.

    ``device`` is a GPU's ordinal, -1 for host memory. ``token`` is the transport's own: an agent's
    metadata, a memory handle, a name.
    """

    transport: str
    base: int
    device: int
    token: bytes


@dataclass(frozen=True, slots=True)
class Recall:
    """What the source knows by the prompt alone: the tokens at the positions ``asked``, with its
    ``losses`` of each when they are asked for again, and those of the offer's losses that have
    their places in ``known``.
    """

    asked: tuple[int, ...]
    losses: tuple[float, ...]
    known: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """The source has read ``num_tokens`` tokens whose ids have ``token_digest``.

    ``layout`` and ``dtype`` describe its whole pool, in TensorRT-LLM's order of blocks;
    ``rope_length`` is the sequence length that its keys were rotated for. The target may read for
    ``lease_ms`` after it accepted. For a target whose map carries a guard, ``losses`` are the
    source's, in nats, of as many of the last tokens, and ``recall`` is what it knows of the prompt.
    """

    request_id: str
    source: Fingerprint
    num_tokens: int
    token_digest: str
    rope_length: int
    layout: KvLayout
    dtype: str
    key_scale: float
    value_scale: float
    checksum: str
    lease_ms: int
    address: Address
    losses: tuple[float, ...] = ()
    recall: Recall | None = None

    @property
    def num_blocks(self) -> int:
        """How many blocks will travel."""
        return -(-self.num_tokens // self.layout.tokens_per_block)


@dataclass(frozen=True, slots=True)
class Accept:
    request_id: str


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks ``first`` .. of the offer are ready to be read from ``block_ids`` of the source's
    pool, and have these ``checksums`` (64-bit)."""

    request_id: str
    first: int
    block_ids: tuple[int, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The sender is done. From the target: it reads no block of the source any more (a refusal,
    when it never did). From the source: it wants its blocks back, and waits for the target's End.
    """

    request_id: str
    reason: Reason
    detail: str


Message = Offer | Accept | Blocks | End
_KINDS: dict[str, type[Message]] = {"offer": Offer, "accept": Accept, "blocks": Blocks, "end": End}
_RECALL = ("asked", "losses", "known")
_LAYOUT = ("num_blocks", "num_layers", "num_kv_heads", "tokens_per_block", "head_dim")


def encode(message: Message) -> bytes:
    """UTF-8 JSON of at most MAX_MESSAGE_BYTES."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(message, cls))
    entry: dict[str, Any] = {"kind": kind, "protocol": PROTOCOL}
    for field in fields(message):
        entry[field.name] = _plain(getattr(message, field.name))
    if isinstance(message, Blocks):
        entry["checksums"] = [f"{checksum:016x}" for checksum in message.checksums]
    return json.dumps(entry, separators=(",", ":")).encode()


def decode(data: bytes) -> Message:
    """The message in ``data``. Raises MalformedMessageError."""
    try:
        entry = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError(
            f"A message of {len(data)} bytes is not JSON ({str(error)[:80]}); the other end "
            f"speaks another protocol."
        ) from error
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        raise MalformedMessageError("A message must be an object with a kind.")
    kind, protocol = entry.pop("kind"), entry.pop("protocol", None)
    if type(protocol) is not int or protocol != PROTOCOL or kind not in _KINDS:
        raise MalformedMessageError(
            f"A message of kind {kind[:40]!r} and protocol {str(protocol)[:40]}; this end knows "
            f"{', '.join(_KINDS)} of protocol {PROTOCOL}. Run one version on both sides."
        )
    cls = _KINDS[kind]
    message = cls(**_parsed(entry, {f.name: _PARSERS[f.name] for f in fields(cls)}))
    if isinstance(message, Blocks) and len(message.checksums) != len(message.block_ids):
        raise MalformedMessageError("A blocks message needs one checksum for each block.")
    if isinstance(message, Offer) and message.recall is not None:
        told = message.recall
        if len(told.asked) != len(told.losses):
            raise MalformedMessageError("A recall needs one loss for each token asked for.")
        if max(told.asked, default=0) >= message.num_tokens:
            raise MalformedMessageError("A recall asks for a token that is not offered.")
        if max(told.known, default=-1) >= len(message.losses):
            raise MalformedMessageError("A recall knows a loss that is not sent.")
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, Fingerprint):
        return value.to_json()
    if isinstance(value, KvLayout):
        return {name: getattr(value, name) for name in _LAYOUT}
    if isinstance(value, Address):
        token = base64.b64encode(value.token).decode()
        return {name: getattr(value, name) for name in ("transport", "base", "device")} | {
            "token": token
        }
    if isinstance(value, Recall):
        return {name: getattr(value, name) for name in _RECALL}
    return value.value if isinstance(value, Reason) else value


Parser = Callable[[Any], Any]


def _parsed(entry: Any, parsers: dict[str, Parser]) -> dict[str, Any]:
    if not isinstance(entry, dict) or entry.keys() != parsers.keys():
        given = sorted(str(key)[:40] for key in entry)[:20] if isinstance(entry, dict) else "none"
        raise MalformedMessageError(f"Entries {given} were given; {sorted(parsers)} are needed.")
    found = {}
    for name, parse in parsers.items():
        try:
            found[name] = parse(entry[name])
        except (ValueError, TypeError, OverflowError, binascii.Error) as error:
            raise MalformedMessageError(
                f"The entry {name} is {str(entry[name])[:80]!r}: {error}."
            ) from error
    return found


def _whole(low: int, high: int) -> Parser:
    def parse(value: Any) -> int:
        if type(value) is not int or not low <= value < high:
            raise ValueError(f"a whole number from {low} to {high - 1} is needed")
        return value

    return parse


def _text(pattern: str) -> Parser:
    def parse(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.DOTALL):
            raise ValueError(f"text of the form {pattern} is needed")
        return value

    return parse


def _many(parse_one: Parser, low: int = 1, high: int = MAX_BLOCKS_PER_MESSAGE) -> Parser:
    def parse(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not low <= len(value) <= high:
            raise ValueError(f"a list of {low} to {high} is needed")
        return tuple(parse_one(one) for one in value)

    return parse


def _scale(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise ValueError("a positive number is needed")
    return float(value)


def _loss(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("a number of nats is needed")
    return float(value)


def _recall(value: Any) -> Recall | None:
    places, losses = _few(_whole(0, _LARGEST)), _few(_loss)
    parsers = dict(zip(_RECALL, (places, losses, places), strict=True))
    return None if value is None else Recall(**_parsed(value, parsers))


def _few(parse_one: Parser) -> Parser:
    return _many(parse_one, 0, MAX_LOSSES)


def _token(value: Any) -> bytes:
    return base64.b64decode(_text(r".{0,65536}")(value), validate=True)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


_hex64 = _text(r"[0-9a-f]{64}")
_hex16 = _text(r"[0-9a-f]{16}")
_name = _text(r"[A-Za-z0-9_.-]{1,64}")
_count = _whole(1, _LARGEST)
_PARSERS: dict[str, Parser] = {
    "request_id": _name,
    "source": lambda v: Fingerprint(
        **_parsed(v, dict.fromkeys(("config", "weights", "tokenizer"), _hex64))
    ),
    "num_tokens": _count,
    "token_digest": _hex64,
    "rope_length": _count,
    "layout": lambda v: trtllm_layout(**_parsed(v, dict.fromkeys(_LAYOUT, _count))),
    "dtype": _text("|".join(DTYPE_BYTES)),
    "key_scale": _scale,
    "value_scale": _scale,
    "checksum": _name,
    "lease_ms": _count,
    "address": lambda v: Address(
        **_parsed(
            v,
            {
                "transport": _name,
                "base": _whole(0, _ADDRESS),
                "device": _whole(-1, 1024),
                "token": _token,
            },
        )
    ),
    "losses": _few(_loss),
    "recall": _recall,
    "first": _whole(0, _LARGEST),
    "block_ids": _many(_whole(0, _LARGEST)),
    "checksums": _many(lambda v: int(_hex16(v), 16)),
    "reason": lambda v: Reason(v),
    "detail": _text(rf".{{0,{MAX_DETAIL}}}"),
}
