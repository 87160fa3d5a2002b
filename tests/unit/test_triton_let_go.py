"""A pipeline holds the target's responses until Triton's thread has let go of them: under a fake of
the module that the server gives a stub.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trtllm_kvmap.errors import UnavailableError


class FakeAnswer:
    """What ``exec(decoupled=True)`` gives: an iterator that a thread of Triton's holds as well."""

    def __init__(self, responses: list[Any]) -> None:
        self._responses = iter(responses)

    def __iter__(self) -> FakeAnswer:
        return self

    def __next__(self) -> Any:
        return next(self._responses)


def fake_backend(responses: list[Any]) -> ModuleType:
    """``made`` has a weak reference to every answer."""
    fake = ModuleType("triton_python_backend_utils")
    fake.made = []

    def execute(decoupled: bool) -> FakeAnswer:
        answer = FakeAnswer(responses)
        fake.made.append(weakref.ref(answer))
        return answer

    fake.InferenceRequest = lambda **_: SimpleNamespace(exec=execute)
    fake.InferenceResponse = list
    fake.Tensor = lambda name, array: (name, array)
    fake.get_input_tensor_by_name = lambda *_: SimpleNamespace(
        as_numpy=lambda: np.array([b"{}"], dtype=object)
    )
    fake.get_output_tensor_by_name = lambda response, _: response
    return fake


def response(event: str | None, error: str | None = None) -> Any:
    return SimpleNamespace(
        has_error=lambda: error is not None,
        error=lambda: SimpleNamespace(message=lambda: error),
        output_tensors=lambda: [] if event is None else [event],
        as_numpy=lambda: np.array([event], dtype=object),
    )


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The pipeline's module over a fake with the given responses."""

    def over(responses: list[Any]) -> tuple[ModuleType, Any]:
        fake = fake_backend(responses)
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
        for name in [n for n in sys.modules if n.startswith("trtllm_kvmap.serve.triton.")]:
            monkeypatch.delitem(sys.modules, name)
        return fake, importlib.import_module("trtllm_kvmap.serve.triton.pipeline")

    yield over
    for name in [n for n in sys.modules if n.startswith("trtllm_kvmap.serve.triton.")]:
        del sys.modules[name]


@pytest.mark.parametrize("fails", [False, True])
def test_an_answer_lives_until_triton_has_let_go_and_no_longer(backend: Any, fails: bool) -> None:
    last = response(None, "the target is gone") if fails else response(None)
    fake, module = backend([response("1"), response("2"), last])
    model = module.TritonPythonModel()
    model.answer = None
    module.Event = SimpleNamespace(from_json=lambda number: number)
    model.pipeline = SimpleNamespace(
        respond=lambda body, parameters: (
            SimpleNamespace(last=None, body=event)
            for event in model._ask_target([1], SimpleNamespace(to_json=dict), None)
        )
    )
    alive_when_asked = []

    def is_cancelled() -> bool:
        alive_when_asked.extend(answer() is not None for answer in fake.made)
        return False

    request = SimpleNamespace(parameters=lambda: "{}", is_cancelled=is_cancelled)
    said: list[Any] = []
    with pytest.raises(UnavailableError, match="is gone") if fails else nullcontext():
        said.extend(model._responses(request))
    assert len(said) == 2
    assert alive_when_asked == [True]
    assert [answer() for answer in fake.made] == [None]
