"""What a client may ask: the OpenAI request shape, decoded greedily, one choice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_kvmap.errors import InputError

MAX_STOPS = 8
LONGEST_NAME = 256  # of a tenant or a conversation: the source keeps them with what it has read
# Hints of vllm-project/semantic-router's contract for cross-model KV reuse, as Triton hands request
# headers (as the client spells them) and parameters to a model. The third, x-vsr-kv-source-pod,
# names a host to fetch from; this pipeline reads with its own source.
CACHE_ID, MAPPER_ID = "x-vsr-kv-cache-id", "x-vsr-kv-mapper-id"
FIELDS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "prompt": (str,),
    "messages": (list,),
    "max_tokens": (int,),
    "max_completion_tokens": (int,),
    "temperature": (int, float),
    "n": (int,),
    "stream": (bool,),
    "stop": (str, list),
    "tenant": (str,),
    "conversation": (str,),
    "consent": (bool,),
}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request, checked. Either ``prompt`` or ``messages`` is there; ``max_tokens`` None means
    as many as the server gives. ``tenant`` and ``conversation`` say whose source cache may be
    extended; ``mapper_id`` is the map the client expects (empty: whichever is served). ``consent``:
    whoever wrote the prompt, all of it, agrees that it is counted where traffic is; it then needs a
    conversation.
    """

    prompt: str | None
    messages: tuple[dict[str, str], ...] | None
    max_tokens: int | None
    stream: bool
    stop: tuple[str, ...]
    tenant: str
    conversation: str
    mapper_id: str
    consent: bool = False


def parse_request(body: str | bytes, parameters: Mapping[str, Any]) -> CompletionRequest:
    """Read a JSON body and the request's parameters. Raises InputError with one sentence for
    anything that cannot be carried out exactly as asked; a field that is null counts as absent.
    """
    hints = {name.lower(): str(value) for name, value in parameters.items()}
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"The request is not JSON: {error}. Send one JSON object.") from error
    if not isinstance(given, dict):
        raise InputError(f"The request must be a JSON object, got {type(given).__name__}.")
    given = {name: value for name, value in given.items() if value is not None}
    _check_types(given)
    _check_greedy(given)
    if ("prompt" in given) == ("messages" in given):
        raise InputError("Give the prompt once: either `prompt`, a text, or `messages`, a list.")
    if "prompt" in given and not given["prompt"].strip():
        raise InputError("The prompt is empty; give some text.")
    return CompletionRequest(
        prompt=given.get("prompt"),
        messages=_messages(given["messages"]) if "messages" in given else None,
        max_tokens=_max_tokens(given),
        stream=given.get("stream", False),
        stop=_stops(given.get("stop", [])),
        tenant=_name("tenant", given.get("tenant", "")),
        conversation=_name("conversation", given.get("conversation") or hints.get(CACHE_ID, "")),
        mapper_id=hints.get(MAPPER_ID, ""),
        consent=given.get("consent", False),
    )


def _check_types(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name not in FIELDS:
            raise InputError(f"Unknown field {name[:60]!r}; known are {', '.join(FIELDS)}.")
        kinds = FIELDS[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise InputError(f"`{name}` must be {wanted}, got {type(value).__name__}.")


def _check_greedy(given: dict[str, Any]) -> None:
    if given.get("temperature", 0) != 0:
        raise InputError(
            f"Decoding is greedy: `temperature` must be 0, got {given['temperature']}."
        )
    if given.get("n", 1) != 1:
        raise InputError(f"Greedy decoding has one answer: `n` must be 1, got {given['n']}.")


def _max_tokens(given: dict[str, Any]) -> int | None:
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise InputError("Give `max_tokens` or `max_completion_tokens`, not both.")
    count = given.get("max_tokens", given.get("max_completion_tokens"))
    if count is not None and count < 1:
        raise InputError(f"`max_tokens` must be at least 1, got {count}.")
    return count


def _messages(messages: list[Any]) -> tuple[dict[str, str], ...]:
    for message in messages:
        if not (
            isinstance(message, dict)
            and set(message) == {"role", "content"}
            and all(isinstance(text, str) for text in message.values())
        ):
            raise InputError(
                "Every one of `messages` needs `role` and `content`, both text, and nothing else."
            )
    if not messages:
        raise InputError("`messages` is empty; give at least one.")
    return tuple(messages)


def _name(field: str, name: str) -> str:
    if len(name) > LONGEST_NAME:
        raise InputError(
            f"`{field}` may have at most {LONGEST_NAME} characters, got {len(name)}; send a digest."
        )
    return name


def _stops(stop: str | list[Any]) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS or not all(isinstance(text, str) and text for text in stops):
        raise InputError(f"`stop` must be a text or at most {MAX_STOPS} texts, none of them empty.")
    return tuple(stops)
