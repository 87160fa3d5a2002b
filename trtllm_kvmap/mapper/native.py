"""The native part: a library of torch operators (cpp/bindings), found and loaded when it is asked
for.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from trtllm_kvmap.errors import UnavailableError

NAME = "libtrtllm_kvmap_torch.so"
_PACKAGE = Path(__file__).resolve().parent.parent
# In a wheel beside the package's modules; in a checkout where build_native.py puts it.
FOLDERS = (_PACKAGE / "lib", _PACKAGE.parent / "build" / "native")


def native_library() -> Path | None:
    """The library that load_native would load, or None when it is not built. Loads nothing."""
    return next((folder / NAME for folder in FOLDERS if (folder / NAME).is_file()), None)


def load_native() -> None:
    """Make ``torch.ops.trtllm_kvmap`` ready. Raises UnavailableError when there is no library, or
    one that this torch cannot load.
    """
    if hasattr(torch.ops.trtllm_kvmap, "map_kv"):
        return  # also when the caller loaded a library of another folder
    path = native_library()
    if path is None:
        raise UnavailableError(
            "The native part, which backend `cuda` needs, is not built. Run `python "
            "build_scripts/build_native.py`, or use the backend `cpu`."
        )
    _load(path)


@lru_cache(maxsize=1)
def _load(path: Path) -> None:
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise UnavailableError(
            f"{path} cannot be loaded by torch {torch.__version__} ({error}). Build it again with "
            f"`python build_scripts/build_native.py`."
        ) from error
