"""A shared object of emulated kernels, called with numpy arrays."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

ORDERS = {"random": 0, "in order": 1, "reverse": 2}
COPIES = {"poisoned": 0, "at issue": 1, "at wait": 2}
PATHS = {"source": 0, "ptx": 1}
COUNTS = (
    "mma",
    "ldmatrix",
    "ldmatrix bank conflicts",
    "async copies",
    "barriers",
    "wgmma",
    "tensor copies",
    "switches",
)


class Library:
    """C functions that return nullptr, or a sentence about what went wrong."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def configure(
        self,
        order: str = "random",
        copies: str = "poisoned",
        path: str = "source",
        seed: int = 1,
        host_threads: int = 1,
    ) -> None:
        self._library.trtllmKvMapEmulatorConfigure(
            ORDERS[order], COPIES[copies], PATHS[path], ctypes.c_uint64(seed), host_threads
        )

    def call(self, function: str, *arguments: int | np.ndarray) -> str:
        """Call a function; arrays are passed by address, and must be contiguous. Returns the
        sentence, or nothing.
        """
        entry = getattr(self._library, function)
        entry.restype = ctypes.c_char_p
        passed = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                assert argument.flags.c_contiguous
                passed.append(ctypes.c_void_p(argument.ctypes.data))
            else:
                passed.append(ctypes.c_int(argument))
        sentence = entry(*passed)
        return sentence.decode() if sentence else ""

    def statistics(self) -> dict[str, int]:
        """What all launches so far have counted."""
        counts = (ctypes.c_uint64 * len(COUNTS))()
        self._library.trtllmKvMapEmulatorStatistics(counts)
        return dict(zip(COUNTS, counts, strict=True))
