"""A conformance case on the emulated kernels: when it can run, and how its call is made ready."""

from __future__ import annotations

import ctypes as c
import shutil
from typing import Any

import pytest
from half_cases import Built
from native_build import cuda_include
from native_kernels import Prepared, prepare

NEEDS_EMULATOR = pytest.mark.skipif(
    shutil.which("g++") is None or not (cuda_include() / "cuda_bf16.h").exists(),
    reason="needs g++ and the CUDA headers (CUDA_HOME)",
)


def prepare_built(library: c.CDLL, built: Built, **options: Any) -> Prepared:
    """native_kernels.prepare for the map, pools and span of ``built``."""
    return prepare(library, built.kvmap, built.source, built.target, built.span, **options)
