"""Single opcodes of PTX: their definition in the PTX ISA, and values that sit at the edges."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Opcode:
    """``text`` with {d}, {a}, {b}, {c} for registers; ``types`` are those of d, a, b, c as numpy
    names them; ``define`` computes d from Python numbers (ints, or floats).
    """

    text: str
    types: tuple[str, ...]
    define: Callable[..., int | float]
    values: Sequence[Sequence[int | float]] = ()

    @property
    def name(self) -> str:
        return self.text.split()[0]


U32 = [0, 1, 2, 7, 31, 32, 33, 255, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, 0xFFFFFFFF]
S32 = [0, 1, -1, 7, -7, 32, 12345, -54321, 2**31 - 1, -(2**31)]
S64 = [0, 1, -1, 2**40 + 3, -(2**40), 2**63 - 1, -(2**63)]
F32 = [0.0, -0.0, 1.0, -1.5, 3.1415927410125732, 1e-40, 3e38, -2.5, 0.5, INF, -INF, NAN]
F32_FINITE = [0.0, 1.0, -1.5, 3.1415927410125732, 1e-40, 1e10, -2.5, 0.1]
SHIFTS = [0, 1, 5, 31, 32, 40]
# Subnormal, small, ordinary, negative, largest; a power of two that widens fp8.
F16X2 = [0x00010381, 0x3C00BC01, 0x7BFF8000, 0x5C005C00, 0x35550200]
BF16X2 = [0x00010045, 0x3F80BF81, 0x7F7F8000, 0x7B807B80, 0x3EAB0070]
F8 = [0.0, 1.0, -1.5, 0.0625, 447.0, 448.0, 500.0, -1e6, 0.001, 0.0021, NAN]


def f32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def signed(value: int, width: int) -> int:
    value &= 2**width - 1
    return value - 2**width if value >> (width - 1) else value


def rounded(dtype: torch.dtype) -> Callable[[float], int]:
    return lambda x: int(torch.tensor(x).to(dtype).view(torch.int16).item()) & 0xFFFF


def products(dtype: torch.dtype) -> Callable[[int, int], int]:
    """Both halves multiplied, in float64 and then rounded once."""

    def product(a: int, b: int) -> int:
        halves = torch.tensor([[n & 0xFFFF, n >> 16] for n in (a, b)], dtype=torch.int32)
        x, y = halves.to(torch.int16).view(dtype).double()
        low, high = (x * y).to(dtype).view(torch.int16).tolist()
        return (high & 0xFFFF) << 16 | (low & 0xFFFF)

    return product


def e4m3(value: float) -> int:
    """Nearest e4m3, ties to even; finite values saturate at 448."""
    if math.isnan(value):
        return 0x7F
    clamped = torch.tensor(max(-448.0, min(448.0, value)))
    return int(clamped.to(torch.float8_e4m3fn).view(torch.uint8).item())


def shift_right(a: int, n: int, width: int) -> int:
    return a >> min(n, width)  # Python's shift of a negative number repeats the sign


def field(a: int, position: int, length: int) -> int:
    return (a >> position) & ((1 << length) - 1) if length else 0


def signed_field(a: int, position: int, length: int) -> int:
    """bfe.s32: bits beyond the value repeat bit 31, as does the field its own top bit."""
    if length == 0:
        return 0
    return (
        signed(signed(a, 32) >> position, min(length, 64))
        if position < 32
        else (-1 if a >> 31 & 1 else 0)
    )


def insert(f: int, base: int, position: int, length: int) -> int:
    mask = ((1 << length) - 1) << position & 0xFFFFFFFF
    return (base & ~mask) | ((f << position) & mask)


def permute(a: int, b: int, selector: int) -> int:
    given = [(b << 32 | a) >> (8 * i) & 255 for i in range(8)]
    result = 0
    for i in range(4):
        nibble = selector >> (4 * i) & 15
        byte = given[nibble & 7]
        if nibble & 8:
            byte = 255 if byte & 128 else 0
        result |= byte << (8 * i)
    return result


def logic(a: int, b: int, c: int) -> int:
    """lop3 with table 0xD8: bit (4a + 2b + c) of the table, for each bit."""
    return sum(
        (0xD8 >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32)
    )


def saturated(x: float, low: int, high: int, whole: Callable[[float], float]) -> int:
    if math.isnan(x):
        return 0
    return low if x == -INF else high if x == INF else max(low, min(high, int(whole(x))))


def smaller(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return min((a, b), key=lambda x: (x, math.copysign(1, x)))


def larger(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return max((a, b), key=lambda x: (x, math.copysign(1, x)))


def quotient(a: int, b: int) -> int:
    return int(math.copysign(1, a) * math.copysign(1, b)) * (abs(a) // abs(b)) if b else 0


NONZERO = [v for v in S32 if v]
# fmt: off
OPCODES = [
    Opcode("add.s32 {d}, {a}, {b}", ("i4",) * 3, lambda a, b: a + b, (S32, S32)),
    Opcode("sub.s64 {d}, {a}, {b}", ("i8",) * 3, lambda a, b: a - b, (S64, S64)),
    Opcode("mul.lo.s32 {d}, {a}, {b}", ("i4",) * 3, lambda a, b: a * b, (S32, S32)),
    Opcode("mul.hi.u32 {d}, {a}, {b}", ("u4",) * 3, lambda a, b: a * b >> 32, (U32, U32)),
    Opcode("mul.hi.s32 {d}, {a}, {b}", ("i4",) * 3, lambda a, b: a * b >> 32, (S32, S32)),
    Opcode("mul.wide.s32 {d}, {a}, {b}", ("i8", "i4", "i4"), lambda a, b: a * b, (S32, S32)),
    Opcode("mul.wide.u32 {d}, {a}, {b}", ("u8", "u4", "u4"), lambda a, b: a * b, (U32, U32)),
    Opcode(
        "mad.lo.s32 {d}, {a}, {b}, {c}", ("i4",) * 4, lambda a, b, c: a * b + c, (S32, S32, S32)
    ),
    Opcode(
        "mad.wide.s32 {d}, {a}, {b}, {c}",
        ("i8", "i4", "i4", "i8"),
        lambda a, b, c: a * b + c,
        (S32, S32, S64),
    ),
    Opcode("div.s32 {d}, {a}, {b}", ("i4",) * 3, quotient, (S32, NONZERO)),
    Opcode(
        "rem.s32 {d}, {a}, {b}", ("i4",) * 3, lambda a, b: a - quotient(a, b) * b, (S32, NONZERO)
    ),
    Opcode("min.s32 {d}, {a}, {b}", ("i4",) * 3, min, (S32, S32)),
    Opcode("max.u32 {d}, {a}, {b}", ("u4",) * 3, max, (U32, U32)),
    Opcode("abs.s32 {d}, {a}", ("i4",) * 2, abs, (S32,)),
    Opcode("neg.s64 {d}, {a}", ("i8",) * 2, lambda a: -a, (S64,)),
    Opcode("and.b32 {d}, {a}, {b}", ("u4",) * 3, lambda a, b: a & b, (U32, U32)),
    Opcode("or.b64 {d}, {a}, {b}", ("i8",) * 3, lambda a, b: a | b, (S64, S64)),
    Opcode("xor.b32 {d}, {a}, {b}", ("u4",) * 3, lambda a, b: a ^ b, (U32, U32)),
    Opcode("not.b32 {d}, {a}", ("u4",) * 2, lambda a: ~a, (U32,)),
    Opcode("shl.b32 {d}, {a}, {b}", ("u4",) * 3, lambda a, n: a << n, (U32, SHIFTS)),
    Opcode("shr.u32 {d}, {a}, {b}", ("u4",) * 3, lambda a, n: shift_right(a, n, 32), (U32, SHIFTS)),
    Opcode("shr.s32 {d}, {a}, {b}", ("i4", "i4", "u4"), lambda a, n: shift_right(a, n, 32),
           (S32, SHIFTS)),
    Opcode("shl.b64 {d}, {a}, {b}", ("i8", "i8", "u4"), lambda a, n: a << n, (S64, SHIFTS)),
    Opcode(
        "shf.l.wrap.b32 {d}, {a}, {b}, {c}",
        ("u4",) * 4,
        lambda a, b, n: ((b << 32 | a) << (n & 31)) >> 32,
        (U32, U32, SHIFTS),
    ),
    Opcode(
        "shf.r.clamp.b32 {d}, {a}, {b}, {c}",
        ("u4",) * 4,
        lambda a, b, n: (b << 32 | a) >> min(n, 32),
        (U32, U32, SHIFTS),
    ),
    Opcode("bfi.b32 {d}, {a}, {b}, {c}, 8", ("u4",) * 4,
           lambda f, base, p: insert(f, base, p, 8), (U32, U32, SHIFTS)),
    Opcode("bfe.u32 {d}, {a}, {b}, {c}", ("u4",) * 4, field, (U32, SHIFTS, SHIFTS)),
    Opcode("bfe.s32 {d}, {a}, {b}, {c}", ("i4", "u4", "u4", "u4"), signed_field,
           (U32, SHIFTS, SHIFTS)),
    Opcode("prmt.b32 {d}, {a}, {b}, {c}", ("u4",) * 4, permute,
           (U32, U32, [0x3210, 0x7654, 0x5410, 0x8D3F])),
    Opcode("lop3.b32 {d}, {a}, {b}, {c}, 0xD8", ("u4",) * 4, logic, (U32, U32, U32)),
    Opcode("brev.b32 {d}, {a}", ("u4",) * 2, lambda a: int(f"{a:032b}"[::-1], 2), (U32,)),
    Opcode("popc.b32 {d}, {a}", ("u4",) * 2, lambda a: a.bit_count(), (U32,)),
    Opcode("clz.b32 {d}, {a}", ("u4",) * 2, lambda a: 32 - a.bit_length(), (U32,)),
    Opcode("add.f32 {d}, {a}, {b}", ("f4",) * 3, lambda a, b: f32(a + b), (F32, F32)),
    Opcode("sub.f32 {d}, {a}, {b}", ("f4",) * 3, lambda a, b: f32(a - b), (F32, F32)),
    Opcode("mul.f32 {d}, {a}, {b}", ("f4",) * 3, lambda a, b: f32(a * b), (F32, F32)),
    Opcode(
        "fma.rn.f32 {d}, {a}, {b}, {c}",
        ("f4",) * 4,
        # In float64 the product is exact, and with these values the sum is as well.
        lambda a, b, c: f32(a * b + c),
        ([1.0000001192092896, -1.5, 3.0], [1.0000001192092896, 0.1], [-1.0, 0.25, 1.0]),
    ),
    Opcode("div.rn.f32 {d}, {a}, {b}", ("f4",) * 3, lambda a, b: f32(a / b) if b else NAN,
           (F32_FINITE, [1.0, -3.0, 0.1, 7.0])),
    Opcode("sqrt.rn.f32 {d}, {a}", ("f4",) * 2, lambda a: f32(math.sqrt(a)),
           ([0.0, 2.0, 0.1, 9.0],)),
    Opcode("rcp.rn.f32 {d}, {a}", ("f4",) * 2, lambda a: f32(1 / a), ([1.0, 3.0, -0.1],)),
    Opcode("mul.rn.f16x2 {d}, {a}, {b}", ("u4",) * 3, products(torch.float16), (F16X2, F16X2)),
    Opcode("fma.rn.bf16x2 {d}, {a}, {b}, 0x80008000", ("u4",) * 3, products(torch.bfloat16),
           (BF16X2, BF16X2)),
    Opcode("min.f32 {d}, {a}, {b}", ("f4",) * 3, smaller, (F32, F32)),
    Opcode("max.f32 {d}, {a}, {b}", ("f4",) * 3, larger, (F32, F32)),
    Opcode("abs.f32 {d}, {a}", ("f4",) * 2, abs, (F32,)),
    Opcode("neg.f32 {d}, {a}", ("f4",) * 2, lambda a: -a, (F32,)),
    Opcode("mov.b32 {d}, {a}", ("u4",) * 2, lambda a: a, (U32,)),
    Opcode("mov.f32 {d}, 0f40490FDB", ("f4",), lambda: 3.1415927410125732),
    Opcode("mov.b32 {d}, {{ {a}, {b} }}", ("u4", "u2", "u2"), lambda a, b: a | b << 16,
           ([0, 1, 0xFFFF], [0, 0x8001, 0xFFFF])),
    Opcode("cvt.s64.s32 {d}, {a}", ("i8", "i4"), lambda a: a, (S32,)),
    Opcode("cvt.u64.u32 {d}, {a}", ("u8", "u4"), lambda a: a, (U32,)),
    Opcode("cvt.u32.u64 {d}, {a}", ("u4", "i8"), lambda a: a, (S64,)),
    Opcode("cvt.s32.s8 {d}, {a}", ("i4", "u4"), lambda a: signed(a, 8), (U32,)),
    Opcode("cvt.u16.u32 {d}, {a}", ("u2", "u4"), lambda a: a, (U32,)),
    Opcode("cvt.rn.f32.s32 {d}, {a}", ("f4", "i4"), lambda a: f32(a), (S32,)),
    Opcode("cvt.rn.f32.u32 {d}, {a}", ("f4", "u4"), lambda a: f32(a), (U32,)),
    Opcode("cvt.rzi.s32.f32 {d}, {a}", ("i4", "f4"),
           lambda a: saturated(a, -(2**31), 2**31 - 1, math.trunc), (F32,)),
    Opcode("cvt.rni.u32.f32 {d}, {a}", ("u4", "f4"),
           lambda a: saturated(a, 0, 2**32 - 1, round), (F32,)),
    Opcode("cvt.rn.bf16.f32 {d}, {a}", ("u2", "f4"), rounded(torch.bfloat16), (F32[:-1],)),
    Opcode("cvt.rn.f16.f32 {d}, {a}", ("u2", "f4"), rounded(torch.float16), (F32[:-1],)),
    Opcode("cvt.rn.bf16x2.f32 {d}, {a}, {b}", ("u4", "f4", "f4"),
           lambda a, b: rounded(torch.bfloat16)(a) << 16 | rounded(torch.bfloat16)(b),
           (F32[:-1], F32[:-1])),
    Opcode("cvt.rn.satfinite.e4m3x2.f32 {d}, {a}, {b}", ("u2", "f4", "f4"),
           lambda a, b: e4m3(a) << 8 | e4m3(b), (F8, F8)),
    Opcode("setp.lt.s32 {d}, {a}, {b}", ("?", "i4", "i4"), lambda a, b: a < b, (S32, S32)),
    Opcode("setp.hs.u32 {d}, {a}, {b}", ("?", "u4", "u4"), lambda a, b: a >= b, (U32, U32)),
    Opcode("setp.ne.f32 {d}, {a}, {b}", ("?", "f4", "f4"),
           lambda a, b: a != b and not (math.isnan(a) or math.isnan(b)), (F32, F32)),
    Opcode("setp.leu.f32 {d}, {a}, {b}", ("?", "f4", "f4"), lambda a, b: not a > b, (F32, F32)),
    Opcode("setp.nan.f32 {d}, {a}, {b}", ("?", "f4", "f4"),
           lambda a, b: math.isnan(a) or math.isnan(b), (F32, F32)),
]
# fmt: on
