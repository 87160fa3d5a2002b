"""What the contract refuses, on every backend: one typed error, and not a byte of the pool
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from case_build import Built, build
from cases import CASES, MAX_POSITIONS, VOCABULARY

from trtllm_kvmap.errors import InputError, KvMapError, MismatchError
from trtllm_kvmap.mapper.backends import make_mapper, map_kv
from trtllm_kvmap.mapper.contract import Span
from trtllm_kvmap.mapper.pool import KvPool

CASE = next(case for case in CASES if case.id == "slice-with-own-layer-0")


def span_with(**changes: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Built], Built]:
    """Change fields of the span; a function gets the good value."""

    def change(built: Built) -> Built:
        new = {name: edit(getattr(built.span, name)) for name, edit in changes.items()}
        return replace(built, span=replace(built.span, **new))

    return change


def put(index: int, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    return edit


def twice(slots: torch.Tensor) -> torch.Tensor:
    return torch.cat([slots[:-1], slots[:1]])


def without_a_layer(pool: KvPool) -> KvPool:
    return replace(pool, keys=pool.keys[1:], values=pool.values[1:])


def without_a_head(pool: KvPool) -> KvPool:
    keys, values = ([view[:, 1:] for view in views] for views in (pool.keys, pool.values))
    return replace(pool, keys=tuple(keys), values=tuple(values))


def on_meta(pool: KvPool) -> KvPool:
    keys, values = ([view.to("meta") for view in views] for views in (pool.keys, pool.values))
    return replace(pool, keys=tuple(keys), values=tuple(values))


REFUSED: dict[str, tuple[Callable[[Built], Built], type[KvMapError], str]] = {
    "source layers": (
        lambda b: replace(b, source=without_a_layer(b.source)),
        MismatchError,
        r"source pool holds .* = \(2, 2, 32\); the map needs \(3, 2, 32\)",
    ),
    "target layers": (
        lambda b: replace(b, target=without_a_layer(b.target)),
        MismatchError,
        r"target pool holds .* = \(3, 3, 64\); the map needs \(4, 3, 64\)",
    ),
    "target heads": (
        lambda b: replace(b, target=without_a_head(b.target)),
        MismatchError,
        "target pool",
    ),
    "two devices": (
        lambda b: replace(b, source=on_meta(b.source)),
        MismatchError,
        "meta and cpu; put both on one device",
    ),
    "source slots int32": (span_with(source_slots=torch.Tensor.int), InputError, "int32"),
    "target slots int32": (span_with(target_slots=torch.Tensor.int), InputError, "int32"),
    "positions int32": (span_with(positions=torch.Tensor.int), InputError, "positions must be"),
    "positions 0-D": (span_with(positions=lambda p: p[0]), InputError, "positions must be"),
    "positions 2-D": (span_with(positions=lambda p: p[:, None]), InputError, "positions must be"),
    "source slots too few": (span_with(source_slots=lambda s: s[1:]), InputError, "source_slots"),
    "target slots too few": (span_with(target_slots=lambda s: s[1:]), InputError, "target_slots"),
    "source slot beyond": (span_with(source_slots=put(3, 10**6)), InputError, "slots 0 to"),
    "target slot beyond": (span_with(target_slots=put(3, 10**6)), InputError, "slots 0 to"),
    "source slot -2": (span_with(source_slots=put(3, -2)), InputError, "-1 skips"),
    "target slot -2": (span_with(target_slots=put(3, -2)), InputError, "-1 skips"),
    "target slot twice": (span_with(target_slots=twice), InputError, "named twice"),
    "position beyond": (span_with(positions=put(-1, MAX_POSITIONS)), InputError, "8191"),
    "position negative": (span_with(positions=put(0, -1)), InputError, "positions reach from -1"),
    "token ids missing": (span_with(token_ids=lambda _: None), InputError, "give token_ids"),
    "token ids too few": (span_with(token_ids=lambda t: t[1:]), InputError, "give token_ids"),
    "token ids int32": (span_with(token_ids=torch.Tensor.int), InputError, "give token_ids"),
    "token id beyond": (span_with(token_ids=put(2, VOCABULARY)), InputError, "knows 0 to 18"),
    "token id negative": (span_with(token_ids=put(2, -1)), InputError, "from -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(backend: str, name: str) -> None:
    spoil, error, message = REFUSED[name]
    good = build(CASE)
    before = good.target_memory.view(torch.uint8).clone()
    bad = spoil(good)
    with pytest.raises(error, match=message):
        map_kv(bad.kvmap, bad.source, bad.target, bad.span, backend)
    assert torch.equal(good.target_memory.view(torch.uint8), before)


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_length_dependent_rope_needs_its_length(backend: str, kind: str, side: str) -> None:
    built = build(next(case for case in CASES if case.id == f"rope-{kind}-{side}"))
    before = built.target_memory.view(torch.uint8).clone()
    short = replace(built.span, **{f"{side}_length": 42})
    with pytest.raises(InputError, match=f"give {side}_length, at least 43 tokens"):
        map_kv(built.kvmap, built.source, built.target, short, backend)
    assert torch.equal(built.target_memory.view(torch.uint8), before)


def test_one_memory_for_both_pools_is_refused(backend: str) -> None:
    copy = next(case for case in CASES if case.id == "copy")
    built = build(replace(copy, target=replace(copy.target, layers=copy.source.layers)))
    before = built.target_memory.view(torch.uint8).clone()
    with pytest.raises(MismatchError, match="same memory"):
        map_kv(built.kvmap, built.target, built.target, built.span, backend)
    assert torch.equal(built.target_memory.view(torch.uint8), before)


def test_an_unknown_backend_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'metal'.*cpu, cuda, reference"):
        make_mapper(build(CASE).kvmap, "metal")


def test_a_span_without_tokens_needs_no_room(backend: str) -> None:
    none = torch.empty(0, dtype=torch.int64)
    built = build(CASE)
    map_kv(built.kvmap, built.source, built.target, Span(none, none, none, none), backend)
