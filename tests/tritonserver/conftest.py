"""One real Triton Inference Server over the tiny family, for all tests of this folder.

The folder must not be called triton: beside the tests it would hide the package that torch imports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from handmade_maps import random_map

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build_scripts"))

import triton_server
from triton_server import TritonServer

from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.serve.repository import write_repository
from trtllm_kvmap.serve.settings import ServeConfig
from trtllm_kvmap.tiny import model_folder as tiny_folder

LOG = pytest.StashKey[Path]()
CONFIG = ServeConfig(first_tokens=2, repair_window=8, max_held_tokens=2_000)


@dataclass(frozen=True)
class Served:
    """The server, and what it was started from. The map has random weights: what it makes of a
    prompt is far from the target's own answer, so that no test can take one for the other.
    """

    server: TritonServer
    source: LoadedModel
    target: LoadedModel
    kvmap: Path

    def refer(self, model: str, value: str, *, to: str) -> None:
        """Change a parameter of a served model from ``value`` to ``to``, and load it again."""
        path = self.server.repository / model / "config.pbtxt"
        text = path.read_text()
        assert text.count(f'"{value}"') == 1, f"{model} has no parameter {value}"
        path.write_text(text.replace(f'"{value}"', f'"{to}"'))
        self.server.control(model, "load")


@pytest.fixture(scope="session")
def served(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    try:
        binary = triton_server.installed()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("triton")
    source, target = load_model(tiny_folder("tiny-s")), load_model(tiny_folder("tiny-m"))
    kvmap = folder / "s-to-m.kvmap.safetensors"
    random_map(source, target).with_evidence({"held_out": "none: a test's"}).save(kvmap)
    paths = str(tiny_folder("tiny-s")), str(tiny_folder("tiny-m"))
    write_repository(folder / "repository", kvmap, *paths, CONFIG)
    # As many threads as the tests' own models have, so that sums are added in the same order.
    os.environ["OMP_NUM_THREADS"] = "1"
    server = TritonServer(folder / "repository", folder / "work", control=True)
    request.config.stash[LOG] = server.log
    print(f"\n{triton_server.version()}: {binary}")
    with server:
        yield Served(server, source, target, kvmap)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed and LOG in item.config.stash and item.config.stash[LOG].is_file():
        report.sections.append(("tritonserver", item.config.stash[LOG].read_text()[-20_000:]))
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if LOG in config.stash:
        said = next(
            (
                line
                for line in config.stash[LOG].read_text().splitlines()
                if "server_version" in line
            ),
            "no version in its log",
        )
        version = " ".join(said.replace("|", " ").split())
        terminalreporter.write_line(
            f"Triton Inference Server, {version}, of {triton_server.version()}: "
            f"{triton_server.installed()}"
        )
