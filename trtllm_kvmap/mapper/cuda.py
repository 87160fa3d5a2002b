"""Backend ``cuda``: the native kernels, on pools in GPU memory, in place.

The work goes to the device's current stream and nothing waits for it. The same operator takes pools
in CPU memory, where it is the plain formula in C++.

Indices in CPU memory are checked like those of every backend and sent along. Indices already on the
GPU cannot be looked at without waiting for it, so of them only shape and dtype are checked: a slot
or position out of range skips its token, and naming a target slot twice is the caller's mistake.
With them a call can be captured in a CUDA graph, once a first call has packed the map and made the
RoPE tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import FLOAT8, KvMap
from trtllm_kvmap.errors import InputError, MismatchError, UnavailableError
from trtllm_kvmap.mapper.contract import Span, check, same_rotation
from trtllm_kvmap.mapper.native import load_native
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.rope import RopeParams, rope_table

VARIANTS = ("auto", "wide", "narrow", "small_t", "hopper")
_FIELD = {"key": 0, "value": 1}
_ORIGIN = {"source": 0, "target": 1}


@dataclass(frozen=True, slots=True)
class PackedMap:
    """A map as the kernels read it: uint8 [bytes] on the pools' device, and the integers that say
    what lies where.
    """

    blob: torch.Tensor
    layout: list[int]


class CudaMapper:
    """See contract. Packs the map once for each device and dtype it is asked to work on.

    ``variant`` names the kernel (tests compare them; ``auto`` chooses by token count and map);
    ``chunk_tokens`` bounds the workspace, 0 leaves it to the kernels. Raises UnavailableError when
    the native part is not built.
    """

    def __init__(self, kvmap: KvMap, variant: str = "auto", chunk_tokens: int = 0) -> None:
        if variant not in VARIANTS:
            raise InputError(
                f"There is no kernel variant {variant!r}; use one of {', '.join(VARIANTS)}."
            )
        load_native()
        self.kvmap = kvmap
        self._variant = VARIANTS.index(variant)
        self._chunk_tokens = chunk_tokens
        self._packed: dict[tuple[torch.device, torch.dtype], PackedMap] = {}
        self._ropes: dict[tuple[torch.device, RopeParams, int, int], torch.Tensor] = {}
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def map_kv(self, source: KvPool, target: KvPool, span: Span) -> None:
        """Map one span; see contract for shapes, promises and errors."""
        known = span.positions.device.type == "cpu"
        check(self.kvmap, source, target, span if known else _EMPTY)
        device = target.device
        packed = self.packed(device, compute_dtype(target))
        num_positions = self._num_positions(span.positions if known else None)
        ropes = [
            self._rope(spec.rope, length, num_positions, device)
            for spec, length in (
                (self.kvmap.source, span.source_length),
                (self.kvmap.target, span.target_length),
            )
        ]
        keys, values = self._token_table(device)
        ids = span.token_ids if self.kvmap.reads_token_ids else None
        try:
            torch.ops.trtllm_kvmap.map_kv(
                packed.blob,
                packed.layout,
                source.keys,
                source.values,
                target.keys,
                target.values,
                [source.key_scale, source.value_scale, target.key_scale, target.value_scale],
                _on(device, span.source_slots),
                _on(device, span.target_slots),
                _on(device, span.positions),
                None if ids is None else _on(device, ids),
                *ropes,
                self.kvmap.source.rope.attention_factor,
                self.kvmap.target.rope.attention_factor,
                same_rotation(self.kvmap, span),
                keys,
                values,
                self._workspace(packed, span.num_tokens, device),
                self._chunk_tokens,
                self._variant,
            )
        except ValueError as error:  # what the contract does not know of: strides, alignment
            raise MismatchError(str(error).splitlines()[0]) from error
        except NotImplementedError as error:  # this build has no CUDA, this GPU no such kernel
            raise UnavailableError(str(error).splitlines()[0]) from error

    def packed(self, device: torch.device, dtype: torch.dtype) -> PackedMap:
        """The map packed for products in ``dtype``, on ``device``; made once."""
        key = (device, dtype)
        if key not in self._packed:
            widen = self._variant == VARIANTS.index("hopper")
            self._packed[key] = pack_map(self.kvmap, dtype, device, widen=widen)
        return self._packed[key]

    def _num_positions(self, positions: torch.Tensor | None) -> int:
        """Rows of a RoPE table: a power of two, so that a growing conversation rarely needs a new
        one; all there can be when the positions are not known.
        """
        limit = min(self.kvmap.source.max_positions, self.kvmap.target.max_positions)
        if positions is None:
            return limit
        highest = int(positions.max()) if positions.numel() else 0
        return min(1 << highest.bit_length(), limit)

    def _rope(
        self, rope: RopeParams, length: int, num_positions: int, device: torch.device
    ) -> torch.Tensor:
        """float32 [2 (cos, sin), num_positions, rotary_dim / 2]."""
        key = (device, rope, rope.regime(length), num_positions)
        if key not in self._ropes:
            table = rope_table(rope, num_positions, length)
            pair = torch.stack([torch.from_numpy(table.cos), torch.from_numpy(table.sin)])
            self._ropes[key] = pair.to(device, torch.float32)
        return self._ropes[key]

    def _token_table(
        self, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        table = self.kvmap.token_table
        if table is None or not self.kvmap.reads_token_ids:
            return None, None
        if device not in self._tables:
            self._tables[device] = (
                table.keys.to(device).contiguous(),
                table.values.to(device).contiguous(),
            )
        return self._tables[device]

    def _workspace(self, packed: PackedMap, num_tokens: int, device: torch.device) -> torch.Tensor:
        # A buffer for each call, from torch's pool: calls on two streams must not share one.
        size = 0
        if device.type != "cpu":
            size = torch.ops.trtllm_kvmap.workspace_size(
                packed.layout, num_tokens, self._chunk_tokens, self._variant
            )
        return torch.empty(size, dtype=torch.uint8, device=device)


def compute_dtype(target: KvPool) -> torch.dtype:
    """What weights and un-rotated keys are rounded to: the target's own half type on a GPU, float32
    on a CPU, where nothing is rounded but the result.
    """
    if target.device.type == "cpu" or target.dtype == torch.float32:
        return torch.float32
    return torch.float16 if target.dtype == torch.float16 else torch.bfloat16


def pack_map(
    kvmap: KvMap, dtype: torch.dtype, device: torch.device, *, widen: bool = False
) -> PackedMap:
    """Lay the map out for products in ``dtype`` (float32, float16 or bfloat16) and put it on
    ``device``. Needs load_native.

    Weights are rounded once to ``dtype``. Those of a map that holds float8_e4m3fn throughout stay
    as they are, at half the bytes, their scales in float32 beside them, unless ``widen``, which
    the variant ``hopper`` needs.
    """
    float8 = not widen and _holds_float8(kvmap)
    groups: list[int] = []
    for group in kvmap.groups:
        groups += [_FIELD[group.field], group.layer, len(group.heads), len(group.slices)]
        groups += group.heads
        for s in group.slices:
            groups += [_ORIGIN[s.origin], _FIELD[s.field], s.layer, s.head]
    matrices = [_scaled(group) if float8 else _multiplied(group) for group in kvmap.groups]
    weights, biases, scales = (
        [t.float().cpu().contiguous() for t in each] for each in zip(*matrices, strict=True)
    )
    blob, layout = torch.ops.trtllm_kvmap.pack_map(
        _shape(kvmap.source),
        _shape(kvmap.target),
        groups,
        weights,
        biases,
        scales,
        dtype,
        FLOAT8 if float8 else dtype,
    )
    return PackedMap(blob.to(device), layout)


def _holds_float8(kvmap: KvMap) -> bool:
    """Whether every matrix is stored in float8_e4m3fn, and there is one."""
    stored = [
        g.weight is not None and g.weight.dtype == FLOAT8 and g.second is None
        for g in kvmap.groups
        if not g.copies
    ]
    return bool(stored) and all(stored)


def _scaled(group: HeadGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weight, bias, factors of its columns), all empty for a copy."""
    if group.weight is None or group.bias is None or group.weight_scale is None:
        return _EMPTY_MATRIX
    return group.weight, group.bias, group.weight_scale


def _multiplied(group: HeadGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with every factor multiplied in."""
    linear = group.linear()
    return _EMPTY_MATRIX if linear is None else (*linear, torch.empty(0))


def _shape(spec: ModelSpec) -> list[int]:
    return [*spec.kv_shape, spec.rope.rotary_dim, int(spec.rope.interleaved)]


def _on(device: torch.device, indices: torch.Tensor) -> torch.Tensor:
    return indices.contiguous().to(device, non_blocking=True)


_EMPTY_MATRIX = (torch.empty(0),) * 3
_NOTHING = torch.empty(0, dtype=torch.int64)
_EMPTY = Span(_NOTHING, _NOTHING, _NOTHING, token_ids=_NOTHING)
