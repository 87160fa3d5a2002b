"""The translation of PTX: single opcodes against their definition in the PTX ISA, on values that
sit at the edges, and what must be refused.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest
from emulated_build import EMULATOR, missing, shared_object, translated_text
from ptx_opcodes import OPCODES, Opcode, f32

sys.path.insert(0, str(EMULATOR))
from ptx_parser import PtxError
from ptxToCpp import translate

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "g++ and headers are here")

REGISTERS = {
    "?": "pred",
    "u2": "b16",
    "u4": "b32",
    "i4": "b32",
    "u8": "b64",
    "i8": "b64",
    "f4": "f32",
}
BYTES = {"?": 4, "u2": 2, "u4": 4, "i4": 4, "u8": 8, "i8": 8, "f4": 4}


def entry(number: int, opcode: Opcode) -> str:
    """An entry that reads a, b, c of its thread from arrays, executes, and writes d."""
    names = ["d", "a", "b", "c"][: len(opcode.types)]
    lines = [f".reg .{REGISTERS[t]} %{n};" for n, t in zip(names, opcode.types, strict=True)]
    lines += [".reg .b32 %i, %w;", ".reg .b64 %p, %o;", "mov.u32 %i, %tid.x;"]
    for position, (name, kind) in enumerate(zip(names, opcode.types, strict=True)):
        where = f"ld.param.u64 %p, [e{number}_param_0+{8 * position}]; "
        where += f"mul.wide.u32 %o, %i, {BYTES[kind]}; add.s64 %p, %p, %o;"
        if name != "d":
            lines.append(f"{where} ld.global.b{8 * BYTES[kind]} %{name}, [%p];")
    lines.append(opcode.text.format(d="%d", a="%a", b="%b", c="%c") + ";")
    kind = opcode.types[0]
    lines.append(f"ld.param.u64 %p, [e{number}_param_0]; mul.wide.u32 %o, %i, {BYTES[kind]};")
    lines.append("add.s64 %p, %p, %o;")
    if kind == "?":
        lines.append("selp.b32 %w, 1, 0, %d; st.global.b32 [%p], %w;")
    else:
        lines.append(f"st.global.b{8 * BYTES[kind]} [%p], %d;")
    body = "\n\t".join([*lines, "ret;"])
    parameters = f".param .align 8 .b8 e{number}_param_0[32]"
    return f".visible .entry e{number}(\n\t{parameters}\n)\n{{\n\t{body}\n}}\n"


@pytest.fixture(scope="module")
def opcodes() -> ctypes.CDLL:
    """All opcodes in one module, translated and compiled once."""
    text = "".join(entry(n, opcode) for n, opcode in enumerate(OPCODES))
    return ctypes.CDLL(
        str(shared_object("emulator_opcodes", [], translations=[translated_text(text, "opcodes")]))
    )


def run_entry(
    library: ctypes.CDLL, name: str, threads: int, parameters: bytes, shared: int = 0
) -> str:
    function = library.trtllmKvMapEmulatorRunPtx
    function.restype = ctypes.c_char_p
    sentence = function(name.encode(), 1, threads, shared, parameters, len(parameters))
    return sentence.decode() if sentence else ""


@pytest.mark.parametrize("number", range(len(OPCODES)), ids=[opcode.name for opcode in OPCODES])
def test_an_opcode_does_what_the_isa_says(opcodes: ctypes.CDLL, number: int) -> None:
    opcode = OPCODES[number]
    grids = np.meshgrid(*(np.arange(len(v)) for v in opcode.values), indexing="ij")
    rows = [
        [values[i] for values, i in zip(opcode.values, index, strict=True)]
        for index in zip(*(g.ravel().tolist() for g in grids), strict=True)
    ] or [[]]
    for start in range(0, len(rows), 992):
        check_rows(opcodes, number, rows[start : start + 992])


def check_rows(opcodes: ctypes.CDLL, number: int, rows: list[list[int | float]]) -> None:
    opcode = OPCODES[number]
    threads = (len(rows) + 31) // 32 * 32
    kinds = ["u4" if kind == "?" else kind for kind in opcode.types]
    arrays = [np.zeros(threads, kind) for kind in kinds]
    arrays[0].view(np.uint8)[:] = 0xA5
    exact = [
        [f32(v) if kind == "f4" else v for v, kind in zip(row, opcode.types[1:], strict=True)]
        for row in rows
    ]
    padded = exact + [exact[0]] * (threads - len(rows))
    for column, array in enumerate(arrays[1:]):
        if array.dtype.kind == "f":
            array[:] = [row[column] for row in padded]
        else:
            width = 8 * array.itemsize
            unsigned = [int(row[column]) & (2**width - 1) for row in padded]
            array.view(f"u{array.itemsize}")[:] = unsigned
    addresses = [array.ctypes.data for array in arrays] + [0] * (4 - len(arrays))
    parameters = np.array(addresses, np.uint64).tobytes()
    assert run_entry(opcodes, f"e{number}", threads, parameters) == ""
    for row, result in zip(padded, arrays[0], strict=True):
        expected = opcode.define(*row)
        if arrays[0].dtype.kind == "f":
            want = np.float32(expected)
            same = (np.isnan(want) and np.isnan(result)) or want.tobytes() == result.tobytes()
        else:
            width = 8 * arrays[0].itemsize
            same = int(expected) & (2**width - 1) == int(result) & (2**width - 1)
        assert same, f"{opcode.name} of {row}: {result!r}, by definition {expected!r}"


# ---- what is refused -----------------------------------------------------------------------------


def module(
    body: str, registers: str = ".reg .b32 %r<4>; .reg .f32 %f<4>; .reg .pred %p<4>;"
) -> str:
    return f".visible .entry k(\n.param .u64 k_param_0\n)\n{{\n{registers}\n{body}\nret;\n}}\n"


@pytest.mark.parametrize(
    "instruction",
    [
        "ex2.approx.f32 %f1, %f2",
        "div.approx.f32 %f1, %f2, %f3",
        "add.rz.f32 %f1, %f2, %f3",
        "add.ftz.f32 %f1, %f2, %f3",
        "add.sat.s32 %r1, %r2, %r3",
        "cvt.rz.f32.s32 %f1, %r1",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f0}, {%r0}, {%r1}, {%f1}",
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1, %r2}, [%r3]",
        "cp.async.ca.shared.global [%r1], [%r2], 4",
        "setp.lt.s32 %p1|%p2, %r1, %r2",
        "nonsense.b32 %r1, %r2",
    ],
)
def test_unknown_opcodes_are_refused_by_name(instruction: str) -> None:
    with pytest.raises(PtxError, match=instruction.split()[0].replace(".", r"\.")):
        translate(module(instruction + ";"), "test")


def test_all_unknown_opcodes_are_named_at_once() -> None:
    with pytest.raises(PtxError) as refused:
        translate(module("foo.b32 %r1, %r2; bar2.b32 %r1, %r2;"), "test")
    assert "foo.b32" in str(refused.value)
    assert "bar2.b32" in str(refused.value)


def test_parameters_lie_as_cuda_lays_them() -> None:
    text = (
        ".entry k(.param .u8 k_param_0, .param .align 8 .b8 k_param_1[12], .param .u64 k_param_2)"
    )
    code = translate(text + " { ret; }", "test")
    assert 'registerPtxEntry({"k", &run0, 32})' in code
