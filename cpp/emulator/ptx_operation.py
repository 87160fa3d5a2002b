"""An instruction whose operands are read and written as C++: what every opcode family builds on."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass, field

from ptx_parser import Instruction, PtxError, split_operands

# How C++ reads the bits of an operand of each type.
TYPES = {
    "pred": "bool",
    **{f"{kind}{n}": f"std::uint{n}_t" for kind in "bu" for n in (8, 16, 32, 64)},
    **{f"s{n}": f"std::int{n}_t" for n in (8, 16, 32, 64)},
    "f32": "float",
    "f64": "double",
}
# What holds a register of each declared type: bits of its width, whatever they mean.
REGISTER_TYPES = {
    "pred": "bool",
    "f16": "std::uint16_t",
    "f32": "std::uint32_t",
    "f64": "std::uint64_t",
    **{f"{kind}{n}": f"std::uint{n}_t" for kind in "bus" for n in (8, 16, 32, 64)},
}
BITS = {"b16", "b32", "b64"}
SIGNED = {"s16", "s32", "s64"}
NUMBERS = {"u16", "u32", "u64", *SIGNED}
FLOATS = {"f32", "f64"}

SPECIAL_REGISTERS = {
    "%laneid": "ptx::laneId()",
    "%cluster_ctarank": "tThread->clusterRank",
    "%cluster_nctarank": "tThread->clusterBlocks",
    **{
        f"%{name}.{axis}": f"tThread->{member}.{axis}"
        for name, member in (
            ("tid", "threadIndex"),
            ("ntid", "blockShape"),
            ("ctaid", "blockIndex"),
            ("nctaid", "gridShape"),
        )
        for axis in "xyz"
    },
}


@dataclass(frozen=True)
class Names:
    """What operands may name besides registers."""

    parameters: dict[str, int]  # offset in the parameter block
    locals: frozenset[str]  # arrays of one thread
    shared: frozenset[str]  # the block's dynamic shared memory
    targets: set[str] = field(default_factory=set)  # labels that some branch goes to


def register(name: str) -> str:
    """The C++ variable of a register."""
    return "v_" + re.sub(r"\W", "_", name.removeprefix("%"))


def label(name: str) -> str:
    return "L_" + re.sub(r"\W", "_", name)


def predicate(name: str) -> str:
    """``%p1`` or ``!%p1`` as a C++ expression."""
    return ("!" if name.startswith("!") else "") + register(name.removeprefix("!"))


def elements(operand: str) -> list[str]:
    """The registers of ``{%r1, %r2}``, or of a single one."""
    return split_operands(operand[1:-1]) if operand.startswith("{") else [operand]


@dataclass(frozen=True)
class Operation:
    """An instruction and the names around it."""

    instruction: Instruction
    names: Names

    @property
    def opcode(self) -> str:
        return self.instruction.opcode

    @property
    def parts(self) -> tuple[str, ...]:
        return self.instruction.parts

    @property
    def operands(self) -> tuple[str, ...]:
        return self.instruction.operands

    @property
    def type(self) -> str:
        """The last part of the opcode: a type, where the family has one."""
        return self.parts[-1]

    @property
    def modifiers(self) -> tuple[str, ...]:
        """What stands between family and type."""
        return self.parts[1:-1]

    def bits(self, operand: str) -> str:
        """The C++ expression of an operand's bits."""
        if operand in SPECIAL_REGISTERS:
            return SPECIAL_REGISTERS[operand]
        if match := re.fullmatch(r"0f([0-9A-Fa-f]{8})", operand):
            return f"std::uint32_t{{0x{match[1]}u}}"
        if match := re.fullmatch(r"0d([0-9A-Fa-f]{16})", operand):
            return f"std::uint64_t{{0x{match[1]}ull}}"
        if match := re.fullmatch(r"(-?\d+|0[xX][0-9A-Fa-f]+)U?", operand):
            return f"{match[1]}ll"
        if operand in self.names.shared:
            return "kSHARED_BASE"
        if operand in self.names.parameters:
            offset = self.names.parameters[operand]
            return f"(reinterpret_cast<std::uint64_t>(parameters) + {offset})"
        if operand in self.names.locals:
            return f"reinterpret_cast<std::uint64_t>({register(operand)})"
        if re.fullmatch(r"%?[A-Za-z_]\w*", operand):
            return register(operand)
        raise PtxError(f"The operand {operand!r} is not known.")

    def get(self, operand: str, ptx_type: str) -> str:
        """An operand read as a type."""
        return f"ptx::get<{TYPES[ptx_type]}>({self.bits(operand)})"

    def source(self, number: int, ptx_type: str | None = None) -> str:
        """The operand ``number`` (0 is the destination) read as a type, by default the opcode's."""
        return self.get(self.operands[number], ptx_type or self.type)

    def address(self, number: int) -> str:
        """``[%rd1+8]`` as a C++ expression."""
        match = re.fullmatch(r"\[\s*(%?[\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", self.operands[number])
        if match is None:
            raise PtxError(f"The address {self.operands[number]!r} is not known.")
        return f"{self.bits(match[1])} + {match[2]}" if match[2] else self.bits(match[1])

    def shared_address(self, number: int) -> str:
        return f"static_cast<std::uint32_t>({self.address(number)})"

    def put(self, expression: str, destination: str | None = None) -> str:
        """Write to a register, by default the first operand; ``_`` takes nothing."""
        name = self.operands[0] if destination is None else destination
        return f"{expression};" if name == "_" else f"ptx::put({register(name)}, {expression});"

    def call(self, function: str, types: Set[str], allowed: Set[str] = frozenset()) -> str | None:
        """``function<T>`` of all sources, each of the opcode's type; None for other types, or for
        modifiers beyond ``allowed``.
        """
        if self.type not in types or not set(self.modifiers) <= allowed:
            return None
        sources = ", ".join(self.source(n) for n in range(1, len(self.operands)))
        return self.put(f"ptx::{function}<{TYPES[self.type]}>({sources})")
