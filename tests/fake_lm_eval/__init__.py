"""A fake of the two names of lm-evaluation-harness that the adapter stands on, for machines without
it. Written after lm_eval/api/model.py and lm_eval/api/registry.py of 0.4.13: the abstract methods,
the constructor's attributes, and how a model is made from a string of arguments.
"""

from __future__ import annotations

import abc
import sys
from types import ModuleType
from typing import Any

MODELS: dict[str, type] = {}


class FakeCacheHook:
    """Fake: upstream's stores answers in a database when there is one."""

    def __init__(self) -> None:
        self.stored: list[tuple[str, Any, Any]] = []

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        self.stored.append((attr, req, res))


class FakeLM(abc.ABC):
    """Fake of lm_eval.api.model.LM."""

    def __init__(self) -> None:
        self._rank = 0
        self._world_size = 1
        self._device = None
        self.cache_hook = FakeCacheHook()

    @abc.abstractmethod
    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]: ...

    @abc.abstractmethod
    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]: ...

    @abc.abstractmethod
    def generate_until(self, requests: list[Any]) -> list[str]: ...

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> Any:
        given = dict(pair.split("=", 1) for pair in arg_string.split(","))
        parsed = {name: int(v) if v.isdigit() else v for name, v in given.items()}
        extra = {k: v for k, v in (additional_config or {}).items() if v is not None}
        return cls(**parsed, **extra)

    @property
    def device(self) -> Any:
        return self._device


def fake_register_model(*names: str) -> Any:
    def decorate(cls: type) -> type:
        assert issubclass(cls, FakeLM)
        MODELS.update(dict.fromkeys(names, cls))
        return cls

    return decorate


def install(modules: dict[str, ModuleType] = sys.modules) -> None:
    """Put the fake where `lm_eval` would be."""
    parts = {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": FakeLM},
        "lm_eval.api.registry": {
            "register_model": fake_register_model,
            "get_model": MODELS.__getitem__,
        },
    }
    for name, held in parts.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(held)
