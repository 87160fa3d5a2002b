"""build_scripts/trtllm_smoke.py runs to its end on the FAKE TensorRT-LLM, and fails when it
should.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_tensorrt_llm as fake
import pytest
from connector_cases import Ask
from connector_world import World
from fake_host import FakeTrtLlm, llm_args, start_engine

from trtllm_kvmap.models import load_model
from trtllm_kvmap.tiny import model_folder

SCRIPTS = Path(__file__).resolve().parents[2] / "build_scripts"


class FakeLlm:
    """``tensorrt_llm.LLM`` over the fake executor."""

    version = fake.VERSIONS[0]

    def __init__(self, model, kv_connector_config=None, kv_cache_config=None, **kwargs):
        module = import_module(kv_connector_config.connector_module)
        args = llm_args(model)
        halves = [
            getattr(module, name)(args)
            for name in (
                kv_connector_config.connector_scheduler_class,
                kv_connector_config.connector_worker_class,
            )
        ]
        self.host: FakeTrtLlm = start_engine(
            self.version, load_model(model), *halves, {}, set(), 64, 8192
        )

    def generate_async(self, inputs, sampling_params=None, cache_salt=None):
        (answer,) = self.host.run([Ask(inputs, sampling_params.max_tokens, salt=cache_salt)])
        output = SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer.token_ids)])
        return SimpleNamespace(result=lambda: output)

    def shutdown(self):
        del self.host


@pytest.fixture
def smoke(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[int, dict[str, Any]]]]:
    modules = fake.make_modules(FakeLlm.version)
    modules["tensorrt_llm"].LLM = FakeLlm
    for name in ("TRTLLM_KVMAP_CONNECTOR", "TLLM_WORKER_USE_SINGLE_PROCESS"):
        monkeypatch.setenv(name, "")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(world.source.tokenizer.decode(world.prompt(41)))

    def run(**changes: str) -> tuple[int, dict[str, Any]]:
        options = {
            "source": str(model_folder("tiny-s")),
            "target": str(model_folder("tiny-m")),
            "kvmap": str(world.path),
            "prompt-file": str(prompt),
            "backend": "cpu",
            "json": str(tmp_path / "smoke.json"),
            **changes,
        }
        argv = [part for name, value in options.items() for part in (f"--{name}", value)]
        monkeypatch.setattr(sys, "argv", ["trtllm_smoke.py", *argv, "--allow-unproven"])
        status = import_module("trtllm_smoke").main()
        return status, json.loads((tmp_path / "smoke.json").read_text())

    with fake.installed(modules):
        yield run
    sys.modules.pop("trtllm_parts", None)
    sys.modules.pop("trtllm_smoke", None)


def test_every_check_holds(smoke: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = smoke()
    assert status == 0
    assert all(found["checks"].values())
    assert list(found["checks"]) == list(import_module("trtllm_smoke").CHECKS)
    assert found["tensorrt_llm"] == {"version": FakeLlm.version, "path": fake.__file__}
    assert capsys.readouterr().out.splitlines()[-1] == "TensorRT-LLM smoke check passed."


def _shuffled_heads(shell: Callable[[str], ModuleType], patch: pytest.MonkeyPatch) -> None:
    read_out = shell("export").read_out

    def swapped(pool: Any, order: Any) -> Any:
        exported = read_out(pool, order)
        return type(exported)(exported.token_ids, exported.keys.flip(1), exported.values)

    patch.setattr(shell("export"), "read_out", swapped)


def _ignored(shell: Callable[[str], ModuleType], patch: pytest.MonkeyPatch) -> None:
    scheduler = shell("scheduler").KvMapScheduler
    patch.setattr(scheduler, "get_num_new_matched_tokens", lambda self, request, n: (0, False))


def _kept(shell: Callable[[str], ModuleType], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shell("staged").StagedBlocks, "done", lambda self, salt: None)


@pytest.mark.parametrize(
    ("alter", "failed"),
    [(_shuffled_heads, "layout"), (_ignored, "mapped"), (_kept, "released")],
    ids=lambda value: getattr(value, "__name__", value).strip("_"),
)
def test_a_check_fails_when_it_should(
    smoke: Any, monkeypatch: pytest.MonkeyPatch, alter: Any, failed: str
) -> None:
    alter(lambda name: import_module(f"trtllm_kvmap.inject.trtllm.{name}"), monkeypatch)
    status, found = smoke()
    assert status == 1
    assert next(name for name, held in found["checks"].items() if not held) == failed


def test_a_caller_that_the_engine_does_not_understand_is_told(
    smoke: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def generate_async(self, inputs, sampling_params=None): ...

    monkeypatch.setattr(FakeLlm, "generate_async", generate_async)
    status, found = smoke()
    assert (status, found["checks"]) == (1, {"door": False})
    assert "LLM.generate_async does not take (cache_salt)" in capsys.readouterr().out
