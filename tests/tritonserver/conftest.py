"""One real Triton Inference Server over the tiny family, for all tests of this folder.

The folder must not be called triton: beside the tests it would hide the package that torch imports.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from evidence_case import vouched
from handmade_maps import random_map
from served import CONFIG, REPORT, Served
from triton_server import TritonServer, installed, version

from trtllm_kvmap.models import load_model
from trtllm_kvmap.serve.repository import write_repository
from trtllm_kvmap.tiny import model_folder as tiny_folder

LOG = pytest.StashKey[Path]()


@pytest.fixture(scope="session")
def served(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    try:
        binary = installed()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("triton")
    source, target = load_model(tiny_folder("tiny-s")), load_model(tiny_folder("tiny-m"))
    kvmap = folder / "s-to-m.kvmap.safetensors"
    vouched(random_map(source, target), REPORT).save(kvmap)
    paths = str(tiny_folder("tiny-s")), str(tiny_folder("tiny-m"))
    config = replace(CONFIG, traffic=str(folder / "traffic"), traffic_share=1.0)
    write_repository(folder / "repository", kvmap, *paths, config)
    # As many threads as the tests' own models have, so that sums are added in the same order.
    os.environ["OMP_NUM_THREADS"] = "1"
    server = TritonServer(folder / "repository", folder / "work", control=True)
    request.config.stash[LOG] = server.log
    print(f"\n{version()}: {binary}")
    with server:
        yield Served(server, source, target, kvmap, folder / "traffic")


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
        lines = config.stash[LOG].read_text().splitlines()
        found = next((line for line in lines if "server_version" in line), "version not in its log")
        said = " ".join(found.replace("|", " ").split())
        terminalreporter.write_line(f"Triton, {said}, of {version()}: {installed()}")
