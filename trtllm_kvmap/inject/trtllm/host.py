"""The one door to tensorrt_llm: its connector classes, held to signatures.py when this is imported.

Raises UnavailableError, with a sentence for everything that differs, when the package is missing,
too old, or not as it was when the list was written.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

from trtllm_kvmap.errors import UnavailableError
from trtllm_kvmap.inject.trtllm.signatures import (
    CALLS,
    RELEASES,
    REQUEST,
    SALT_ID,
    SCHEDULER,
    WORKER,
    Attributes,
    Method,
    Release,
    release_of,
)


def differences(release: Release) -> Iterator[str]:
    """One sentence for every name of ``release`` that the installed package has otherwise."""
    for method in release.methods:
        yield from _method_difference(method)
    for attributes in release.attributes:
        yield from _attribute_difference(attributes)
    if not _has(REQUEST, "cache_salt"):
        yield from _method_difference(SALT_ID)
    for owner in (SCHEDULER, WORKER):
        ours = {m.name for m in release.methods if m.owner == owner}
        cls = getattr(_module(release.connector.module), owner, None)
        unknown = sorted(getattr(cls, "__abstractmethods__", frozenset()) - ours)
        if unknown:
            yield f"{owner} asks for {', '.join(unknown)}, which this shell does not have"


def caller_differences() -> Iterator[str]:
    """The same for what a program calls that sends requests to an engine."""
    for method in CALLS:
        yield from _method_difference(method, by_keyword=True)


def _method_difference(method: Method, *, by_keyword: bool = False) -> Iterator[str]:
    holder = _module(method.read.module)
    where = f"{method.owner}.{method.name}" if method.owner else method.name
    function = getattr(
        getattr(holder, method.owner, None) if method.owner else holder, method.name, None
    )
    if function is None:
        yield f"{where} is missing from {method.read.module}"
        return
    parameters = inspect.signature(function).parameters
    found = tuple(p for p in parameters if p != "self")
    if not by_keyword and found != method.parameters:
        yield f"{where} takes {_listed(found)}, not {_listed(method.parameters)}"
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    missing = [name for name in method.parameters if name not in found]
    if by_keyword and missing and not anything:
        yield f"{where} does not take {_listed(missing)}"


def _attribute_difference(attributes: Attributes) -> Iterator[str]:
    cls = getattr(_module(attributes.read.module), attributes.owner, None)
    if cls is None:
        yield f"{attributes.owner} is missing from {attributes.read.module}"
        return
    missing = [name for name in attributes.names if not _has(attributes, name)]
    if attributes.one_of and len(missing) < len(attributes.names):
        return
    if missing:
        yield f"{attributes.owner} has no {_listed(missing)}"


def _has(attributes: Attributes, name: str) -> bool:
    cls = getattr(_module(attributes.read.module), attributes.owner, None)
    # Fields of dataclasses and of pydantic models are no class attributes.
    fields = {*getattr(cls, "__dataclass_fields__", ()), *getattr(cls, "model_fields", ())}
    return name in fields or hasattr(cls, name)


def _listed(names: Iterable[str]) -> str:
    return f"({', '.join(names)})"


def _module(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None


def _require_host() -> tuple[ModuleType, Release]:
    try:
        package = import_module("tensorrt_llm")
    except ImportError as error:
        raise UnavailableError(
            f"tensorrt_llm is not installed ({error}); install TensorRT-LLM "
            f"{'.'.join(map(str, RELEASES[0].first))} or newer, or use another lane."
        ) from error
    version = str(getattr(package, "__version__", "unknown"))
    release = release_of(version)
    if release is None:
        raise UnavailableError(
            f"tensorrt_llm {version} has no KV cache connector this shell knows; install "
            f"{'.'.join(map(str, RELEASES[0].first))} or newer."
        )
    found = list(differences(release))
    if found:
        raise UnavailableError(
            f"tensorrt_llm {version} ({package.__file__}) differs from what this shell was written "
            f"against: {'; '.join(found)}. Use a version of docs/lanes.md, or adapt signatures.py "
            f"and the shell to this one."
        )
    return package, release


_package, RELEASE = _require_host()
VERSION = str(_package.__version__)
PATH = str(_package.__file__)
_connector: Any = import_module(RELEASE.connector.module)
KvCacheConnectorScheduler: Any = _connector.KvCacheConnectorScheduler
KvCacheConnectorWorker: Any = _connector.KvCacheConnectorWorker


def salt_of(request: Any, known: Iterable[str]) -> str | None:
    """The cache salt of a request; None when it has none.

    Where a request carries only the salt's hash, it is looked for among ``known``; None when it is
    none of them, and so no hand-over's.
    """
    if hasattr(request, "cache_salt"):
        return request.cache_salt or None
    if request.cache_salt_id is None:
        return None
    salt_id = int(request.cache_salt_id)
    return next((salt for salt in known if _salt_id(salt) == salt_id), None)


@lru_cache(maxsize=8192)
def _salt_id(salt: str) -> int:
    return int(getattr(import_module(SALT_ID.read.module), SALT_ID.name)(salt))
