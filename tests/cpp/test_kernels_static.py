"""What the compiler made of the kernels: no spills, the tensor-core instructions of the design,
16-byte accesses.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from native_build import ROOT

ARCHITECTURES = ("80", "90a")


@dataclass(frozen=True)
class Design:
    """Per K-block of 64 and warp: 4 steps of kMmaRows x kMmaColumns products and of
    kMmaRows + kMmaColumns / 2 ldmatrix (/ 4 for weights of one byte); per thread
    (rows + columns * weight_bytes / 2) / 32 copies, in the loop and again in each stage of the
    prologue. A fragment of fp8-e4m3 is widened by one packed product.
    """

    rows: int
    columns: int
    warp_rows: int
    stages: int
    registers: int  # 128: two blocks of 256 threads on a multiprocessor
    weight_bytes: int = 2

    @property
    def products(self) -> int:
        return 4 * (self.rows // self.warp_rows // 16) * self._columns_of_warp // 8

    @property
    def matrix_loads(self) -> int:
        return 4 * (
            self.rows // self.warp_rows // 16
            + self._columns_of_warp // (8 * 4 // self.weight_bytes)
        )

    @property
    def copies(self) -> int:
        return (self.rows + self.columns * self.weight_bytes // 2) // 32 * self.stages

    @property
    def widenings(self) -> int:
        return 4 * 2 * self._columns_of_warp // 8 if self.weight_bytes == 1 else 0

    @property
    def _columns_of_warp(self) -> int:
        return self.columns // (8 // self.warp_rows)


DESIGNS = {
    "ILi256ELi128E": Design(256, 128, 4, 3, registers=255),
    "ILi128ELi64E": Design(128, 64, 4, 4, registers=128),
    "ILi64ELi128E": Design(64, 128, 2, 4, registers=128),
}


def design_of(kernel: str) -> Design:
    design = next(design for shape, design in DESIGNS.items() if shape in kernel)
    return replace(design, weight_bytes=1) if "Li1EEEE" in kernel else design


def find_nvdisasm() -> str | None:
    """On PATH with a whole CUDA toolkit, or where its wheel puts it."""
    if shutil.which("nvdisasm"):
        return shutil.which("nvdisasm")
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if file.name == "nvdisasm"), None)


NVDISASM = find_nvdisasm()
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
needs_nvdisasm = pytest.mark.skipif(
    NVDISASM is None, reason="needs nvdisasm (pip install nvidia-cuda-nvdisasm)"
)


@dataclass(frozen=True)
class Compiled:
    cubin: Path
    report: str

    def usage(self) -> dict[str, tuple[int, int, int]]:
        """Kernel -> (stack frame, spilled bytes, registers), from ptxas."""
        pattern = (
            r"entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
            r"(\d+) bytes spill loads.*?Used (\d+) registers"
        )
        found = re.findall(pattern, self.report, re.DOTALL)
        return {
            name: (int(stack), int(stores) + int(loads), int(registers))
            for name, stack, stores, loads, registers in found
        }

    def instructions(self) -> dict[str, list[str]]:
        """Kernel -> opcodes with their suffixes, in order."""
        assert NVDISASM is not None
        done = subprocess.run(
            [NVDISASM, "-c", str(self.cubin)], capture_output=True, text=True, check=True
        )
        sections = re.split(r"^\.text\.(\S+):$", done.stdout, flags=re.MULTILINE)[1:]
        pattern = r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)"
        return {
            name: re.findall(pattern, body)
            for name, body in zip(sections[::2], sections[1::2], strict=True)
        }


def compiled_for(arch: str, source: str, folder: Path) -> Compiled:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc on PATH")
    cubin = folder / "kernels.cubin"
    command = ["nvcc", "-std=c++17", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}"]
    command += [f"-I{ROOT / 'cpp'}", f"-I{ROOT / 'cpp' / 'include'}", "-Xptxas=-v", "-cubin"]
    command += [str(ROOT / "cpp" / "kernels" / source), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Compiled(cubin, done.stderr)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compiled_for(request.param, "mapKvCacheCuda.cu", tmp_path_factory.mktemp("cubin"))


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compiled_for("90a", "mapKvCacheHopper.cu", tmp_path_factory.mktemp("cubin"))


@needs_nvcc
def test_kernels_spill_nothing(compiled: Compiled) -> None:
    usage = compiled.usage()
    assert sum("groupedGemm" in name for name in usage) == 2 * 2 * len(DESIGNS)
    for name, (stack, spilled, registers) in usage.items():
        assert stack == spilled == 0, f"{name}: {stack} bytes of stack, {spilled} spilled"
        if "groupedGemm" in name:
            assert registers <= design_of(name).registers, f"{name} uses {registers} registers"


@needs_nvcc
@needs_nvdisasm
def test_kernels_instructions_are_those_of_the_design(compiled: Compiled) -> None:
    for name, opcodes in compiled.instructions().items():
        local = [o for o in opcodes if o.startswith(("LDL", "STL"))]
        assert not local, f"{name} goes to local memory: {local}"
        if "groupedGemm" not in name:
            continue
        design = design_of(name)
        assert sum(o.startswith("HMMA.16816.F32") for o in opcodes) == design.products, name
        assert sum(o.startswith("LDSM.16.M88.4") for o in opcodes) == design.matrix_loads, name
        widenings = [o for o in opcodes if o.startswith(("HMUL2", "HFMA2"))]
        assert len(widenings) == design.widenings, f"{name}: {widenings}"
        copies = [o for o in opcodes if o.startswith("LDGSTS")]
        assert len(copies) == design.copies, name
        assert all(".128" in o for o in copies), f"{name} copies less than 16 bytes at a time"


@needs_nvcc
@needs_nvdisasm
def test_kernels_move_16_bytes_at_a_time(compiled: Compiled) -> None:
    """The vector form of every kernel that reads or writes a cache: 8 channels are two accesses in
    float32 and one in half precision; stripRope takes two such runs, copyHeads bits of any kind.
    """
    fewest = {"stripRopeILi8E": (6, 6), "copyHeads": (1, 1), "Gemm": (0, 3), "finishSplits": (0, 3)}
    checked = set()
    for name, opcodes in compiled.instructions().items():
        reads = sum(o.startswith("LDG.") and ".128" in o for o in opcodes)
        writes = sum(o.startswith("STG.") and ".128" in o for o in opcodes)
        for kernel, (fewest_reads, fewest_writes) in fewest.items():
            if kernel in name:
                assert reads >= fewest_reads, name
                assert writes >= fewest_writes, name
                checked.add(kernel)
    assert checked == set(fewest)


@needs_nvcc
def test_kernels_hopper_spills_nothing(hopper: Compiled) -> None:
    usage = hopper.usage()
    assert len(usage) == 1
    for name, (stack, spilled, registers) in usage.items():
        assert stack == spilled == 0, f"{name}: {stack} bytes of stack, {spilled} spilled"
        assert registers <= 168, "384 threads of a block share 65,536 registers at its beginning"
    assert "warning" not in hopper.report, "ptxas waits for each wgmma when it cannot pipeline them"


@needs_nvcc
@needs_nvdisasm
def test_kernels_hopper_instructions_are_those_of_the_design(hopper: Compiled) -> None:
    (opcodes,) = hopper.instructions().values()
    assert not [o for o in opcodes if o.startswith(("LDL", "STL", "HMMA"))]
    assert sum(o.startswith("HGMMA.64x128x16.F32.BF16") for o in opcodes) == 4 * 2
    # Inputs shared: a half multicast, two blocks of weights. Weights shared: two halves, one block.
    boxes = [o for o in opcodes if o.startswith("UTMALDG.2D")]
    assert sum(".MULTICAST" in o for o in boxes) == 2
    assert len(boxes) == 3 + 3
    assert sum(o.startswith("USETMAXREG") for o in opcodes) == 2
    # Arrivals at stages are not fenced: fences as wide as the GPU stand at the cluster's barriers.
    assert sum(o.startswith("MEMBAR.ALL.GPU") for o in opcodes) == 2
    assert sum(o.startswith("UCGABAR_ARV") for o in opcodes) == 2
