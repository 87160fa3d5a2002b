"""The list of TensorRT-LLM's names: the fake is held to it; a package that differs is refused."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import make_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import fake_tensorrt_llm as fake
import pytest
from fake_host import shell

from trtllm_kvmap.errors import UnavailableError
from trtllm_kvmap.inject.trtllm.signatures import RELEASES, release_of

Modules = dict[str, ModuleType]
SHELL = "trtllm_kvmap.inject.trtllm.connector"


@pytest.mark.parametrize("version", fake.VERSIONS)
def test_the_fake_is_as_the_list_says(version: str) -> None:
    with shell(version):
        host = sys.modules["trtllm_kvmap.inject.trtllm.host"]
        assert list(host.differences(host.RELEASE)) == []
        assert host.RELEASE.connector.module == fake.CONNECTOR[version]
        assert (version, fake.__file__) == (host.VERSION, host.PATH)


@pytest.mark.parametrize("release", RELEASES, ids=lambda r: ".".join(map(str, r.first)))
def test_every_name_has_the_file_it_was_read_in(release: Any) -> None:
    for name in (*release.methods, *release.attributes):
        assert name.read.file.endswith((".py", ".cpp")), name
        assert name.read.commit is None or len(name.read.commit) == 40, name
    owners = {method.owner for method in release.methods}
    assert owners == {"KvCacheConnectorScheduler", "KvCacheConnectorWorker"}


@pytest.mark.parametrize(
    ("version", "first"),
    [
        ("1.2.1", (1, 2)),
        ("1.2.0rc3", (1, 2)),
        ("1.3.0rc22", (1, 3)),
        ("1.4.0", (1, 3)),
        ("2.0", (1, 3)),
        ("1.1.0", None),
        ("0.21", None),
        ("dev", None),
    ],
)
def test_the_release_of_a_version(version: str, first: tuple[int, int] | None) -> None:
    release = release_of(version)
    assert (release.first if release else None) == first


def _another_parameter(modules: Modules, connector: ModuleType) -> None:
    def get_num_new_matched_tokens(self, request, num_computed_tokens, hint): ...

    base = connector.KvCacheConnectorScheduler
    connector.KvCacheConnectorScheduler = type(
        base.__name__, (base,), {"get_num_new_matched_tokens": get_num_new_matched_tokens}
    )


def _a_method_less(modules: Modules, connector: ModuleType) -> None:
    kept = dict(vars(connector.KvCacheConnectorWorker))
    del kept["wait_for_layer_load"], kept["__dict__"], kept["__weakref__"]
    connector.KvCacheConnectorWorker = type("KvCacheConnectorWorker", (), kept)


def _a_new_abstract_method(modules: Modules, connector: ModuleType) -> None:
    base = connector.KvCacheConnectorWorker
    connector.KvCacheConnectorWorker = type(base)(
        base.__name__, (base,), {"request_reset": abstractmethod(lambda self, request: None)}
    )


def _a_field_renamed(modules: Modules, connector: ModuleType) -> None:
    names = ("request_id", "new_tokens", "block_ids", "computed_position", "num_scheduled_tokens")
    connector.RequestData = make_dataclass("RequestData", names)


def _no_salt(modules: Modules, connector: ModuleType) -> None:
    bindings = modules["tensorrt_llm.bindings.internal.batch_manager"]
    bindings.LlmRequest = fake._Request


def _moved(modules: Modules, connector: ModuleType) -> None:
    del modules[connector.__name__]


CHANGES: dict[str, tuple[Callable[[Modules, ModuleType], None], str]] = {
    "another parameter": (
        _another_parameter,
        r"get_num_new_matched_tokens takes \(request, num_computed_tokens, hint\), not "
        r"\(request, num_computed_tokens\)",
    ),
    "a method less": (_a_method_less, "KvCacheConnectorWorker.wait_for_layer_load is missing"),
    "a new abstract method": (
        _a_new_abstract_method,
        "KvCacheConnectorWorker asks for request_reset, which this shell does not have",
    ),
    "a field renamed": (_a_field_renamed, r"RequestData has no \(new_block_ids\)"),
    "no salt on a request": (_no_salt, r"LlmRequest has no \(cache_salt, cache_salt_id\)"),
    "moved": (_moved, "KvCacheConnectorScheduler.* is missing from tensorrt_llm"),
}


@pytest.mark.parametrize("version", fake.VERSIONS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_package_that_differs_is_refused(version: str, change: str) -> None:
    modules = fake.make_modules(version)
    alter, sentence = CHANGES[change]
    alter(modules, modules[fake.CONNECTOR[version]])
    with fake.installed(modules), pytest.raises(UnavailableError, match=sentence) as refused:
        import_module(SHELL)
    assert version in str(refused.value)
    assert fake.__file__ in str(refused.value)


def test_where_a_request_has_the_hash_of_a_salt_its_function_is_needed() -> None:
    for version in fake.VERSIONS:
        modules = fake.make_modules(version)
        modules["tensorrt_llm.inputs.utils"].__dict__.pop("get_cache_salt_id")
        with fake.installed(modules):
            if version == "1.2.1":
                with pytest.raises(UnavailableError, match="get_cache_salt_id is missing"):
                    import_module(SHELL)
            else:
                import_module(SHELL)


@pytest.mark.parametrize(
    ("modules", "sentence"),
    [
        ({}, "tensorrt_llm is not installed"),
        ({"tensorrt_llm": "0.21.0"}, "tensorrt_llm 0.21.0 has no KV cache connector"),
        ({"tensorrt_llm": "unknown"}, "tensorrt_llm unknown has no KV cache connector"),
    ],
)
def test_no_package_or_an_old_one(modules: dict[str, str], sentence: str) -> None:
    made = {}
    for name, version in modules.items():
        made[name] = ModuleType(name)
        made[name].__dict__.update(__version__=version, __file__="somewhere")
    with fake.installed(made), pytest.raises(UnavailableError, match=sentence):
        import_module(SHELL)
