"""The TensorRT lean runtime, and the plugin built for these tests."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "conformance"))
sys.path.insert(0, str(ROOT / "tests" / "tensorrt"))

from harness import Libraries, Registry  # noqa: E402

OUTPUT = ROOT / "build" / "test-tensorrt"


@pytest.fixture(scope="session")
def lean_runtime() -> Path:
    """libnvinfer_lean.so of the installed wheel."""
    spec = importlib.util.find_spec("tensorrt_lean_libs")
    if spec is None:
        pytest.skip("the TensorRT lean runtime is not installed here; the lane tensorrt has it")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return next(path for folder in folders for path in folder.glob("libnvinfer_lean.so.*"))


@pytest.fixture(scope="session")
def libraries(lean_runtime: Path) -> Libraries:
    if shutil.which("g++") is None:
        pytest.skip("no g++ on PATH to build the plugin with")
    command = [sys.executable, str(ROOT / "build_scripts" / "build_native.py"), "--tests"]
    command += ["--python", sys.executable, "--output", str(OUTPUT), "--jobs", "2"]
    command += ["--architectures", "80-real"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    if not hasattr(torch.ops.trtllm_kvmap, "map_kv"):  # torch takes one library of them
        torch.ops.load_library(str(OUTPUT / "libtrtllm_kvmap_torch.so"))
    plugin = OUTPUT / "libtrtllm_kvmap_plugin.so"
    return Libraries(
        OUTPUT / "libtrtllm_kvmap_harness.so",
        OUTPUT / "libtrtllm_kvmap_plugin_emulated.so",
        plugin if plugin.is_file() else None,
    )


@pytest.fixture(scope="session")
def lean_registry(libraries: Libraries, lean_runtime: Path) -> Registry:
    """The registry of the lean runtime with the emulated plugin in it."""
    registry = Registry.open(libraries.harness, lean_runtime, libraries.emulated)
    print(f"TensorRT lean runtime {registry.version}, {registry.runtime}")
    return registry


@pytest.fixture(autouse=True)
def say_which_runtime(lean_registry: Registry) -> None:
    """Every test's output names the runtime it ran on."""
    print(f"TensorRT lean runtime {registry_version(lean_registry)}, {lean_registry.runtime}")


def registry_version(registry: Registry) -> str:
    major, rest = divmod(registry.version, 10000)
    return f"{major}.{rest // 100}.{rest % 100}"
