"""What a target pool must hold after a map, from the formula, in float64.

y = R_target(p) ( sum_i R_source(p)^-1 x_i W_i + b ), where R(p) multiplies a pair of channels, read
as a complex number, by scale * exp(i p w). Written for the tests alone: all tokens of a group at
once and with complex numbers, so that it has nothing in common with a backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from case_build import Built, views_of
from cases import Case

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.spec.rope import RopeParams
from trtllm_kvmap.spec.slices import Slice

# What a backend may add to one rounding to the cache's dtype. Sums of up to 400 products, of size
# 1/20 each, in float32: below 1e-6 in practice, 1e-5 leaves room for another order of summation.
# fp8-e4m3 numbers below 2^-6 lie 2^-9 apart whatever their size. Verbatim copies get nothing.
ABSOLUTE = {
    "float32": 1e-5,
    "float16": 1e-5,
    "bfloat16": 1e-5,
    "float8_e4m3fn": 2.0**-9,
}


@dataclass(frozen=True)
class Expected:
    """Of the whole target memory, flat: the elements to be written, and their real values in the
    pool's own unit (divided by its scale), float64.
    """

    written: torch.Tensor
    values: torch.Tensor


def expect(case: Case, built: Built) -> Expected:
    values = torch.zeros(built.target_memory.numel(), dtype=torch.float64)
    written = torch.zeros(built.target_memory.numel(), dtype=torch.bool)
    value_views = views_of(case.target, case, values)
    written_views = views_of(case.target, case, written)
    span, dim = built.span, case.target.head_dim
    kept = (span.source_slots >= 0) & (span.target_slots >= 0)
    slots, positions = span.target_slots[kept], span.positions[kept]
    for group in built.kvmap.groups:
        turn = not case.verbatim  # what stays as it is, is not turned to and fro either
        x = torch.cat([_content(s, built, kept, turn) for s in group.slices], dim=1)
        x = _product(group, x)
        field = 0 if group.field == "key" else 1
        scale = (built.target.key_scale, built.target.value_scale)[field]
        for number, head in enumerate(group.heads):
            y = x[:, number * dim : (number + 1) * dim]
            if group.field == "key" and turn:
                rope = built.kvmap.target.rope
                y = _turned(y, rope, positions, span.target_length, backwards=False)
            if case.target.dtype == "float8_e4m3fn":
                y = (y / scale).clamp(-448, 448) * scale
            for token, slot in enumerate(slots.tolist()):
                block, offset = divmod(slot, value_views[field][group.layer].shape[2])
                value_views[field][group.layer][block, head, offset] = y[token] / scale
                written_views[field][group.layer][block, head, offset] = True
    return Expected(written, values)


def _product(group: HeadGroup, x: torch.Tensor) -> torch.Tensor:
    """sum_f x_f W_fo s_o + b_o + sum_h a(sum_f x_f D_fh + c_h) U_ho, and x itself for a copy."""
    if group.bias is None:
        return x
    y = group.bias.double().repeat(len(x), 1)
    if group.weight is not None:
        scale = torch.ones(y.shape[1]) if group.weight_scale is None else group.weight_scale
        y += torch.einsum("tf,fo,o->to", x, group.weight.double(), scale.double())
    if group.second is not None:
        term = group.second
        hidden = torch.einsum("tf,fh->th", x, term.down.double()) + term.offset.double()
        if term.activation == "silu":
            hidden = hidden * torch.sigmoid(hidden)
        y += torch.einsum("th,ho->to", hidden, term.up.double())
    return y


def _content(s: Slice, built: Built, kept: torch.Tensor, turn: bool) -> torch.Tensor:
    """float64 [tokens, head_dim]: the slice, without its rotation if ``turn``."""
    span, pool = built.span, built.source
    if s.origin == "target":
        table = built.kvmap.token_table
        return (table.keys if s.field == "key" else table.values)[
            span.token_ids[kept], s.head
        ].double()
    views, scale = (
        (pool.keys, pool.key_scale) if s.field == "key" else (pool.values, pool.value_scale)
    )
    rows = []
    for slot in span.source_slots[kept].tolist():
        block, offset = divmod(slot, views[s.layer].shape[2])
        rows.append(views[s.layer][block, s.head, offset].double() * scale)
    x = torch.stack(rows) if rows else torch.zeros(0, views[0].shape[3], dtype=torch.float64)
    if s.field == "value" or not turn:
        return x
    rope = built.kvmap.source.rope
    return _turned(x, rope, span.positions[kept], span.source_length, backwards=True)


def _turned(
    x: torch.Tensor, rope: RopeParams, positions: torch.Tensor, length: int, backwards: bool
) -> torch.Tensor:
    half = rope.rotary_dim // 2
    frequencies = torch.from_numpy(rope.inverse_frequencies(length))
    factor = torch.polar(
        torch.full((len(positions), half), rope.attention_factor, dtype=torch.float64),
        positions.double()[:, None] * frequencies,
    )
    if rope.interleaved:
        a, b = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        a, b = slice(0, half), slice(half, 2 * half)
    z = torch.complex(x[:, a], x[:, b])
    z = z / factor if backwards else z * factor
    y = x.clone()
    y[:, a], y[:, b] = z.real, z.imag
    return y
