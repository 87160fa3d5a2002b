"""A conversation as a file: every model's cache with its provenance, to go on somewhere else.

safetensors with a JSON header (artifact/FORMAT.md), never pickle. What is read is checked whole
before a session is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch

from trtllm_kvmap.artifact.container import read_container, write_container
from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.hop import Hop, HopGuard, Outcome
from trtllm_kvmap.decode.prompt import require_tokens
from trtllm_kvmap.decode.session.held import Held
from trtllm_kvmap.decode.session.session import Session
from trtllm_kvmap.errors import FormatError, InputError, MismatchError
from trtllm_kvmap.inject.hf_cache import (
    Pass,
    make_cache,
    put_span,
    record_pass,
    recorded_passes,
    view_pool,
)
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.models import LoadedModel

KIND, FORMAT_VERSION = "session", 1
ENTRIES = {"models", "active", "token_ids", "reply", "hops", "held"}


def save_session(session: Session, path: str | Path) -> str:
    """Write ``session`` to ``path``, whole or not at all; returns the digest. Standbys, the guard
    and the budget are not of the conversation and stay behind; nor is it told who agreed to what,
    so that traffic counts nothing of a session that was loaded.
    """
    tensors: dict[str, torch.Tensor] = {}
    held: dict[str, Any] = {}
    for name, own in session.held.items():
        if not own.entries:
            continue
        pool = view_pool(own.cache)
        tensors[f"{name}.keys"] = torch.cat(pool.keys)
        tensors[f"{name}.values"] = torch.cat(pool.values)
        if own.logits is not None:
            tensors[f"{name}.logits"] = own.logits
        held[name] = {
            "exact": own.exact,
            "mapped": [[m.start, m.stop] for m in own.mapped],
            "passes": [list(written) for written in recorded_passes(own.cache)],
        }
    content = {
        "models": {name: m.fingerprint.to_json() for name, m in session.models.items()},
        "active": session.active,
        "token_ids": session.token_ids,
        "reply": [session.reply.start, session.reply.stop],
        "hops": [asdict(hop) for hop in session.hops],
        "held": held,
    }
    return write_container(path, KIND, FORMAT_VERSION, content, tensors)


def load_session(
    path: str | Path,
    models: Mapping[str, LoadedModel],
    bridges: Sequence[KvBridge],
    *,
    guard: HopGuard | None = None,
    max_mapped_tokens: int | None = None,
) -> Session:
    """The session that save_session wrote, over ``models`` of the same names; it goes on bit for
    bit as the saved one would.

    Raises FormatError for a file that is damaged or says what cannot be, MismatchError when a model
    of it is missing or is another one (configuration, weights or tokenizer), and what Session
    raises.
    """
    content, tensors = read_container(path, KIND, FORMAT_VERSION)
    session = Session(models, bridges, guard=guard, max_mapped_tokens=max_mapped_tokens)
    try:
        _require(set(content) == ENTRIES, f"its entries must be {', '.join(sorted(ENTRIES))}")
        _check_models(content["models"], session)
        _fill(session, content, tensors)
    except (AttributeError, InputError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{path} is no whole session ({error}). Save the session again."
        ) from error
    return session


def _check_models(fingerprints: dict[str, Any], session: Session) -> None:
    for name, entry in fingerprints.items():
        if name not in session.models:
            raise MismatchError(
                f"The conversation has a model {name!r}, and none of that name was given; give "
                f"{', '.join(fingerprints)}."
            )
        saved, given = Fingerprint.from_json(entry), session.models[name].fingerprint
        differing = [part for part, digest in entry.items() if given.to_json()[part] != digest]
        if saved != given:
            raise MismatchError(
                f"The model {name!r} of the conversation is another one than was given: its "
                f"{' and '.join(differing)} differ. Give the model that took part in it."
            )


def _fill(session: Session, content: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    token_ids = content["token_ids"]
    _require(all(type(token) is int for token in token_ids), "token ids must be integers")
    _require(content["active"] in content["models"], "its active model is none of its models")
    _require(
        set(content["held"]) <= set(content["models"]), "a cache belongs to none of its models"
    )
    reply = range(*_integers(content["reply"], 2))
    _require(0 <= reply.start <= reply.stop <= len(token_ids), "the reply lies outside the tokens")
    for name in content["models"] if token_ids else ():
        require_tokens(session.models[name], torch.tensor(token_ids))
    session.active, session.token_ids, session.reply = content["active"], token_ids, reply
    session.hops = [_hop(hop) for hop in content["hops"]]
    for name, entry in content["held"].items():
        own = {
            part: tensors.pop(f"{name}.{part}")
            for part in ("keys", "values", "logits")
            if part != "logits" or f"{name}.logits" in tensors
        }
        session.held[name] = _held(session.models[name], entry, own, len(token_ids))
    _require(not tensors, f"{', '.join(tensors)} belong to nothing")


def _held(
    loaded: LoadedModel, entry: dict[str, Any], own: dict[str, torch.Tensor], num_tokens: int
) -> Held:
    _require(set(entry) == {"exact", "mapped", "passes"}, "a cache says too little or too much")
    layers, heads, head_dim = loaded.spec.kv_shape
    keys, values, logits = own["keys"], own["values"], own.get("logits")
    entries = keys.shape[2] if keys.ndim == 4 else 0
    _require(
        keys.shape == values.shape == (layers, heads, entries, head_dim)
        and 0 < entries <= num_tokens,
        f"a cache has the shape {list(keys.shape)}; {loaded.name} needs [{layers}, {heads}, at "
        f"most {num_tokens}, {head_dim}]",
    )
    _require(logits is None or logits.shape == (loaded.spec.vocab_size,), "logits do not fit")
    for part, tensor in own.items():
        wanted = torch.float32 if part == "logits" else loaded.model.dtype
        _require(tensor.dtype == wanted, f"{part} are {tensor.dtype}, needed is {wanted}")
        _require(bool(torch.isfinite(tensor).all()), f"{part} hold NaN or infinity")
    (exact,) = _integers([entry["exact"]], 1)
    mapped = tuple(range(*_integers(pair, 2)) for pair in entry["mapped"])
    ends = [exact, *(end for m in mapped for end in (m.start, m.stop)), entries]
    _require(exact >= 0 and ends == sorted(ends) and all(mapped), "mapped ranges do not fit")
    cache = make_cache(loaded.spec, entries, dtype=loaded.model.dtype, device=loaded.device)
    put_span(
        cache,
        0,
        KvPool(keys.to(loaded.device).chunk(layers), values.to(loaded.device).chunk(layers)),
    )
    for first, last, length in (_integers(written, 3) for written in entry["passes"]):
        _require(0 <= first <= last <= entries and length > 0, "a pass does not fit")
        record_pass(cache, Pass(first, last, length))
    return Held(cache, exact, mapped, None if logits is None else logits.to(loaded.device))


def _hop(entry: dict[str, Any]) -> Hop:
    hop = Hop(**entry)
    _integers([hop.num_tokens, hop.kept, hop.exact, hop.mapped], 4)
    _require(hop.outcome in get_args(Outcome), f"{hop.outcome!r} is no outcome of a switch")
    return hop


def _integers(values: list[Any], count: int) -> list[int]:
    _require(
        len(values) == count and all(type(value) is int for value in values),
        f"{values} must be {count} integers",
    )
    return values


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why)
