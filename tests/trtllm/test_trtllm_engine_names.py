"""The engine lane and its FAKE use the names of signatures_engine.py, and no others."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_tensorrt
import pytest
from fake_engine_host import fake_packages
from fake_engines import CONTENTS, make_engine_modules

from trtllm_kvmap.errors import UnavailableError
from trtllm_kvmap.inject.trtllm.signatures_engine import ATTRIBUTES, METHODS

ENGINE = Path(import_module("trtllm_kvmap.engine").__path__[0])
HOST = "trtllm_kvmap.engine.host"
Modules = dict[str, ModuleType]

# What host.py calls the foreign modules.
ALIASES = {
    "trt": "tensorrt",
    "tle": "tensorrt_llm.bindings.executor",
    "batch": "tensorrt_llm.bindings.internal.batch_manager",
    "bindings": "tensorrt_llm.bindings",
    "builder": "tensorrt_llm.builder",
    "plugin": "tensorrt_llm.plugin",
    "automodel": "tensorrt_llm.models.automodel",
    "modeling": "tensorrt_llm.models.modeling_utils",
    "tensorrt_llm": "tensorrt_llm",
}


def listed() -> dict[tuple[str, str], set[str]]:
    """Names by (module, owner); owners are names of their module."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for entry in (*METHODS, *ATTRIBUTES):
        names = entry.names if hasattr(entry, "names") else (entry.name,)
        found[entry.read.module, entry.owner] |= set(names)
        found[entry.read.module, ""].add(entry.owner)
    return found


LISTED = listed()
PARAMETERS = {(m.read.module, m.owner, m.name): set(m.parameters) for m in METHODS}


def test_every_name_has_the_file_it_was_read_in() -> None:
    for entry in (*METHODS, *ATTRIBUTES):
        assert entry.read.file.endswith((".py", ".cpp")), entry
        assert entry.read.commit is None or len(entry.read.commit) == 40, entry
        assert entry.read.module.split(".")[0] in ("tensorrt", "tensorrt_llm"), entry


def test_the_fake_is_as_the_list_says() -> None:
    with fake_packages():
        host = import_module(HOST)
        assert list(host.differences()) == []
        assert host.VERSION == "1.2.1"
        assert fake_tensorrt.__version__ == host.TENSORRT_VERSION
        print("FAKE tensorrt_llm", host.VERSION, host.PATH)


def test_the_fake_has_no_name_that_is_not_listed() -> None:
    """So that what runs on it uses no other."""
    contents = {**CONTENTS, "tensorrt": _own_names(fake_tensorrt)}
    for module, values in contents.items():
        assert set(values) <= LISTED[module, ""], module
        for name, value in values.items():
            if not inspect.isclass(value):
                continue
            public = {key for cls in value.__mro__[:-1] for key in vars(cls) if key[0] != "_"}
            public -= set(vars(list))
            # Fields of what is made by keyword are its parameters.
            known = LISTED[module, name] | PARAMETERS.get((module, name, "__init__"), set())
            assert public <= known, (module, name, public - known)


def _own_names(module: ModuleType) -> dict[str, Any]:
    named = {name: value for name, value in vars(module).items() if name in LISTED["tensorrt", ""]}
    made = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__
    }
    return named | made


# --- The sources ---


def chains(tree: ast.AST) -> Iterator[tuple[list[str], ast.AST]]:
    """Every whole a.b.c with its node, outermost first."""
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            parts, at = [], node
            while isinstance(at, ast.Attribute):
                inner.add(id(at))
                parts.append(at.attr)
                at = at.value
            if isinstance(at, ast.Name):
                yield [at.id, *reversed(parts)], node


def foreign(parts: list[str], taken: set[str]) -> tuple[str, list[str]] | None:
    """(module, what is named of it) of a chain that begins at a foreign module: host.alias, or an
    alias that the file has ``taken`` from host.
    """
    if parts[0] == "host":
        parts = parts[1:]
    elif parts[0] not in taken:
        return None
    return (ALIASES[parts[0]], parts[1:]) if parts[0] in ALIASES and len(parts) > 1 else None


def taken_from_host(tree: ast.AST) -> set[str]:
    froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == HOST]
    return {alias.name for node in froms for alias in node.names}


def used(path: Path) -> Iterator[tuple[str, str, str, set[str]]]:
    """(module, owner, name, keywords of the call) of every foreign name in a file."""
    tree = ast.parse(path.read_text())
    calls = {id(n.func): n for n in ast.walk(tree) if isinstance(n, ast.Call)}
    taken = taken_from_host(tree)
    for parts, node in chains(tree):
        if (found := foreign(parts, taken)) is None:
            continue
        module, names = found
        call = calls.get(id(node))
        keywords = {k.arg for k in call.keywords if k.arg} if call else set()
        if len(names) == 1:
            made = (module, names[0], "__init__") in PARAMETERS
            owner, name = (names[0], "__init__") if made else ("", names[0])
            yield module, owner, name, keywords
        else:
            yield module, names[0], names[1], keywords


def test_the_sources_use_no_other_name() -> None:
    seen = set()
    for path in sorted(ENGINE.glob("*.py")):
        for module, owner, name, keywords in used(path):
            where = path.name, module, owner, name
            seen.add((module, owner))
            assert name in LISTED[module, owner] | LISTED[module, ""], where
            if keywords:
                assert keywords <= PARAMETERS[module, owner, name], where
    # A check that sees nothing would hold as well.
    assert {("tensorrt", "Builder"), ("tensorrt_llm.bindings.executor", "Executor")} <= seen
    assert len(seen) > 25


def test_foreign_packages_come_through_the_door() -> None:
    for path in ENGINE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
                names = [a.value for a in node.args if isinstance(a, ast.Constant)]
            through = [n for n in names if n.split(".")[0] in ("tensorrt", "tensorrt_llm")]
            assert not through or path.name == "host.py", (path.name, through)


# --- A package that differs ---


def _less(modules: Modules, module: str, owner: str, name: str) -> None:
    cls = getattr(modules[module], owner)
    kept = {k: v for k, v in vars(cls).items() if k not in (name, "__dict__", "__weakref__")}
    setattr(modules[module], owner, type(owner, (), kept))


def _no_salt(modules: Modules) -> None:
    class Request:
        def __init__(self, input_token_ids, max_tokens, streaming, output_config, end_id): ...

    modules["tensorrt_llm.bindings.executor"].Request = Request


BATCH = "tensorrt_llm.bindings.internal.batch_manager"
CHANGES: dict[str, tuple[Callable[[Modules], None], str]] = {
    "a method less": (
        lambda m: _less(m, BATCH, "KVCacheManager", "copy_block_offsets"),
        "KVCacheManager.copy_block_offsets is missing",
    ),
    "an attribute less": (
        lambda m: _less(m, BATCH, "LlmRequestType", "LLMREQUEST_TYPE_CONTEXT_ONLY"),
        r"LlmRequestType has no \(LLMREQUEST_TYPE_CONTEXT_ONLY\)",
    ),
    "a parameter less": (
        _no_salt,
        r"Request.__init__ does not take \(.*context_phase_params, cache_salt_id\)",
    ),
    "a module less": (lambda m: m.pop("tensorrt_llm.builder"), "build is missing from tensorrt"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_package_that_differs_is_refused(change: str) -> None:
    modules = make_engine_modules()
    alter, sentence = CHANGES[change]
    alter(modules)
    with (
        fake_packages(modules),
        pytest.raises(UnavailableError, match=sentence),
    ):
        import_module(HOST)


@pytest.mark.parametrize("version", ["1.3.0rc22", "1.1.0", "unknown"])
def test_another_release_is_refused(version: str) -> None:
    modules = make_engine_modules()
    modules["tensorrt_llm"].__dict__["__version__"] = version
    with (
        fake_packages(modules),
        pytest.raises(UnavailableError, match=f"tensorrt_llm {version} is installed"),
    ):
        import_module(HOST)


@pytest.mark.parametrize("package", ["tensorrt", "tensorrt_llm"])
def test_no_package_is_refused(package: str) -> None:
    modules = make_engine_modules()
    blocked: dict[str, Any] = {
        name: None if name.split(".")[0] == package else module for name, module in modules.items()
    }
    with fake_packages(blocked), pytest.raises(UnavailableError, match=f"{package} is not inst"):
        import_module(HOST)


def test_a_binding_is_asked_through_its_text() -> None:
    """nanobind's functions have no signature that inspect can read."""
    with fake_packages():
        host = import_module(HOST)

        class Bound:
            __name__ = "__init__"
            __doc__ = "__init__(self, input_token_ids: Sequence[int], max_tokens: int) -> None"
            __signature__ = "none"

            def __call__(self): ...

        accepted = host._accepted(Bound())
        assert "max_tokens" in accepted
        assert "cache_salt_id" not in accepted
