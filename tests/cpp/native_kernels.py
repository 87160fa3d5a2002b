"""The native map on tensors: packs a KvMap, describes pools, calls the CPU version or the emulated
kernels.
"""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from native_build import build_library, kernel_sources
from native_structs import (
    BFLOAT16,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    SIZED,
    MapGroupSpec,
    MapParams,
    MapSpec,
    ModelShape,
    PackedMap,
    PoolView,
    RopeTable,
    Slice,
    Span,
    Status,
    TokenTable,
)

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.mapper.contract import Span as TokenSpan
from trtllm_kvmap.mapper.contract import same_rotation
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.rope import rope_table

DTYPES = {
    torch.float32: FLOAT32,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.float8_e4m3fn: FLOAT8,
}
POISON = 0xFF  # a NaN in every type


class RefusedError(Exception):
    """A status that is not OK: its sentence."""


@dataclass
class Prepared:
    """A call's params, and everything its pointers lead to."""

    params: MapParams
    kept: list[object] = field(default_factory=list)


def load(path: Path) -> c.CDLL:
    """The library behind kernelDriver.cpp, its structs compared with ours."""
    library = c.CDLL(str(path))
    sizes = (c.c_int64 * len(SIZED))()
    library.kernelSizes(sizes)
    assert list(sizes) == [c.sizeof(struct) for struct in SIZED], "native_structs.py is out of date"
    library.kernelWorkspaceSize.restype = c.c_size_t
    library.kernelWorkspaceSize.argtypes = [
        c.POINTER(PackedMap),
        c.c_int64,
        c.c_int32,
        c.c_int32,
    ]
    return library


def emulated() -> c.CDLL:
    return load(
        build_library(
            "kernels", kernel_sources(), flags=("-DTRTLLM_KVMAP_EMULATE", "-march=native")
        )
    )


def require(status: Status) -> None:
    if status.code:
        raise RefusedError(status.sentence.decode())


def aligned(num_bytes: int, byte: int = POISON) -> torch.Tensor:
    """uint8 [num_bytes], beginning at a multiple of 256, full of ``byte``."""
    memory = torch.full((num_bytes + 256,), byte, dtype=torch.uint8)
    first = -memory.data_ptr() % 256
    return memory[first : first + num_bytes]


def shape_of(spec: ModelSpec) -> ModelShape:
    rope = spec.rope
    return ModelShape(*spec.kv_shape, rope.rotary_dim, int(rope.interleaved))


def map_spec(kvmap: KvMap, compute_type: int) -> tuple[MapSpec, list[object]]:
    """The map as packMap wants it, fp8-e4m3 weights kept where a matrix has them, and what must be
    kept alive meanwhile.
    """
    float8 = any(given.weight_scale is not None for given in kvmap.groups)
    kept: list[object] = []
    groups = (MapGroupSpec * len(kvmap.groups))()
    for group, given in zip(groups, kvmap.groups, strict=True):
        heads = (c.c_int32 * len(given.heads))(*given.heads)
        slices = (Slice * len(given.slices))(
            *(
                Slice(int(s.origin == "target"), int(s.field == "value"), s.layer, s.head)
                for s in given.slices
            )
        )
        kept += [heads, slices]
        group.field, group.layer = int(given.field == "value"), given.layer
        group.num_heads, group.num_slices = len(heads), len(slices)
        group.heads, group.slices = heads, slices
        if given.weight is not None and given.bias is not None:
            weight, bias = given.weight.float().contiguous(), given.bias.float().contiguous()
            kept += [weight, bias]
            group.weight, group.bias = weight.data_ptr(), bias.data_ptr()
        if given.weight_scale is not None:
            scale = given.weight_scale.float().contiguous()
            kept.append(scale)
            group.scale = scale.data_ptr()
    kept.append(groups)
    spec = MapSpec(
        shape_of(kvmap.source),
        shape_of(kvmap.target),
        compute_type,
        FLOAT8 if float8 else compute_type,
        len(groups),
        groups,
    )
    return spec, kept


def pack(library: c.CDLL, kvmap: KvMap, compute_type: int) -> tuple[PackedMap, torch.Tensor]:
    spec, _kept = map_spec(kvmap, compute_type)
    size, status, packed = c.c_size_t(), Status(), PackedMap()
    library.kernelPackedMapSize(c.byref(spec), c.byref(size), c.byref(status))
    require(status)
    blob = aligned(size.value)
    library.kernelPackMap(
        c.byref(spec), c.c_void_p(blob.data_ptr()), size, c.byref(packed), c.byref(status)
    )
    require(status)
    return packed, blob


def pool_view(pool: KvPool) -> PoolView:
    view = PoolView()
    for index, tensors in enumerate((pool.keys, pool.values)):
        for layer, tensor in enumerate(tensors):
            assert tensor.stride() == pool.keys[0].stride()
            view.layers[index][layer] = tensor.data_ptr()
    strides = pool.keys[0].stride()
    view.block_stride, view.head_stride, view.token_stride, view.channel_stride = strides
    view.num_blocks, view.num_kv_heads, view.tokens_per_block, view.head_dim = pool.keys[0].shape
    view.num_layers, view.dtype = len(pool.keys), DTYPES[pool.dtype]
    view.scale[0], view.scale[1] = pool.key_scale, pool.value_scale
    return view


def _rope(spec: ModelSpec, num_positions: int, length: int) -> tuple[RopeTable, list[object]]:
    table = rope_table(spec.rope, num_positions, length)
    cos, sin = (np.ascontiguousarray(part, np.float32) for part in (table.cos, table.sin))
    return RopeTable(cos.ctypes.data, sin.ctypes.data, num_positions, table.scale), [cos, sin]


def prepare(
    library: c.CDLL,
    kvmap: KvMap,
    source: KvPool,
    target: KvPool,
    span: TokenSpan,
    *,
    compute_type: int,
    variant: int = 0,
    chunk_tokens: int = 0,
    index_type: torch.dtype = torch.int64,
) -> Prepared:
    """Everything a call needs, its workspace poisoned and exactly as large as asked for."""
    packed, blob = pack(library, kvmap, compute_type)
    kept: list[object] = [blob]
    params = MapParams(map=packed, source=pool_view(source), target=pool_view(target))
    indices = [span.source_slots, span.target_slots, span.positions, span.token_ids]
    tensors = [None if t is None else t.to(index_type).contiguous() for t in indices]
    params.span = Span(
        *(None if t is None else t.data_ptr() for t in tensors),
        span.num_tokens,
        int(index_type == torch.int64),
    )
    num_positions = int(span.positions.max()) + 1 if span.num_tokens else 1
    params.source_rope, more = _rope(kvmap.source, num_positions, span.source_length)
    params.target_rope, most = _rope(kvmap.target, num_positions, span.target_length)
    if kvmap.token_table is not None:
        table = kvmap.token_table
        params.token_table = TokenTable(
            (c.c_void_p * 2)(table.keys.data_ptr(), table.values.data_ptr()),
            table.keys.shape[0],
            DTYPES[table.keys.dtype],
        )
    params.same_rotation = int(same_rotation(kvmap, span))
    params.variant, params.chunk_tokens = variant, chunk_tokens
    size = library.kernelWorkspaceSize(c.byref(packed), span.num_tokens, chunk_tokens, variant)
    workspace = aligned(size)
    params.workspace, params.workspace_bytes = workspace.data_ptr() if size else None, size
    return Prepared(params, [*kept, *tensors, *more, *most, workspace, kvmap])


def call(library: c.CDLL, function: str, prepared: Prepared) -> None:
    """kernelMap, kernelMapCpu or kernelValidate; raises RefusedError with the sentence."""
    status = Status()
    getattr(library, function)(c.byref(prepared.params), c.byref(status))
    require(status)
