"""Specs and slices as JSON, for file headers and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trtllm_kvmap.errors import FormatError, InputError
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.rope import RopeParams
from trtllm_kvmap.spec.slices import Slice


def spec_to_json(spec: ModelSpec) -> dict[str, Any]:
    return asdict(spec)


def spec_from_json(entry: dict[str, Any]) -> ModelSpec:
    try:
        rope = dict(entry["rope"])
        for name in ("short_factor", "long_factor"):
            rope[name] = tuple(rope[name])
        return ModelSpec(**{**entry, "rope": RopeParams(**rope)})
    except (KeyError, TypeError, InputError) as error:
        raise FormatError(f"A model spec in the file cannot be read: {error}.") from error


def slices_to_json(slices: Sequence[Slice]) -> list[list[Any]]:
    return [[s.origin, s.field, s.layer, s.head] for s in slices]


def slices_from_json(entries: Sequence[Sequence[Any]]) -> tuple[Slice, ...]:
    return tuple(Slice(*entry) for entry in entries)
