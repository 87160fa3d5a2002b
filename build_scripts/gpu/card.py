"""The card at hand, as compilers name it."""

from __future__ import annotations

import shutil
import subprocess


def architecture() -> str | None:
    """ "80", "90a", ...: wgmma and TMA need the "a" of Hopper and Blackwell, which compilers' own
    "native" leaves out. None where there is no card.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    found = subprocess.run(query, check=False, capture_output=True, text=True).stdout.split()
    if not found:
        return None
    number = found[0].replace(".", "")
    return f"{number}a" if number in ("90", "100") else number
