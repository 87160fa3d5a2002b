"""The backends by name, and the map as one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.mapper.contract import Mapper, Span
from trtllm_kvmap.mapper.cpu import CpuMapper
from trtllm_kvmap.mapper.cuda import CudaMapper
from trtllm_kvmap.mapper.native import load_native
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.mapper.reference import ReferenceMapper

Backend = Literal["cpu", "cuda", "reference"]
BACKENDS: dict[str, Callable[[KvMap], Mapper]] = {
    "cpu": CpuMapper,
    "cuda": CudaMapper,
    "reference": ReferenceMapper,
}


def make_mapper(kvmap: KvMap, backend: str = "cpu") -> Mapper:
    """``kvmap`` made ready for ``backend``; keep it to map more than one span. Raises as
    require_backend.
    """
    require_backend(backend)
    return BACKENDS[backend](kvmap)


def require_backend(backend: str) -> None:
    """Raise InputError for a backend that does not exist, UnavailableError for ``cuda`` where the
    native part is not built: ask before models are loaded.
    """
    if backend not in BACKENDS:
        raise InputError(f"There is no backend {backend!r}; choose one of {', '.join(BACKENDS)}.")
    if backend == "cuda":
        load_native()


def map_kv(kvmap: KvMap, source: KvPool, target: KvPool, span: Span, backend: str = "cpu") -> None:
    """Map one span of ``source`` into ``target``; see contract for promises and errors."""
    make_mapper(kvmap, backend).map_kv(source, target, span)
