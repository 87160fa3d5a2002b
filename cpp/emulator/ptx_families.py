"""One PTX instruction to one C++ statement: a table of opcode families.

A family is the first part of an opcode (``add``, ``ld``); its function gives a C++ statement on
ptxSemantics.h and the emulator, or None for a form it does not know (a type, a rounding mode). What
is not known is an error that names the opcode: no instruction is ever guessed. Approximate
instructions (``div.approx``, ``ex2``) have no exact definition and are not known.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ptx_operation import (
    BITS,
    FLOATS,
    NUMBERS,
    SIGNED,
    TYPES,
    Names,
    Operation,
    elements,
    label,
    predicate,
    register,
)
from ptx_parser import Instruction, PtxError, split_operands


def emit(instruction: Instruction, names: Names) -> str:
    """The C++ statement of an instruction, its guard included. Raises PtxError."""
    family = FAMILIES.get(instruction.parts[0])
    statement = family(Operation(instruction, names)) if family else None
    if statement is None:
        raise PtxError(f"The opcode {instruction.opcode} is not known.")
    if not instruction.guard:
        return statement
    return f"if ({predicate(instruction.guard)}) {{ {statement} }}"


# ---- arithmetic ----------------------------------------------------------------------------------


def _add(op: Operation) -> str | None:
    return op.call("add", NUMBERS | FLOATS, {"rn"})


def _sub(op: Operation) -> str | None:
    return op.call("subtract", NUMBERS | FLOATS, {"rn"})


def _mul(op: Operation) -> str | None:
    if op.parts[-1] == "f16x2":
        return _words(op, "mul.rn.f16x2", "multiplyFp16Pair")
    if op.type in FLOATS:
        return op.call("multiply", FLOATS, {"rn"})
    product = _integer_product(op)
    return op.put(product[0]) if product else None


def _mad(op: Operation) -> str | None:
    product = _integer_product(op)
    if product is None:
        return None
    expression, result = product
    return op.put(f"ptx::add<{TYPES[result]}>({expression}, {op.source(3, result)})")


def _integer_product(op: Operation) -> tuple[str, str] | None:
    """The expression of ``mul.lo/hi/wide`` and the type of its value."""
    if op.type not in NUMBERS or len(op.modifiers) != 1:
        return None
    a, b, ctype = op.source(1), op.source(2), TYPES[op.type]
    wide = f"{op.type[0]}{2 * int(op.type[1:])}"
    if op.modifiers[0] == "lo":
        return f"ptx::multiply<{ctype}>({a}, {b})", op.type
    if op.modifiers[0] == "hi":
        return f"ptx::multiplyHigh<{ctype}>({a}, {b})", op.type
    if op.modifiers[0] == "wide" and wide in TYPES:
        return f"ptx::multiplyWide<{TYPES[wide]}, {ctype}>({a}, {b})", wide
    return None


def _fma(op: Operation) -> str | None:
    if op.parts[-1] == "bf16x2":
        return _words(op, "fma.rn.bf16x2", "multiplyBf16Pair")
    return op.call("fma", FLOATS, {"rn"}) if op.modifiers == ("rn",) else None


def _div(op: Operation) -> str | None:
    if op.type in FLOATS and op.modifiers != ("rn",):
        return None
    return op.call("divide", NUMBERS | FLOATS, {"rn"})


def _rem(op: Operation) -> str | None:
    return op.call("remainder", NUMBERS)


def _min(op: Operation) -> str | None:
    return op.call("minimum", NUMBERS | FLOATS)


def _max(op: Operation) -> str | None:
    return op.call("maximum", NUMBERS | FLOATS)


def _abs(op: Operation) -> str | None:
    return op.call("absolute", SIGNED | FLOATS)


def _neg(op: Operation) -> str | None:
    return op.call("negate", SIGNED | FLOATS)


def _rcp(op: Operation) -> str | None:
    return op.call("reciprocal", FLOATS, {"rn"}) if op.modifiers == ("rn",) else None


def _sqrt(op: Operation) -> str | None:
    return op.call("squareRoot", FLOATS, {"rn"}) if op.modifiers == ("rn",) else None


# ---- bits ----------------------------------------------------------------------------------------


def _and(op: Operation) -> str | None:
    return op.call("bitAnd", BITS | {"pred"})


def _or(op: Operation) -> str | None:
    return op.call("bitOr", BITS | {"pred"})


def _xor(op: Operation) -> str | None:
    return op.call("bitXor", BITS | {"pred"})


def _not(op: Operation) -> str | None:
    return op.call("bitNot", BITS | {"pred"})


def _shl(op: Operation) -> str | None:
    return _shift(op, "shiftLeft", BITS)


def _shr(op: Operation) -> str | None:
    return _shift(op, "shiftRight", BITS | NUMBERS)


def _shift(op: Operation, function: str, types: set[str]) -> str | None:
    if op.type not in types or op.modifiers:
        return None
    return op.put(f"ptx::{function}<{TYPES[op.type]}>({op.source(1)}, {op.source(2, 'u32')})")


def _shf(op: Operation) -> str | None:
    match = re.fullmatch(r"shf\.([lr])\.(wrap|clamp)\.b32", op.opcode)
    if match is None:
        return None
    by = op.source(3, "u32")
    by = f"{by} & 31" if match[2] == "wrap" else f"ptx::clampShift({by})"
    function = "funnelLeft" if match[1] == "l" else "funnelRight"
    return op.put(f"ptx::{function}({op.source(1)}, {op.source(2)}, {by})")


def _bfi(op: Operation) -> str | None:
    if op.opcode not in ("bfi.b32", "bfi.b64"):
        return None
    field, base, position, length = op.source(1), op.source(2), *_pair(op, 3)
    return op.put(f"ptx::insertField<{TYPES[op.type]}>({field}, {base}, {position}, {length})")


def _bfe(op: Operation) -> str | None:
    if op.opcode not in ("bfe.u32", "bfe.s32", "bfe.u64", "bfe.s64"):
        return None
    position, length = _pair(op, 2)
    return op.put(f"ptx::extractField<{TYPES[op.type]}>({op.source(1)}, {position}, {length})")


def _pair(op: Operation, first: int) -> tuple[str, str]:
    return op.source(first, "u32"), op.source(first + 1, "u32")


def _prmt(op: Operation) -> str | None:
    return _words(op, "prmt.b32", "permuteBytes")


def _lop3(op: Operation) -> str | None:
    return _words(op, "lop3.b32", "logic3")


def _brev(op: Operation) -> str | None:
    return _words(op, "brev.b32", "reverseBits")


def _clz(op: Operation) -> str | None:
    return _words(op, "clz.b32", "leadingZeros")


def _words(op: Operation, opcode: str, function: str) -> str | None:
    if op.opcode != opcode:
        return None
    sources = ", ".join(op.source(n, "u32") for n in range(1, len(op.operands)))
    return op.put(f"ptx::{function}({sources})")


def _popc(op: Operation) -> str | None:
    if op.opcode not in ("popc.b32", "popc.b64"):
        return None
    return op.put(f"__builtin_popcountll({op.source(1)})")


# ---- choices -------------------------------------------------------------------------------------

# The comparisons that are false with NaN; with a u behind (equ) they are true with it. lo, ls, hi
# and hs are the unsigned names of lt, le, gt and ge.
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
UNSIGNED_NAMES = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
JOINTS = {"and": "&", "or": "|", "xor": "^"}


def _setp(op: Operation) -> str | None:
    compare, *joint = op.modifiers
    if op.type not in BITS | NUMBERS | FLOATS or "|" in op.operands[0]:
        return None
    a, b = op.source(1), op.source(2)
    with_nan = op.type in FLOATS and compare.endswith("u") and compare[:-1] in COMPARISONS
    sign = (COMPARISONS | UNSIGNED_NAMES).get(compare[:-1] if with_nan else compare)
    if compare in ("num", "nan") and op.type in FLOATS:
        test = f"{'!' if compare == 'num' else ''}ptx::unordered({a}, {b})"
    elif sign is None:
        return None
    elif with_nan:
        test = f"ptx::unordered({a}, {b}) || {a} {sign} {b}"
    elif op.type in FLOATS:
        test = f"!ptx::unordered({a}, {b}) && {a} {sign} {b}"
    else:
        test = f"{a} {sign} {b}"
    if not joint:
        return op.put(test)
    if len(joint) > 1 or joint[0] not in JOINTS:
        return None
    return op.put(f"({test}) {JOINTS[joint[0]]} {predicate(op.operands[3])}")


def _selp(op: Operation) -> str | None:
    if op.type not in BITS | NUMBERS | FLOATS or op.modifiers:
        return None
    return op.put(f"{predicate(op.operands[3])} ? {op.source(1)} : {op.source(2)}")


# ---- moves and conversions -----------------------------------------------------------------------


def _mov(op: Operation) -> str | None:
    if op.type not in TYPES or op.modifiers:
        return None
    destination, source = op.operands
    if source.startswith("{"):
        parts = elements(source)
        width = int(op.type[1:]) // len(parts)
        words = (op.get(part, f"b{width}") for part in parts)
        packed = " | ".join(
            f"static_cast<{TYPES[op.type]}>({word}) << {n * width}" for n, word in enumerate(words)
        )
        return op.put(f"static_cast<{TYPES[op.type]}>({packed})")
    if destination.startswith("{"):
        parts = elements(destination)
        width = int(op.type[1:]) // len(parts)
        word = TYPES[f"b{width}"]
        puts = (
            op.put(f"static_cast<{word}>(all >> {n * width})", part) for n, part in enumerate(parts)
        )
        return f"{{ auto const all = {op.source(1)}; {' '.join(puts)} }}"
    return op.put(op.source(1))


def _cvta(op: Operation) -> str | None:
    if op.opcode == "cvta.shared.u64":
        return op.put(f"ptx::genericOfShared({op.source(1, 'u32')})")
    if op.opcode == "cvta.to.shared.u64":
        return op.put(f"ptx::sharedOfGeneric({op.source(1)})")
    plain = re.fullmatch(r"cvta(\.to)?\.(global|local|param)\.u64", op.opcode)
    return op.put(op.source(1)) if plain else None


# Opcode: the function of ptxSemantics.h and the types of its operands.
CONVERSIONS = {
    "cvt.f32.bf16": ("floatOfBf16", ("b16",)),
    "cvt.rn.bf16.f32": ("bf16OfFloat", ("f32",)),
    "cvt.rn.bf16x2.f32": ("bf16PairOfFloats", ("f32", "f32")),
    "cvt.f32.f16": ("floatOfFp16", ("b16",)),
    "cvt.rn.f16.f32": ("fp16OfFloat", ("f32",)),
    "cvt.rn.f16x2.f32": ("fp16PairOfFloats", ("f32", "f32")),
    "cvt.rn.satfinite.e4m3x2.f32": ("e4m3PairOfFloats", ("f32", "f32")),
    "cvt.rn.f16x2.e4m3x2": ("fp16PairOfE4m3Pair", ("b16",)),
}
ROUNDINGS = {"rzi": "trunc", "rni": "nearbyint", "rmi": "floor", "rpi": "ceil"}


def _cvt(op: Operation) -> str | None:
    if op.opcode in CONVERSIONS:
        function, types = CONVERSIONS[op.opcode]
        sources = ", ".join(op.source(n + 1, ptx_type) for n, ptx_type in enumerate(types))
        return op.put(f"ptx::{function}({sources})")
    *rounding, to, source = op.parts[1:]
    if to not in TYPES or source not in TYPES:
        return None
    a = op.source(1, source)
    if source in FLOATS and to not in FLOATS:
        function = ROUNDINGS.get(rounding[0]) if len(rounding) == 1 else None
        return op.put(f"ptx::saturate<{TYPES[to]}>(std::{function}({a}))") if function else None
    # Between integers, and from float32 to float64, nothing is rounded.
    exact = to not in FLOATS or (source in FLOATS and (to == source or to == "f64"))
    if rounding != ([] if exact else ["rn"]):
        return None
    return op.put(f"static_cast<{TYPES[to]}>({a})")


# ---- memory --------------------------------------------------------------------------------------

SPACES = {"global": "kGLOBAL", "shared": "kSHARED", "param": "kPARAM", "local": "kLOCAL"}
# What changes no value here: cache hints, and orders that a fiber's accesses have anyway.
MEMORY_HINTS = re.compile(
    r"nc|volatile|weak|relaxed|cta|gpu|sys|cg|ca|cs|cv|lu|wb|wt|L1::\w+|L2::\w+|unified"
)


def _memory(op: Operation) -> tuple[str, str, int] | None:
    """C++ type, space and number of elements of a load or store."""
    space, count = "kGLOBAL", 1  # a generic address is a host pointer, as a global one is
    for part in op.modifiers:
        if part.removesuffix("::cta") in SPACES:
            space = SPACES[part.removesuffix("::cta")]
        elif part in ("v2", "v4", "v8"):
            count = int(part[1:])
        elif not MEMORY_HINTS.fullmatch(part):
            return None
    if op.type not in TYPES or op.type == "pred":
        return None
    return TYPES[op.type], f"ptx::Space::{space}", count


def _ld(op: Operation) -> str | None:
    memory = _memory(op)
    if memory is None:
        return None
    ctype, space, count = memory
    loads = (
        op.put(f"ptx::load<{ctype}, {space}, {count}>(at, {n})", name)
        for n, name in enumerate(elements(op.operands[0]))
    )
    return f"{{ std::uint64_t const at = {op.address(1)}; {' '.join(loads)} }}"


def _st(op: Operation) -> str | None:
    memory = _memory(op)
    if memory is None:
        return None
    ctype, space, count = memory
    stores = (
        f"ptx::store<{ctype}, {space}, {count}>(at, {n}, {op.get(name, op.type)});"
        for n, name in enumerate(elements(op.operands[1]))
    )
    return f"{{ std::uint64_t const at = {op.address(0)}; {' '.join(stores)} }}"


ATOMICS = {
    "add": "atomicAdd",
    "min": "atomicMin",
    "max": "atomicMax",
    "exch": "atomicExch",
    "cas": "atomicCAS",
}


def _atom(op: Operation) -> str | None:
    return _atomic(op, where=1, destination=op.operands[0])


def _red(op: Operation) -> str | None:
    return _atomic(op, where=0, destination="_")


def _atomic(op: Operation, where: int, destination: str) -> str | None:
    operation = next((part for part in op.modifiers if part in ATOMICS), None)
    scopes = set(op.modifiers) - {operation}
    if operation is None or not scopes <= {"global", "relaxed", "gpu", "cta", "sys"}:
        return None
    if op.type not in TYPES:
        return None
    values = ", ".join(op.source(n) for n in range(where + 1, len(op.operands)))
    pointer = f"reinterpret_cast<{TYPES[op.type]}*>({op.address(where)})"
    return op.put(f"{ATOMICS[operation]}({pointer}, {values})", destination)


# Orders between the ordinary and the asynchronous proxy: not modelled, and so nothing.
PROXY_FENCES = ("fence.proxy.async.shared::cta", "fence.mbarrier_init.release.cluster")


def _fence(op: Operation) -> str | None:
    if op.opcode in PROXY_FENCES:
        return ";"
    known = op.opcode in ("membar.gl", "fence.acq_rel.gpu", "fence.sc.gpu")
    return "emulator::threadFence();" if known else None


# ---- control -------------------------------------------------------------------------------------

WHOLE_BLOCK = (
    "static_cast<int>(tThread->blockShape.x * tThread->blockShape.y * tThread->blockShape.z)"
)


def _bra(op: Operation) -> str | None:
    if op.opcode not in ("bra", "bra.uni"):
        return None
    op.names.targets.add(op.operands[0])
    return f"goto {label(op.operands[0])};"


def _ret(op: Operation) -> str | None:
    return "return;" if op.opcode in ("ret", "exit") else None


def _trap(op: Operation) -> str | None:
    return 'emulator::fail("the kernel trapped");'


def _bar(op: Operation) -> str | None:
    cluster = re.fullmatch(
        r"barrier\.cluster\.(?:(arrive)(?:\.release)?|wait(?:\.acquire)?)(?:\.aligned)?", op.opcode
    )
    if cluster:
        return f"emulator::{'arriveCluster' if cluster[1] else 'waitCluster'}();"
    opcode = op.opcode.replace("barrier", "bar").replace(".cta", "")
    if opcode == "bar.warp.sync":
        return f"emulator::syncWarp({op.source(0, 'u32')});"
    operands = [op.source(n, "s32") for n in range(len(op.operands))]
    if opcode == "bar.sync" and len(operands) == 1:
        operands.append(WHOLE_BLOCK)
    if opcode == "bar.sync":
        return f"emulator::syncBarrier({', '.join(operands)});"
    return f"emulator::arriveBarrier({', '.join(operands)});" if opcode == "bar.arrive" else None


# ---- warps ---------------------------------------------------------------------------------------

SHUFFLES = {"idx": "kINDEX", "up": "kUP", "down": "kDOWN", "bfly": "kXOR"}


def _shfl(op: Operation) -> str | None:
    match = re.fullmatch(r"shfl\.sync\.(idx|up|down|bfly)\.b32", op.opcode)
    if match is None:
        return None
    destination, _, inside = op.operands[0].partition("|")
    value, lane, clamp, mask = (op.source(n, "u32") for n in range(1, 5))
    kind = f"Shuffle::{SHUFFLES[match[1]]}"
    call = op.put(f"ptx::shuffle({kind}, {value}, {lane}, {clamp}, {mask}, inside)", destination)
    keep = f"{register(inside)} = inside;" if inside else ""
    return f"{{ bool inside; {call} {keep} }}"


VOTES = {"ballot.b32": "", "any.pred": " != 0", "all.pred": " == 0xffffffffu"}


def _vote(op: Operation) -> str | None:
    test = VOTES.get(op.opcode.removeprefix("vote.sync."))
    if test is None:
        return None
    ballot = f"emulator::ballot({op.source(2, 'u32')}, {predicate(op.operands[1])})"
    return op.put(ballot + test)


def _ldmatrix(op: Operation) -> str | None:
    match = re.fullmatch(
        r"ldmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?\.shared(::cta)?\.b16", op.opcode
    )
    if match is None:
        return None
    puts = " ".join(op.put(f"words[{n}]", name) for n, name in enumerate(elements(op.operands[0])))
    transposed = "true" if match[1] else "false"
    load = f"emulator::loadMatrix(words, {op.shared_address(1)}, {transposed});"
    return f"{{ std::uint32_t words[4]; {load} {puts} }}"


def _mma(op: Operation) -> str | None:
    match = re.fullmatch(
        r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32", op.opcode
    )
    if match is None:
        return None
    d, a, b, c = (elements(operand) for operand in op.operands)
    start = ", ".join(op.get(name, "f32") for name in c)
    left = ", ".join(op.get(name, "b32") for name in a)
    right = ", ".join(op.get(name, "b32") for name in b)
    puts = " ".join(op.put(f"d[{n}]", name) for n, name in enumerate(d))
    kind = "MmaType::kBF16" if match[1] == "bf16" else "MmaType::kFP16"
    return (
        f"{{ float d[4]{{{start}}}; std::uint32_t const a[4]{{{left}}}; "
        f"emulator::multiplyAccumulate({kind}, d, a, {right}); {puts} }}"
    )


def _cp(op: Operation) -> str | None:
    if op.opcode.startswith("cp.async.bulk"):
        return _tensor_copy(op)
    opcode = re.sub(r"\.L2::\w+", "", op.opcode)
    if opcode == "cp.async.commit_group":
        return "emulator::asyncCommit();"
    if opcode == "cp.async.wait_group":
        return f"emulator::asyncWait({int(op.operands[0])});"
    if opcode == "cp.async.wait_all":
        return "emulator::asyncCommit(); emulator::asyncWait(0);"
    if opcode != "cp.async.cg.shared.global" or op.operands[2] != "16":
        return None
    source = f"reinterpret_cast<void const*>({op.address(1)})"
    ignored = len(op.operands) == 4
    valid = f"emulator::wholeOrNothing({op.source(3, 'u32')})" if ignored else "true"
    return f"emulator::asyncCopy16({op.shared_address(0)}, {source}, {valid});"


# ---- sm_90a --------------------------------------------------------------------------------------


def _tensor_copy(op: Operation) -> str | None:
    """``[destination], [map, {x, y}], [mbarrier]``, and with multicast a mask of blocks."""
    match = re.fullmatch(
        r"cp\.async\.bulk\.tensor\.([1-5])d\.shared::cluster\.global"
        r"\.mbarrier::complete_tx::bytes(\.multicast::cluster)?",
        op.opcode,
    )
    if match is None:
        return None
    pointer, coordinates = split_operands(op.operands[1][1:-1])
    at = ", ".join(op.get(name, "s32") for name in elements(coordinates))
    tensor = f"reinterpret_cast<CUtensorMap const*>({op.bits(pointer)})"
    copy = f"{op.shared_address(0)}, {tensor}, {match[1]}, at, {op.shared_address(2)}"
    function = "copyTensorBox"
    if match[2]:
        function, copy = "multicastTensorBox", f"{copy}, {op.source(3, 'u16')}"
    return f"{{ std::int32_t const at[]{{{at}}}; emulator::{function}({copy}); }}"


def _mapa(op: Operation) -> str | None:
    if op.opcode != "mapa.shared::cluster.u32":
        return None
    return op.put(f"emulator::mapShared({op.source(1, 'u32')}, {op.source(2, 'u32')})")


def _mbarrier(op: Operation) -> str | None:
    opcode = op.opcode.replace(".shared::cta", ".shared")
    if opcode == "mbarrier.init.shared.b64":
        return f"emulator::initMbarrier({op.shared_address(0)}, {op.source(1, 'u32')});"
    if opcode == "mbarrier.try_wait.parity.shared.b64":
        wait = f"emulator::tryWaitMbarrier({op.shared_address(1)}, {op.source(2, 'u32')})"
        return op.put(wait)
    if opcode == "mbarrier.arrive.shared.b64" and op.operands[0] == "_":
        return f"emulator::arriveMbarrier({op.shared_address(1)}, 0);"
    if opcode == "mbarrier.arrive.shared::cluster.b64" and op.operands[0] == "_":
        return f"emulator::arriveClusterMbarrier({op.shared_address(1)});"
    if opcode == "mbarrier.arrive.expect_tx.shared.b64" and op.operands[0] == "_":
        return f"emulator::arriveMbarrier({op.shared_address(1)}, {op.source(2, 'u32')});"
    return None


def _wgmma(op: Operation) -> str | None:
    if op.opcode == "wgmma.fence.sync.aligned":
        return ";"
    if op.opcode == "wgmma.commit_group.sync.aligned":
        return "emulator::commitWarpgroup();"
    if op.opcode == "wgmma.wait_group.sync.aligned":
        return f"emulator::waitWarpgroup({int(op.operands[0])});"
    match = re.fullmatch(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2", op.opcode
    )
    if match is None:
        return None
    d, a, b, add, *immediates = op.operands
    if a.startswith("{") or immediates != ["1", "1", "0", "0"]:
        return None  # A from registers, negated or transposed operands
    start = ", ".join(op.get(name, "f32") for name in elements(d))
    puts = " ".join(op.put(f"d[{n}]", name) for n, name in enumerate(elements(d)))
    kind = "MmaType::kBF16" if match[2] == "bf16" else "MmaType::kFP16"
    descriptors = f"{op.get(a, 'b64')}, nullptr, {op.get(b, 'b64')}"
    # At issue: the accumulators are registers that the next instructions may copy.
    call = f"{kind}, {match[1]}, d, {descriptors}, {predicate(add)}, true"
    return f"{{ float d[]{{{start}}}; emulator::warpgroupMultiply({call}); {puts} }}"


def _setmaxnreg(op: Operation) -> str | None:
    """Registers given back or taken: how many there are changes no value."""
    known = re.fullmatch(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32", op.opcode)
    return ";" if known else None


FAMILIES: dict[str, Callable[[Operation], str | None]] = {
    "abs": _abs,
    "add": _add,
    "and": _and,
    "atom": _atom,
    "bar": _bar,
    "barrier": _bar,
    "bfe": _bfe,
    "bfi": _bfi,
    "bra": _bra,
    "brev": _brev,
    "clz": _clz,
    "cp": _cp,
    "cvt": _cvt,
    "cvta": _cvta,
    "div": _div,
    "exit": _ret,
    "fence": _fence,
    "fma": _fma,
    "ld": _ld,
    "ldmatrix": _ldmatrix,
    "lop3": _lop3,
    "mad": _mad,
    "mapa": _mapa,
    "max": _max,
    "mbarrier": _mbarrier,
    "membar": _fence,
    "min": _min,
    "mma": _mma,
    "mov": _mov,
    "mul": _mul,
    "neg": _neg,
    "not": _not,
    "or": _or,
    "popc": _popc,
    "prmt": _prmt,
    "rcp": _rcp,
    "red": _red,
    "rem": _rem,
    "ret": _ret,
    "selp": _selp,
    "setmaxnreg": _setmaxnreg,
    "setp": _setp,
    "shf": _shf,
    "shfl": _shfl,
    "shl": _shl,
    "shr": _shr,
    "sqrt": _sqrt,
    "st": _st,
    "sub": _sub,
    "trap": _trap,
    "vote": _vote,
    "wgmma": _wgmma,
    "xor": _xor,
}
