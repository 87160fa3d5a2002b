"""The shell imported against the fake package, and a fitted pair to run it with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fake_blocks
import pytest
from connector_world import World, make_world
from fake_host import FakeTrtLlm, Shell, shell, start_target, write_settings
from fake_tensorrt_llm import VERSIONS

SETTINGS = "TRTLLM_KVMAP_CONNECTOR"


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"), fake_blocks.BLOCKS)


@pytest.fixture(scope="module", params=VERSIONS[:1])
def imported(request: pytest.FixtureRequest) -> Iterator[Shell]:
    """The older release; what depends on the release is parametrised over VERSIONS."""
    with shell(request.param) as connector:
        yield Shell(connector, request.param)


@pytest.fixture
def settings(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings of a target, of a path of their own, named as the shell looks for them."""
    path = tmp_path / "connector.json"
    write_settings(
        path,
        kvmap=str(world.path),
        blocks="fake_blocks:BLOCKS",
        first_tokens=4,
        repair_window=20,
        allow_unproven=True,
    )
    monkeypatch.setenv(SETTINGS, str(path))
    return path


@pytest.fixture
def host(imported: Shell, settings: Path, world: World) -> Iterator[FakeTrtLlm]:
    """A target with room for everything."""
    yield start_target(imported, world.target, fake_blocks.BLOCKS.awaited)
    fake_blocks.BLOCKS.awaited.clear()
    for salt in fake_blocks.BLOCKS.salts():
        fake_blocks.BLOCKS.done(salt)
