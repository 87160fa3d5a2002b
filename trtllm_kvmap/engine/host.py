"""The engine lane's door to tensorrt_llm and tensorrt, held to signatures_engine.py when this is
imported.

Raises UnavailableError, with a sentence for everything that differs, when a package is missing, of
another release, or not as it was when the list was written.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from trtllm_kvmap.errors import UnavailableError
from trtllm_kvmap.inject.trtllm.signatures import Attributes, Method
from trtllm_kvmap.inject.trtllm.signatures_engine import ATTRIBUTES, METHODS, TENSORRT, TRTLLM


def differences() -> Iterator[str]:
    """One sentence for every listed name that the installed packages have otherwise."""
    for method in METHODS:
        yield from _method_difference(method)
    for attributes in ATTRIBUTES:
        yield from _attribute_difference(attributes)


def _holder(module_name: str, owner: str) -> Any:
    try:
        module = import_module(module_name)
    except ImportError:
        return None
    return getattr(module, owner, None) if owner else module


def _method_difference(method: Method) -> Iterator[str]:
    where = f"{method.owner}.{method.name}" if method.owner else method.name
    function = getattr(_holder(method.read.module, method.owner), method.name, None)
    if function is None:
        yield f"{where} is missing from {method.read.module}"
        return
    accepted = _accepted(function)
    missing = [name for name in method.parameters if accepted is not None and name not in accepted]
    if missing:
        yield f"{where} does not take ({', '.join(missing)})"


def _accepted(function: Any) -> set[str] | str | None:
    """The parameters by name; the text that a binding says of itself; None when it says nothing, or
    takes anything.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return str(getattr(function, "__nb_signature__", "") or function.__doc__ or "") or None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return function.__doc__ or None
    return set(parameters)


def _attribute_difference(attributes: Attributes) -> Iterator[str]:
    holder = _holder(attributes.read.module, attributes.owner)
    if holder is None:
        yield f"{attributes.owner} is missing from {attributes.read.module}"
        return
    missing = [name for name in attributes.names if not hasattr(holder, name)]
    if missing:
        yield f"{attributes.owner or attributes.read.module} has no ({', '.join(missing)})"


def _require(name: str, series: tuple[int, int]) -> ModuleType:
    wanted = ".".join(map(str, series))
    try:
        package = import_module(name)
    except ImportError as error:
        raise UnavailableError(
            f"{name} is not installed ({error}). The engine lane needs TensorRT-LLM 1.2.1, the "
            f"last stable release with engines, and the TensorRT it pins; install them, or use "
            f"another lane."
        ) from error
    version = str(getattr(package, "__version__", "unknown"))
    if version.split(".")[:2] != wanted.split("."):
        raise UnavailableError(
            f"{name} {version} is installed; the engine lane was written for {wanted}. Install "
            f"TensorRT-LLM 1.2.1, or use the connector lane, which knows newer ones."
        )
    return package


def _require_names() -> None:
    if found := list(differences()):
        raise UnavailableError(
            f"tensorrt_llm {VERSION} ({PATH}) differs from what the engine lane was written "
            f"against: {'; '.join(found)}. Adapt signatures_engine.py and engine/ to it."
        )


tensorrt_llm: Any = _require("tensorrt_llm", TRTLLM)
trt: Any = _require("tensorrt", TENSORRT)
VERSION, PATH = str(tensorrt_llm.__version__), str(tensorrt_llm.__file__)
TENSORRT_VERSION = str(trt.__version__)
_require_names()
builder: Any = import_module("tensorrt_llm.builder")
plugin: Any = import_module("tensorrt_llm.plugin")
automodel: Any = import_module("tensorrt_llm.models.automodel")
modeling: Any = import_module("tensorrt_llm.models.modeling_utils")
bindings: Any = import_module("tensorrt_llm.bindings")
tle: Any = import_module("tensorrt_llm.bindings.executor")
batch: Any = import_module("tensorrt_llm.bindings.internal.batch_manager")


def data_type(dtype: str) -> Any:
    """TensorRT-LLM's name of a cache's dtype."""
    return {"bfloat16": bindings.DataType.BF16, "float16": bindings.DataType.HALF}[dtype]
