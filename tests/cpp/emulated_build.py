"""Compile .cu files for the emulator, each object once: what is in build/emulated is reused while
neither the source, nor any header, nor the flags have changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "emulated"
EMULATOR = ROOT / "cpp" / "emulator"

# No contraction of a * b + c: roundings are those that the source spells.
FLAGS = ("-std=c++17", "-O2", "-g1", "-march=native", "-ffp-contract=off", "-fPIC")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
# The translation of PTX declares every virtual register; most are never read.
PTX_FLAGS = ("-O1", "-w")


def cuda_include() -> Path | None:
    """NVIDIA's headers (cuda_bf16.h and what it needs), or None."""
    nvcc = shutil.which("nvcc")
    candidates = [
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")),
        *([Path(nvcc).resolve().parent.parent] if nvcc else []),
        Path("/usr/local/cuda"),
    ]
    return next((c / "include" for c in candidates if (c / "include/cuda_bf16.h").exists()), None)


def missing() -> str:
    """Why nothing can be compiled here; empty when it can."""
    if shutil.which("g++") is None:
        return "g++ is not on PATH"
    if cuda_include() is None:
        return "no CUDA headers: set CUDA_HOME to a toolkit with include/cuda_bf16.h"
    return ""


def shared_object(
    name: str,
    sources: Sequence[Path],
    *,
    ptx: Sequence[Path] = (),
    translations: Sequence[Path] = (),
    arch: str = "sm_80",
) -> Path:
    """``lib<name>.so`` of .cu and .cpp sources and the emulator. The PTX that nvcc emits for the
    files in ``ptx``, for ``arch``, is translated and linked in, for launches with KernelPath::kPTX;
    so are ``translations``, written by ``translated`` or ``translated_text``.
    """
    objects = [*_runtime(), *(_object(source, WARNINGS) for source in sources)]
    for translation in [*(translated(path, arch) for path in ptx), *translations]:
        objects.append(_object(translation, PTX_FLAGS))
    return _link(f"lib{name}.so", objects, ("-shared",))


def program(name: str, sources: Sequence[Path], sanitizer: str) -> Path:
    """An executable whose kernels are instrumented with sanitizers, as -fsanitize names
    them. The emulator itself is not: it tells the sanitizer what it does.
    """
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    objects = [*_runtime(), *(_object(source, (*WARNINGS, *flags)) for source in sources)]
    return _link(f"{name}-{sanitizer.replace(',', '-')}", objects, flags)


def translated(source: Path, arch: str = "sm_80") -> Path:
    """The C++ of the PTX that nvcc emits for a .cu file."""
    key = _key(source, (arch,), [*EMULATOR.glob("*.py")])
    result = CACHE / f"{source.stem}-{arch}-{key}.ptx.cpp"
    if not result.exists():
        text = result.with_suffix("")  # ....ptx
        virtual = f"compute_{arch.removeprefix('sm_')}"
        options = ["-std=c++17", "-O3", f"-arch={virtual}", f"-I{ROOT / 'cpp'}", "-ptx"]
        _run(["nvcc", *options, str(source), "-o", str(text)])
        partial = _partial(result)
        _run([sys.executable, str(EMULATOR / "ptxToCpp.py"), str(text), str(partial)])
        partial.replace(result)
    return result


def translated_text(ptx: str, name: str) -> Path:
    """The C++ of PTX given as text."""
    key = hashlib.sha256(
        (ptx + "".join(p.read_text() for p in sorted(EMULATOR.glob("*.py")))).encode()
    ).hexdigest()[:16]
    CACHE.mkdir(parents=True, exist_ok=True)
    text, result = CACHE / f"{name}-{key}.ptx", CACHE / f"{name}-{key}.ptx.cpp"
    if not result.exists():
        text.write_text(ptx)
        partial = _partial(result)
        _run([sys.executable, str(EMULATOR / "ptxToCpp.py"), str(text), str(partial)])
        partial.replace(result)
    return result


def _runtime() -> list[Path]:
    # Tensor-core arithmetic is where the time goes: -O3 turns its inner loops into vectors.
    return [_object(source, (*WARNINGS, "-O3")) for source in sorted(EMULATOR.glob("*.cpp"))]


def _object(source: Path, flags: Sequence[str]) -> Path:
    result = CACHE / f"{source.stem}-{_key(source, flags)}.o"
    if not result.exists():
        partial = _partial(result)
        includes = [f"-I{ROOT / 'cpp'}", f"-I{ROOT / 'cpp/include'}", f"-isystem{cuda_include()}"]
        options = [*FLAGS, *flags, "-DTRTLLM_KVMAP_EMULATE", *includes]
        _run(["g++", *options, "-x", "c++", "-c", str(source), "-o", str(partial)])
        partial.replace(result)
    return result


def _link(name: str, objects: Sequence[Path], flags: Sequence[str]) -> Path:
    key = hashlib.sha256(" ".join([*map(str, objects), *flags]).encode()).hexdigest()[:16]
    result = CACHE / key / name
    if not result.exists():
        result.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(result)
        _run(["g++", *flags, *map(str, objects), "-o", str(partial), "-ldl", "-lpthread"])
        partial.replace(result)
    return result


def _key(source: Path, flags: Sequence[str], more: Sequence[Path] = ()) -> str:
    digest = hashlib.sha256(" ".join([*FLAGS, *flags]).encode())
    headers = [*EMULATOR.glob("*.h"), *(ROOT / "cpp/kernels").glob("*.cuh")]
    CACHE.mkdir(parents=True, exist_ok=True)
    for path in [source, *sorted([*headers, *more])]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _partial(result: Path) -> Path:
    """Written first and then renamed, so that two runs at once do not see half a file."""
    return result.with_name(f"{os.getpid()}-{result.name}")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
