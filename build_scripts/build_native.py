"""Build the native part into build/native: kernels, torch operators, the TensorRT plugin.

    python build_scripts/build_native.py                   everything this machine can build
    python build_scripts/build_native.py --no-plugin       without the TensorRT plugin
    python build_scripts/build_native.py --python PYTHON   against the torch of that interpreter
    python build_scripts/build_native.py --offline         download nothing: use what is there
    python build_scripts/build_native.py --wheel DIR       a wheel of the package with all of it

CMake, Ninja and the headers of TensorRT come from package registries when they are not at hand. A
C++17 compiler is needed; with nvcc (12.8 or newer) the CUDA kernels and the plugin are built as
well. The Python package works without any of it, on the backends `reference` and `cpu`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from environment import MAIN, ROOT
from tensorrt_headers import tensorrt_headers

BUILD = ROOT / "build"
OUTPUT = BUILD / "native"
TOOLS = ("cmake>=3.25", "ninja>=1.11")
# Machine code for Ampere and later (80), Hopper (90a) and Blackwell (100a), PTX of 80 for the rest.
ARCHITECTURES = "80;90a-real;100a-real"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", type=Path, help="the interpreter whose torch to build against")
    parser.add_argument("--architectures", default=ARCHITECTURES, help="CMAKE_CUDA_ARCHITECTURES")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the libraries go")
    parser.add_argument("--wheel", type=Path, help="make a wheel in this folder instead")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--offline", action="store_true", help="download and install nothing")
    parser.add_argument("--tests", action="store_true", help="also what tests/tensorrt needs")
    parser.add_argument("--target", nargs="+", default=[], help="of CMake; everything if left out")
    for part in ("cuda", "torch", "plugin"):
        parser.add_argument(f"--no-{part}", action="store_true", help=f"leave out {part}")
    options = parser.parse_args()
    definitions = choose_parts(options)
    cmake, environment = find_cmake(options.offline)
    if options.wheel:
        return build_wheel(options, definitions, environment)
    configure = [cmake, "-S", str(ROOT), "-B", str(options.output), "-G", "Ninja"]
    configure += [f"-D{name}={value}" for name, value in definitions.items()]
    build = [cmake, "--build", str(options.output), "--parallel", str(options.jobs)]
    build += [word for target in options.target for word in ("--target", target)]
    for command in (configure, build):
        if subprocess.run(command, check=False, env=environment).returncode:
            print(f"The native part could not be built; the command was: {' '.join(command)}")
            return 1
    libraries = sorted(path.name for path in options.output.glob("libtrtllm_kvmap_*.so"))
    print(f"Built in {options.output}: {', '.join(libraries)}.")
    return 0


def build_wheel(
    options: argparse.Namespace, definitions: dict[str, str], environment: dict[str, str]
) -> int:
    """The package and the libraries in one wheel, made by the build backend of pyproject.toml."""
    command = [str(options.python or sys.executable), "-m", "pip", "wheel", "--no-deps"]
    command += ["--wheel-dir", str(options.wheel), "--config-settings", "wheel.cmake=true"]
    for name, value in definitions.items():
        command += ["--config-settings", f"cmake.define.{name}={value}"]
    if options.offline:  # then scikit-build-core must be installed beside that pip
        command.append("--no-build-isolation")
    environment = {**environment, "CMAKE_BUILD_PARALLEL_LEVEL": str(options.jobs)}
    if subprocess.run([*command, str(ROOT)], check=False, env=environment).returncode:
        print(f"The wheel could not be built; the command was: {' '.join(command)}")
        return 1
    return 0


def choose_parts(options: argparse.Namespace) -> dict[str, str]:
    """CMake's definitions; each part that is left out says why."""
    definitions = {"CMAKE_BUILD_TYPE": "Release"}
    nvcc = None if options.no_cuda else find_nvcc()
    if nvcc is None:
        print("No CUDA kernels and no plugin: " + ("asked so." if options.no_cuda else NO_NVCC))
    else:
        definitions["CMAKE_CUDA_COMPILER"] = nvcc
        definitions["CMAKE_CUDA_ARCHITECTURES"] = options.architectures
    torch = None if options.no_torch else find_torch(options)
    if torch is not None:
        definitions["TRTLLM_KVMAP_TORCH_DIR"] = str(torch)
    plugin = nvcc is not None and not options.no_plugin
    headers = None
    if plugin or options.tests:
        headers = tensorrt_headers(BUILD, offline=options.offline)
        if headers is None:
            print("No plugin: the headers of TensorRT are not here; set TENSORRT_INCLUDE_DIR.")
        else:
            definitions["TENSORRT_INCLUDE_DIR"] = str(headers)
    parts = {
        "CUDA": nvcc is not None,
        "TORCH": torch is not None,
        "PLUGIN": plugin and headers is not None,
        "TESTS": options.tests and headers is not None,
    }
    return definitions | {
        f"TRTLLM_KVMAP_{name}": "ON" if on else "OFF" for name, on in parts.items()
    }


NO_NVCC = "nvcc is neither on PATH nor in $CUDA_HOME/bin; install the CUDA toolkit for them."


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))


def find_torch(options: argparse.Namespace) -> Path:
    """The folder of the torch to build against; its interpreter is set up unless one is given."""
    python = options.python
    if python is None:
        python = sys.executable if options.offline else MAIN.ensure()
    # Found without importing it, which would take seconds.
    question = "from importlib.util import find_spec; print(find_spec('torch').origin)"
    answer = subprocess.run(
        [str(python), "-c", question], check=False, capture_output=True, text=True
    )
    if answer.returncode:
        sys.exit(f"{python} has no torch to build against. Give --python, or --no-torch.")
    return Path(answer.stdout.strip()).parent


def find_cmake(offline: bool) -> tuple[str, dict[str, str]]:
    """cmake, and an environment in which it finds ninja."""
    tools = BUILD / "tools"
    path = os.pathsep.join([os.environ.get("PATH", ""), str(tools / "bin")])
    environment = {**os.environ, "PATH": path}
    if not (shutil.which("cmake", path=path) and shutil.which("ninja", path=path)):
        if offline:
            sys.exit("cmake or ninja is not on PATH, and --offline forbids fetching them.")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tools)]
        if subprocess.run([*command, *TOOLS], check=False).returncode:
            sys.exit("pip could not install cmake and ninja; put them on PATH.")
    if tools.is_dir():  # the commands pip puts there look for their modules beside themselves
        environment["PYTHONPATH"] = str(tools)
    return shutil.which("cmake", path=path) or "cmake", environment


if __name__ == "__main__":
    sys.exit(main())
