"""The engine lane imported against its FAKE packages, and a pipeline of two real models built and
opened with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_tensorrt
import torch
from fake_engine_world import new_world
from fake_engines import Executor, make_engine_modules

import trtllm_kvmap.engine as package
from trtllm_kvmap.mapper.cuda import PackedMap

FOREIGN = ("tensorrt", "tensorrt_llm")
OURS = "trtllm_kvmap.engine."


def _foreign(name: str) -> bool:
    return name in FOREIGN or name.startswith("tensorrt_llm.")


@contextmanager
def fake_packages(modules: dict[str, ModuleType] | None = None) -> Iterator[None]:
    """Import finds the fakes, and every module of the lane that is first imported here is forgotten
    afterwards.
    """
    before = dict(sys.modules)
    for name in [name for name in sys.modules if _foreign(name)]:
        del sys.modules[name]
    sys.modules.update(make_engine_modules() if modules is None else modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _foreign(name)]:
            del sys.modules[name]
        for name in [n for n in sys.modules if n.startswith(OURS) and n not in before]:
            del sys.modules[name]
            vars(package).pop(name.removeprefix(OURS), None)
        sys.modules.update({name: m for name, m in before.items() if _foreign(name)})


@contextmanager
def fake_lane(folder: Path) -> Iterator[SimpleNamespace]:
    """The lane's modules by name, with a plugin library that is an empty file in ``folder``."""
    new_world()
    Executor._started = ()
    with fake_packages():
        lane = SimpleNamespace(
            **{
                name: import_module(OURS + name)
                for name in ("host", "builders", "open", "relay", "map_runner", "relay_pool")
            }
        )
        library = import_module(OURS + "plugin_library")
        fields = import_module(OURS + "map_fields")
        (folder / library.NAME).touch()
        library.FOLDERS = (folder,)
        library.ctypes = SimpleNamespace(CDLL=lambda path, mode: None, RTLD_GLOBAL=0)
        fields.load_native = lambda: None
        fields.pack_map = _pack_map
        yield lane


def _pack_map(kvmap: Any, dtype: torch.dtype, device: torch.device) -> PackedMap:
    assert dtype == torch.bfloat16
    return PackedMap(fake_tensorrt.pack(kvmap), list(range(30)))
