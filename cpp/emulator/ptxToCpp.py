"""Translate the PTX that nvcc emitted for kernels to C++ on the emulator.

    nvcc -std=c++17 -arch=sm_80 -ptx kernel.cu -o kernel.ptx
    python ptxToCpp.py kernel.ptx kernel.ptx.cpp

The C++ is compiled as any other file, with -ffp-contract=off, and linked to the program; a launch
with ``KernelPath::kPTX`` then runs it instead of the kernel's source. An opcode that is not known
is an error that names it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ptx_families import emit
from ptx_operation import REGISTER_TYPES, Names, label, register
from ptx_parser import (
    Entry,
    Instruction,
    Label,
    LocalArray,
    Module,
    PtxError,
    Registers,
    Statement,
    parse,
)

PROLOGUE = """\
// Written by ptxToCpp.py from {source}: do not edit.
#include "emulator/ptxSemantics.h"

using namespace trtllm_kvmap; // NOLINT
using namespace trtllm_kvmap::emulator; // NOLINT

namespace
{{
"""
EPILOGUE = "} // namespace\n"


def translate(text: str, source: str) -> str:
    """C++ of all entries of a PTX module. Raises PtxError with every opcode that is not known."""
    module = parse(text)
    unknown: list[str] = []
    functions = [_function(entry, module, n, unknown) for n, entry in enumerate(module.entries)]
    if unknown:
        raise PtxError("\n".join(dict.fromkeys(unknown)))
    return PROLOGUE.format(source=source) + "\n".join(functions) + EPILOGUE


def _function(entry: Entry, module: Module, number: int, unknown: list[str]) -> str:
    names = Names(
        parameters={p.name: p.offset for p in entry.parameters},
        locals=frozenset(s.name for s in entry.statements if isinstance(s, LocalArray)),
        shared=module.shared_symbols,
    )
    lines = []
    for statement in entry.statements:
        try:
            lines.append(_line(statement, names))
        except PtxError as error:
            unknown.append(f"{entry.name}: {error}")
    body = "".join(f"    {line}\n" for line in lines)
    return (
        f"void run{number}(void const* parameters) // {entry.name}\n{{\n"
        f"    static_cast<void>(parameters);\n{body}}}\n"
        f'bool const sRegistered{number} = registerPtxEntry({{"{entry.name}", &run{number}, '
        f"{entry.parameter_bytes}}});\n"
    )


def _line(statement: Statement, names: Names) -> str:
    if isinstance(statement, Instruction):
        return emit(statement, names)
    if isinstance(statement, Registers):
        if statement.type not in REGISTER_TYPES:
            raise PtxError(f"The register type .{statement.type} is not known.")
        variables = ", ".join(map(register, statement.names))
        return f"{REGISTER_TYPES[statement.type]} {variables};" if variables else ""
    if isinstance(statement, LocalArray):
        array = f"{register(statement.name)}[{statement.size}]"
        return f"alignas({statement.align}) unsigned char {array};"
    if isinstance(statement, Label):
        return f"{label(statement.name)}: __attribute__((unused));"
    return "{" if statement.opens else "}"


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    source, destination = map(Path, arguments)
    try:
        destination.write_text(translate(source.read_text(), source.name))
    except PtxError as error:
        print(f"{source}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
