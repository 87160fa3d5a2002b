"""A FAKE TensorRT-LLM that runs a real model: the fake package, executor and cache put together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_tensorrt_llm as fake
from connector_cases import Answer, Ask
from fake_executor import FakeExecutor, Names
from fake_kv_cache import FakeKvCache

from trtllm_kvmap.models import LoadedModel


@dataclass(frozen=True)
class Shell:
    """The connector module as imported against the fake package of ``version``."""

    connector: ModuleType
    version: str


@dataclass
class FakeTrtLlm:
    """The Host of connector_cases.py."""

    executor: FakeExecutor
    statuses: dict[int, dict[str, Any]]
    requests: Any  # the class of requests
    salt_field: str
    awaited: set[str]
    submitted: int = 0

    @property
    def tokens_per_block(self) -> int:
        return self.executor.cache.tokens_per_block

    def submit(self, ask: Ask, **fields: Any) -> Any:
        """The request, waiting. A request of this engine cannot name a hand-over: what it asks for
        is told to the blocks.
        """
        self.submitted += 1
        salt: Any = ask.salt
        if salt is not None and self.salt_field == "cache_salt_id":
            salt = fake.get_cache_salt_id(salt)
        if ask.handoff is not None:
            self.awaited.add(ask.handoff)
        request = self.requests(
            request_id=self.submitted,
            prompt_len=len(ask.token_ids),
            tokens=list(ask.token_ids),
            max_new_tokens=ask.steps,
            **{self.salt_field: salt, **fields},
        )
        self.executor.submit(request)
        return request

    def run(self, asks: Sequence[Ask]) -> list[Answer]:
        requests = [self.submit(ask) for ask in asks]
        while self.executor.busy:
            self.executor.step()
            for ask, request in zip(asks, requests, strict=True):
                generated = len(request.tokens) - request.prompt_len
                if ask.cancel_after is not None and generated >= ask.cancel_after:
                    request.cancelled = True
        for request in requests:
            assert request.error is None, request.error
        return [self.answer(request) for request in requests]

    def answer(self, request: Any) -> Answer:
        return Answer(
            request.tokens[request.prompt_len :],
            self.statuses.get(request.request_id),
            request.cached,
        )

    def forget(self) -> None:
        self.executor.cache.forget()

    def preemptions(self) -> int:
        return 0


def llm_args(model: Path | str, tokens_per_block: int = 32, **changes: Any) -> Any:
    cache = fake.KvCacheConfig(tokens_per_block=tokens_per_block)
    return fake.TorchLlmArgs(model=str(model), kv_cache_config=cache, **changes)


@contextmanager
def shell(version: str) -> Iterator[ModuleType]:
    """The connector module, imported against the fake package of ``version``."""
    with fake.installed(fake.make_modules(version)):
        yield import_module("trtllm_kvmap.inject.trtllm.connector")


def write_settings(path: Path, **settings: Any) -> str:
    path.write_text(json.dumps(settings))
    return str(path)


def start_target(
    imported: Shell,
    target: LoadedModel,
    awaited: set[str],
    *,
    num_blocks: int = 64,
    max_num_tokens: int = 8192,
    layers_per_band: int = 2,
    **cache: Any,
) -> FakeTrtLlm:
    """The engine of ``target`` with the connector's classes of the target's side."""
    statuses: dict[int, dict[str, Any]] = {}

    class Reporting(imported.connector.KvMapScheduler):  # type: ignore[misc, name-defined]
        def report(self, request: Any, status: Any) -> None:
            statuses[request.request_id] = status.to_json()

    class Banded(imported.connector.KvMapWorker):  # type: ignore[misc, name-defined]
        pass

    Banded.layers_per_band = layers_per_band
    args = llm_args(target.model.config.name_or_path)
    return start_engine(
        imported.version,
        target,
        Reporting(args),
        Banded(args),
        statuses,
        awaited,
        num_blocks,
        max_num_tokens,
        **cache,
    )


def start_source(imported: Shell, source: LoadedModel) -> FakeTrtLlm:
    """The engine of ``source`` with the connector's classes of the source's side."""
    args = llm_args(source.model.config.name_or_path)
    halves = imported.connector.KvExportScheduler(args), imported.connector.KvExportWorker(args)
    return start_engine(imported.version, source, *halves, {}, set(), 64, 8192)


def start_engine(
    version: str,
    model: LoadedModel,
    scheduler: Any,
    worker: Any,
    statuses: dict[int, dict[str, Any]],
    awaited: set[str],
    num_blocks: int,
    max_num_tokens: int,
    **cache: Any,
) -> FakeTrtLlm:
    """``model`` in a fake executor, with these two halves of a connector."""
    modules = fake.make_modules(version)
    names = modules[fake.CONNECTOR[version]]
    salt_field = "cache_salt_id" if version == "1.2.1" else "cache_salt"
    executor = FakeExecutor(
        model,
        FakeKvCache(model.spec, num_blocks, 32, **cache),
        scheduler,
        worker,
        Names(names.RequestData, names.SchedulerOutput),
        lambda request: getattr(request, salt_field),
        max_num_tokens=max_num_tokens,
    )
    requests = modules["tensorrt_llm.bindings.internal.batch_manager"].LlmRequest
    return FakeTrtLlm(executor, statuses, requests, salt_field, awaited)
