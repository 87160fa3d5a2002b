"""vLLM on a CPU: one engine of each kind at a time, made when a test first asks for it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
SPEC = importlib.util.find_spec("vllm")
# A package that is a file: this folder, too, can be imported by that name.
INSTALLED = SPEC is not None and SPEC.origin is not None
if INSTALLED:  # read when it is imported: the engine in this process, and no word to anybody
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(autouse=True)
def say_which_vllm() -> None:
    """Every test's output names the engine it ran on."""
    if not INSTALLED:
        pytest.skip("vLLM is not installed here; the lane vllm has it (run_tests.py -k vllm)")
    import vllm

    print(f"vLLM {vllm.__version__}, {Path(vllm.__file__).parent}")


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> object:
    if not INSTALLED:
        return None
    from connector_world import make_world
    from vllm_blocks import BLOCKS

    return make_world(tmp_path_factory.mktemp("pair"), BLOCKS)


@pytest.fixture(scope="session")
def engines(world: object) -> Iterator[Callable[..., object]]:
    """``engines(kind)``: the running engine of that kind; another one is shut down, because vLLM
    keeps one connector for a whole process. None: shut down any.
    """
    running: dict[str, object] = {}

    def stop() -> None:
        for name in list(running):
            running.pop(name).close()

    def start(kind: str | None) -> object:
        from vllm_host import VllmHost, connector, target_settings

        from trtllm_kvmap.tiny import model_folder

        if kind not in running:
            stop()
        if kind is not None and kind not in running:
            target = connector(**target_settings(world.path))
            make = {
                "source": lambda: VllmHost(
                    model_folder("tiny-s"), connector(exports="vllm_blocks:EXPORTS")
                ),
                "roomy": lambda: VllmHost(model_folder("tiny-m"), target),
                "narrow": lambda: VllmHost(
                    model_folder("tiny-m"), target, step_tokens=48, num_blocks=15
                ),
            }
            running[kind] = make[kind]()
        return running.get(kind)

    yield start
    stop()
