"""Shared objects for tests, built with g++ from the product's own sources, once per content."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "tests" / "kernels"
# What the emulator asks for: rounding as written, so that g++ and nvcc agree.
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-w")


def cuda_include() -> Path:
    """The folder of the CUDA headers."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return Path(home) / "include"


def build_library(
    name: str,
    sources: Sequence[Path],
    cpp: Path = ROOT / "cpp",
    flags: Sequence[str] = (),
    cache: Path = CACHE,
) -> Path:
    """A shared object of ``sources`` (.cpp or .cu), compiled against the headers below ``cpp``.

    Objects are kept by the digest of what they are made of: the source, its headers, the flags.
    """
    objects = [_compile(path, cpp, (*FLAGS, *flags), cache) for path in sources]
    key = hashlib.sha256("".join(str(path) for path in objects).encode()).hexdigest()[:16]
    library = cache / f"lib{name}-{key}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        _run(["g++", "-shared", *flags, *map(str, objects), "-o", str(made), "-ldl", "-lpthread"])
        made.rename(library)
    return library


def build_sanitized(sanitizer: str, cpp: Path = ROOT / "cpp", cache: Path = CACHE) -> Path:
    """sanitizedMap.cpp as a program whose kernels are instrumented, as -fsanitize names it. The
    emulator itself is not: it tells the sanitizer what it does.
    """
    plain = (*FLAGS, "-DTRTLLM_KVMAP_EMULATE", "-march=native", "-g1")
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-O1")
    emulator = sorted((cpp / "emulator").glob("*.cpp"))
    kernels = [*(cpp / "kernels").glob("*.cpp"), *(cpp / "kernels").glob("*.cu")]
    kernels = [*sorted(kernels), ROOT / "tests" / "cpp" / "sanitizedMap.cpp"]
    objects = [_compile(path, cpp, plain, cache) for path in emulator]
    objects += [_compile(path, cpp, (*plain, *flags), cache) for path in kernels]
    key = hashlib.sha256("".join(str(path) for path in objects).encode()).hexdigest()[:16]
    program = cache / f"sanitized-{sanitizer.replace(',', '-')}-{key}"
    if not program.exists():
        made = program.with_suffix(f".{os.getpid()}")
        _run(["g++", *flags, *map(str, objects), "-o", str(made), "-ldl", "-lpthread"])
        made.rename(program)
    return program


def included(path: Path, cpp: Path) -> list[Path]:
    """``path`` and every header of ours that it includes, directly or not, sorted."""
    seen: set[Path] = set()
    left = [path]
    while left:
        here = left.pop()
        seen.add(here)
        for name in re.findall(r'^\s*#include [<"]([^>"]+)[>"]', here.read_text(), re.MULTILINE):
            for folder in (here.parent, cpp, cpp / "include"):
                if (folder / name).is_file() and (folder / name) not in seen:
                    left.append(folder / name)
                    break
    return sorted(seen)


def _compile(path: Path, cpp: Path, flags: Sequence[str], cache: Path) -> Path:
    texts = b"".join(part.read_bytes() for part in included(path, cpp))
    key = hashlib.sha256(texts + " ".join(flags).encode()).hexdigest()[:16]
    made = cache / f"{path.stem}-{key}.o"
    if not made.exists():
        cache.mkdir(parents=True, exist_ok=True)
        fresh = made.with_suffix(f".{os.getpid()}")
        includes = [f"-I{cpp}", f"-I{cpp / 'include'}", f"-I{cuda_include()}"]
        _run(["g++", *flags, *includes, "-x", "c++", "-c", str(path), "-o", str(fresh)])
        fresh.rename(made)
    return made


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise RuntimeError(f"{' '.join(command[:3])} ... failed:\n{done.stderr[-4000:]}")


def kernel_sources(cpp: Path = ROOT / "cpp") -> list[Path]:
    """The whole native map with the emulator in place of a GPU, and the C door to it."""
    return [
        *sorted((cpp / "kernels").glob("*.cpp")),
        *sorted((cpp / "kernels").glob("*.cu")),
        *sorted((cpp / "emulator").glob("*.cpp")),
        ROOT / "tests" / "cpp" / "kernelDriver.cpp",
    ]


def translated_kernels(cpp: Path = ROOT / "cpp", cache: Path = CACHE) -> list[Path]:
    """C++ of the PTX that nvcc emits for the kernels, for launches on the emulator's PTX path."""
    sources = {"mapKvCacheCuda.cu": "compute_80", "mapKvCacheHopper.cu": "compute_90a"}
    return [_translate(cpp / "kernels" / name, arch, cpp, cache) for name, arch in sources.items()]


def _translate(source: Path, arch: str, cpp: Path, cache: Path) -> Path:
    translator = cpp / "emulator" / "ptxToCpp.py"
    parts = [*included(source, cpp), *sorted(translator.parent.glob("*.py"))]
    key = hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()[:16]
    made = cache / f"{source.stem}-{key}.ptx.cpp"
    if not made.exists():
        cache.mkdir(parents=True, exist_ok=True)
        ptx, fresh = cache / f"{source.stem}-{key}.ptx", made.with_suffix(f".{os.getpid()}")
        options = ["-std=c++17", "-O3", f"-arch={arch}", f"-I{cpp}", f"-I{cpp / 'include'}"]
        _run(["nvcc", *options, "-ptx", str(source), "-o", str(ptx)])
        _run([sys.executable, str(translator), str(ptx), str(fresh)])
        fresh.rename(made)
    return made
