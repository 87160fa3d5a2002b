"""The plugin's library: found where build_native.py puts it, loaded into TensorRT's registry."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

from trtllm_kvmap.engine.host import trt
from trtllm_kvmap.errors import UnavailableError
from trtllm_kvmap.mapper.native import FOLDERS

NAME = "libtrtllm_kvmap_plugin.so"
PLUGIN, PLUGIN_VERSION, NAMESPACE = "KvMap", "1", "trtllm_kvmap"


def plugin_library() -> Path:
    """Raises UnavailableError when it is not built."""
    for folder in FOLDERS:
        if (folder / NAME).is_file():
            return folder / NAME
    raise UnavailableError(
        f"The TensorRT plugin ({NAME}) is not built; run `python build_scripts/build_native.py` "
        f"with this interpreter."
    )


@lru_cache(maxsize=1)
def plugin_creator() -> Any:
    """The plugin's creator. Its library is loaded first, which a process must do before it
    deserialises a map engine.
    """
    path = plugin_library()
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    registry = trt.get_plugin_registry()
    registry.load_library(str(path))
    creator = registry.get_creator(PLUGIN, PLUGIN_VERSION, NAMESPACE)
    if creator is None:
        raise UnavailableError(
            f"{path} was loaded, but TensorRT's registry has no plugin {PLUGIN}; the log says why."
        )
    return creator
