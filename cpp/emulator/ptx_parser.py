"""PTX text, as nvcc prints it, to entries of statements.

Only the syntax is known here, no instruction: an instruction is a guard, a dotted name and operands
as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


class PtxError(ValueError):
    """The text is not PTX this translator knows; the sentence names what it met."""


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter: its name and where its bytes lie in the parameter block."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Registers:
    """``.reg .b32 %r<5>`` declares r0..r4: ``names`` has the five."""

    type: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class LocalArray:
    """``.local .align 16 .b8 __local_depot0[64]``: memory of one thread."""

    name: str
    align: int
    size: int


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Scope:
    """A brace: registers declared inside end with it. ``opens`` or closes."""

    opens: bool


@dataclass(frozen=True)
class Instruction:
    """``@!%p1 add.rn.f32 %f1, %f2, %f3``: guard ``!%p1``, parts (add, rn, f32), 3 operands."""

    guard: str
    parts: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def opcode(self) -> str:
        return ".".join(self.parts)


Statement = Registers | LocalArray | Label | Scope | Instruction


@dataclass(frozen=True)
class Entry:
    name: str
    parameters: tuple[Parameter, ...]
    statements: tuple[Statement, ...] = field(repr=False)

    @property
    def parameter_bytes(self) -> int:
        return max((p.offset + p.size for p in self.parameters), default=0)


@dataclass(frozen=True)
class Module:
    entries: tuple[Entry, ...]
    shared_symbols: frozenset[str]  # dynamic shared memory: all of them are its first byte


def parse(text: str) -> Module:
    """Parse a module. Raises PtxError at syntax that is not known."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r"^\s*\.(loc|file)\b[^\n]*$", "", text, flags=re.MULTILINE)
    entries = tuple(
        Entry(match["name"], _parameters(match["parameters"]), tuple(_statements(body)))
        for match, body in _entry_bodies(text)
    )
    if not entries:
        raise PtxError("The module has no .entry.")
    shared = re.findall(r"\.extern\s+\.shared\b[^;]*?([\w$]+)\[\s*\]", text)
    return Module(entries, frozenset(shared))


def split_operands(text: str) -> list[str]:
    """Split at commas outside braces and brackets."""
    operands, depth, current = [], 0, ""
    for character in text:
        depth += character in "{[("
        depth -= character in "}])"
        if character == "," and depth == 0:
            operands.append(current.strip())
            current = ""
        else:
            current += character
    return [*operands, current.strip()] if current.strip() else operands


_ENTRY = re.compile(
    r"\.entry\s+(?P<name>[\w$]+)\s*\((?P<parameters>[^)]*)\)(?P<attributes>[^{]*)\{"
)


def _entry_bodies(text: str) -> Iterator[tuple[re.Match[str], str]]:
    for match in _ENTRY.finditer(text):
        depth, end = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        yield match, text[match.end() : end - 1]


_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)(?:\s+\.ptr[^%]*?)?\s+(?P<name>[\w$]+)"
    r"(?:\[(?P<count>\d+)\])?\s*$"
)


def _parameters(text: str) -> tuple[Parameter, ...]:
    parameters, offset = [], 0
    for declaration in split_operands(text):
        match = _PARAMETER.match(declaration.strip())
        if match is None:
            raise PtxError(f"The parameter declaration {declaration!r} is not known.")
        element = int(match["type"][1:]) // 8
        align = int(match["align"] or element)
        size = element * int(match["count"] or 1)
        offset = (offset + align - 1) // align * align
        parameters.append(Parameter(match["name"], offset, size))
        offset += size
    return tuple(parameters)


def _statements(body: str) -> Iterator[Statement]:
    current = ""
    for character in body:
        bare = not current.strip()
        if bare and character in "{}":
            yield Scope(character == "{")
        elif character == ";":
            yield from _statement(current.strip())
            current = ""
        elif character == ":" and re.fullmatch(r"[\w$]+", current.strip()):
            yield Label(current.strip())
            current = ""
        else:
            current += character
    if current.strip():
        raise PtxError(f"The statement {current.strip()!r} has no end.")


_INSTRUCTION = re.compile(
    r"(?:@(?P<guard>!?%?[\w$]+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>.*)", re.DOTALL
)
_LOCAL = re.compile(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]")


def _statement(text: str) -> Iterator[Statement]:
    if not text or text.startswith(".pragma"):
        return
    if text.startswith(".reg"):
        yield _registers(text)
    elif match := _LOCAL.fullmatch(text):
        yield LocalArray(match[2], int(match[1]), int(match[3]))
    elif text.startswith("."):
        raise PtxError(f"The directive {text.split()[0]} is not known: {text!r}.")
    else:
        match = _INSTRUCTION.fullmatch(text)
        if match is None:
            raise PtxError(f"The statement {text!r} is not known.")
        # ".L2::128B" and "::cluster" stay inside their part: only dots separate parts.
        yield Instruction(
            match["guard"] or "",
            tuple(match["opcode"].split(".")),
            tuple(split_operands(match["operands"])),
        )


def _registers(text: str) -> Registers:
    match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, flags=re.DOTALL)
    if match is None:
        raise PtxError(f"The register declaration {text!r} is not known.")
    names: list[str] = []
    for name in split_operands(match[2]):
        if family := re.fullmatch(r"(%?[\w$]+)<(\d+)>", name):
            names += [f"{family[1]}{i}" for i in range(int(family[2]))]
        else:
            names.append(name)
    return Registers(match[1], tuple(names))
