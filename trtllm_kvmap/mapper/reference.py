"""Backend ``reference``: the contract written out, token by token, in numpy float64.

It is here to be read and to be compared with. Nothing in it is shared with a fast backend.
"""

from __future__ import annotations

import numpy as np
import torch

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.mapper.contract import Span, check, same_rotation
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.spec.layout import SKIP
from trtllm_kvmap.spec.rope import RopeTable, rope_table
from trtllm_kvmap.spec.slices import Field, Slice


class ReferenceMapper:
    """``map_kv`` as its formula reads: y = R_target( sum_i R_source^-1(x_i) W_i + b )."""

    def __init__(self, kvmap: KvMap) -> None:
        self.kvmap = kvmap

    def map_kv(self, source: KvPool, target: KvPool, span: Span) -> None:
        """Map one span; see contract for shapes, promises and errors."""
        check(self.kvmap, source, target, span)
        if span.num_tokens == 0:
            return
        num_positions = int(span.positions.max()) + 1
        source_table = rope_table(self.kvmap.source.rope, num_positions, span.source_length)
        target_table = rope_table(self.kvmap.target.rope, num_positions, span.target_length)
        alike = same_rotation(self.kvmap, span)
        for token in range(span.num_tokens):
            source_slot, target_slot = int(span.source_slots[token]), int(span.target_slots[token])
            if source_slot == SKIP or target_slot == SKIP:
                continue
            position = int(span.positions[token])
            token_id = -1 if span.token_ids is None else int(span.token_ids[token])
            for group in self.kvmap.groups:
                moved = alike and _copies_source_keys(group)
                inputs = []
                for s in group.slices:
                    x = self._read(s, source, source_slot, token_id)
                    if s.origin == "source" and s.field == "key" and not moved:
                        x = _unrotate(x, source_table, position)
                    inputs.append(x)
                outputs = _product(group, np.concatenate(inputs)).reshape(len(group.heads), -1)
                for head, y in zip(group.heads, outputs, strict=True):
                    if group.field == "key" and not moved:
                        y = _rotate(y, target_table, position)
                    _write(target, group.field, group.layer, head, target_slot, y)

    def _read(self, s: Slice, source: KvPool, slot: int, token_id: int) -> np.ndarray:
        """One slice of one token in real numbers, float64 [head_dim]."""
        if s.origin == "source":
            views, scale = source.field(s.field)
            block, offset = divmod(slot, source.tokens_per_block)
            return _float64(views[s.layer][block, s.head, offset]) * scale
        table = self.kvmap.token_table
        assert table is not None  # contract.check: a map that reads its own slices carries one
        return _float64((table.keys if s.field == "key" else table.values)[token_id, s.head])


def _copies_source_keys(group: HeadGroup) -> bool:
    """Whether this group copies keys to keys; under one rotation they then stay as they are."""
    copy = group.copies and group.field == "key"
    return copy and all(s.origin == "source" and s.field == "key" for s in group.slices)


def _product(group: HeadGroup, x: np.ndarray) -> np.ndarray:
    """x W + b + a(x D + c) U, with W = stored weight times the scale of its column."""
    if group.bias is None:
        return x
    y = _float64(group.bias)
    if group.weight is not None:
        weight = _float64(group.weight)
        if group.weight_scale is not None:
            weight = weight * _float64(group.weight_scale)
        y = y + x @ weight
    if group.second is not None:
        hidden = x @ _float64(group.second.down) + _float64(group.second.offset)
        if group.second.activation == "silu":
            hidden = hidden / (1.0 + np.exp(-hidden))
        y = y + hidden @ _float64(group.second.up)
    return np.asarray(y)


def _pairs(table: RopeTable) -> tuple[np.ndarray, np.ndarray]:
    """The channels that turn together: (2i, 2i + 1) when interleaved, else (i, i + half)."""
    index = np.arange(table.rotary_dim // 2)
    if table.interleaved:
        return 2 * index, 2 * index + 1
    return index, index + table.rotary_dim // 2


def _rotate(x: np.ndarray, table: RopeTable, position: int) -> np.ndarray:
    first, second = _pairs(table)
    cos, sin, y = table.cos[position], table.sin[position], x.copy()
    y[first] = table.scale * (x[first] * cos - x[second] * sin)
    y[second] = table.scale * (x[second] * cos + x[first] * sin)
    return y


def _unrotate(y: np.ndarray, table: RopeTable, position: int) -> np.ndarray:
    first, second = _pairs(table)
    cos, sin, x = table.cos[position], table.sin[position], y.copy()
    x[first] = (y[first] * cos + y[second] * sin) / table.scale
    x[second] = (y[second] * cos - y[first] * sin) / table.scale
    return x


def _write(target: KvPool, field: Field, layer: int, head: int, slot: int, y: np.ndarray) -> None:
    views, scale = target.field(field)
    block, offset = divmod(slot, target.tokens_per_block)
    stored = torch.from_numpy(_rounded(y / scale, target.dtype))
    views[layer][block, head, offset] = stored.to(target.device, target.dtype)


def _rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """``x`` rounded once, half to even, to the numbers that ``dtype`` has, still as float64.

    Too large a number becomes infinity, except that fp8-e4m3, which has none, saturates.
    """
    info = torch.finfo(dtype)
    _, exponent = np.frexp(x)  # |x| lies in [2^(exponent - 1), 2^exponent)
    step = info.eps * np.maximum(np.ldexp(1.0, exponent - 1), info.smallest_normal)
    y = np.rint(x / step) * step
    if dtype == torch.float8_e4m3fn:
        return np.asarray(np.clip(y, -info.max, info.max))
    return np.asarray(np.where(np.abs(y) > info.max, np.copysign(np.inf, y), y))


def _float64(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(tensor.detach().to("cpu", torch.float64).numpy())
