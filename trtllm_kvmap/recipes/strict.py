"""A YAML file becomes a frozen dataclass, or a sentence that says which key is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from trtllm_kvmap.errors import InputError, reason

Config = TypeVar("Config")


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping at ``path``. Raises InputError when there is none."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(reason(error).split())
        raise InputError(
            f"{path} cannot be read as YAML ({said}). Give a file of keys with values."
        ) from error
    if not isinstance(content, dict):
        held = "nothing" if content is None else repr(content)
        raise InputError(f"{path} must hold keys with values, got {held}.")
    return content


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``over`` in their places; mappings are merged key by key. Raises
    InputError for a mapping in the place of something else, which would be lost unread.
    """
    both = {key for key in base if isinstance(over.get(key), dict)}
    for key in both:
        if not isinstance(base[key], dict):
            raise InputError(f"{key} must hold keys with values, got {base[key]!r}.")
    return {**base, **over, **{key: merged(base[key], over[key]) for key in both}}


def build(kind: type[Config], content: Any, where: str = "the config") -> Config:
    """The dataclass ``kind`` with exactly the fields it knows, each of its declared type.

    Raises InputError for a key that is unknown or missing and for a value of another type; nothing
    is converted but whole numbers to floats and lists to tuples.
    """
    if not isinstance(content, dict):
        raise InputError(f"{where} must hold keys with values, got {content!r}.")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(map(str, content)) - set(fields))
    if unknown:
        raise InputError(
            f"{where} has the unknown key {unknown[0]!r}; known are {', '.join(fields)}."
        )
    missing = [
        name
        for name, f in fields.items()
        if f.default is f.default_factory is dataclasses.MISSING and name not in content
    ]
    if missing:
        raise InputError(f"{where} needs the key {missing[0]!r}.")
    hints = get_type_hints(kind)
    return kind(
        **{name: _value(hints[name], each, f"{where}: {name}") for name, each in content.items()}
    )


def _value(kind: Any, content: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return build(kind, content, where)  # type: ignore[arg-type]
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind), content, where)
    if get_origin(kind) is Literal:
        if content not in get_args(kind):
            raise InputError(f"{where} must be one of {get_args(kind)}, got {content!r}.")
        return content
    number = kind is float and isinstance(content, int) and not isinstance(content, bool)
    if type(content) is not kind and not number:
        hint = "; YAML reads 1e-3 as text, write 1.0e-3" if kind is float else ""
        raise InputError(f"{where} must be of type {kind.__name__}, got {content!r}{hint}.")
    return float(content) if number else content


def _tuple(kinds: tuple[Any, ...], content: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(content, list):
        raise InputError(f"{where} must be a list, got {content!r}.")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(content)
    if len(kinds) != len(content):
        raise InputError(f"{where} must be a list of {len(kinds)}, got {content!r}.")
    return tuple(_value(kind, each, where) for kind, each in zip(kinds, content, strict=True))
